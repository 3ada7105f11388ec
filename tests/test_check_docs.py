"""scripts/check_docs.py finds figures that are off, and every table of the documentation is marked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reporting.scripts import ROOT, load_script

check_docs = load_script("check_docs")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# A command that leaves the runs of three seeds at two values of l2, as sfu would, and prints a number and a table.
MAKE = """\
import json, pathlib
runs = [(0.1, 0, 0.30), (0.1, 1, 0.31), (0.1, 2, 0.35), (1.0, 0, 0.5), (1.0, 1, 0.7)]
for number, (l2, seed, distance) in enumerate(runs):
    folder = pathlib.Path("outputs") / str(number)
    folder.mkdir(parents=True)
    found = {"distance": distance, "test_gap": -distance, "test_accuracy": 90 + seed, "details": {"rho": 2}}
    rows = {"closed_form": found, "original": {"distance": 1.0, "test_accuracy": 95.0}}
    (folder / "metrics.json").write_text(json.dumps({"schema": 1, "run": {}, "rows": rows}))
    (folder / "config.yaml").write_text(json.dumps({"head": {"l2": l2}, "seed": seed}))
print("worst 1.012, mean 1.004")
print("| loss | `sharp` |\\n|---|---|\\n| `logistic` | 0.0351 |\\n| `softmax` | none |")
"""
PAGE = """\
# Page

    python make.py    # prints some numbers

<!-- check: python make.py -->
| method | l2 | test | distance | seconds |
|---|---|---|---|---|
| `closed_form`: a method | 0.1 | 91.0 ± 1.0 (73) | **0.320 ± 0.026** | 7 |
| `original` | 0.1 | 95.0 | 1 | 0.1 |
| `closed_form` | 1e0 | | 0.6 | |

The gap is at most 0.35, the ratio 1.012 (1.004 on average) and rho is 2.
<!-- check: python make.py | 0.35 >= max abs closed_form.test_gap head.l2=0.1 | 1.012 = /worst (\\S+),/ |
1.004 = /mean (\\S+)/ | 2 = closed_form.details.rho seed=0 -->

<!-- check: python make.py | printed -->
| loss | `sharp` |
|---|---|
| `logistic` | 0.035 |
| `softmax` | none |
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "make.py").write_text(MAKE)
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("python make.py", f"python {tmp_path}/make.py"))
    return page


def run(page: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = check_docs.main([*options, str(page)])
    return code, capsys.readouterr().out


def test_true_figures_pass_each_with_a_line(page, capsys):
    code, shown = run(page, capsys)
    assert code == 0, shown
    assert "closed_form.distance head.l2=0.1: claimed 0.320 ± 0.026, measured 0.32 ± 0.026, spread 0.026, ok" in shown
    assert "10 figures checked, 0 off; 0 markers do not work; 0 figures need more options." in shown
    assert shown.count(", ok\n") == 10


@pytest.mark.parametrize(
    ("true", "false", "what"),
    [
        ("0.320 ± 0.026", "0.350 ± 0.026", "closed_form.distance"),  # off by more than its spread
        ("0.320 ± 0.026", "0.320 ± 0.060", "closed_form.distance"),  # a spread that hides everything
        ("95.0", "95.1", "original.test_accuracy"),
        ("| 0.1 | 95.0 | 1 |", "| 0.1 | 95.0 | 0 |", "original.distance"),
        ("| 0.6 |", "| 0.8 |", "closed_form.distance"),  # the spread of its two seeds is 0.14
        ("0.35", "0.34", "max abs closed_form.test_gap"),
        ("1.012", "1.013", "worst"),
        ("1.004", "1.003", "mean"),
        ("rho is 2", "rho is 3", "closed_form.details.rho"),
        ("0.035 |", "0.036 |", "#0.1.0"),
    ],
)
def test_a_figure_that_is_altered_is_off(page, capsys, true, false, what):
    text = page.read_text()
    assert true in text
    text = text.replace(true, false)  # in the text and in its marker
    page.write_text(text.replace("| 2 = closed", "| 3 = closed") if "rho" in false else text)
    code, shown = run(page, capsys)
    assert code == 1, shown
    (off,) = [line for line in shown.splitlines() if line.endswith(", OFF")]
    assert what in off
    assert "10 figures checked, 1 off; 0 markers do not work" in shown


@pytest.mark.parametrize(
    ("true", "false", "message"),
    [
        ("The gap is at most 0.35", "The gap is at most 0.4", "the text before the marker does not say 0.35"),
        ("check: python", "check: sfu", "no page shows a command that begins with 'sfu"),
        ("| 0.1 | 91.0", "| 0.2 | 91.0", "the command gives no closed_form.test_accuracy {'head.l2': '0.2'}"),
        ("`original` | 0.1", "`retrained` | 0.1", "the command gives no retrained.test_accuracy"),
        ("| 0.6 |", "| about six |", "'about six' holds 0 figures, not 1"),
        ("| seconds |", "| hours |", "the column 'hours' is unknown to scripts/check_docs.py"),
        ("1.012 = /worst", "1.012 is /worst", "is no claim"),
        ("make.py    #", "make.py 1 2 && false    #", "ended with exit code 1"),
        ("| 0.035 |", "| 0.035 0.1 |", "the command gives no #0.1.1"),
    ],
)
def test_a_marker_or_command_that_does_not_work_ends_with_2(page, capsys, true, false, message):
    text = page.read_text()
    assert true in text
    page.write_text(text.replace(true, false))
    code, shown = run(page, capsys)
    assert code == 2, shown
    assert message in shown


def test_update_writes_what_was_measured_into_tables_and_leaves_texts(page, capsys):
    true = page.read_text()
    text = (
        true.replace("0.320 ± 0.026", "0.450 ± 0.1")
        .replace("| 95.0 | 1 |", "| 7.1 | 1 |")
        .replace("0.035 |", "9.999 |")
    )
    page.write_text(text.replace("1.004", "1.009"))
    assert run(page, capsys, "--update")[0] == 1
    assert page.read_text() == true.replace("1.004", "1.009")
    assert run(page, capsys)[0] == 1
    page.write_text(true)
    assert run(page, capsys, "--update")[0] == 0
    assert page.read_text() == true


def test_what_needs_data_or_long_is_left_out_and_counted(page, tmp_path, capsys):
    text = page.read_text().replace("make.py    #", "make.py cifar10_512.npz    #")
    page.write_text(text.replace("printed -->", "printed | long -->"))
    code, shown = run(page, capsys)
    assert code == 0
    assert "0 figures checked, 0 off; 0 markers do not work; 10 figures need more options." in shown
    features = tmp_path / "mine.npz"
    features.write_text("")
    code, shown = run(page, capsys, "--features", str(features))
    assert code == 0
    assert "9 figures checked, 0 off; 0 markers do not work; 1 figures need more options." in shown
    code, shown = run(page, capsys, "--features", str(features), "--all")
    assert "10 figures checked, 0 off" in shown


def test_every_marker_of_the_documentation_can_be_understood(capsys):
    assert check_docs.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert "README.md" in shown
    assert "0 markers do not work" in shown


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_table_with_figures_says_how_it_is_checked_or_why_not(path):
    assert list(check_docs.unmarked_tables(path)) == []


def test_a_table_without_a_marker_is_found(page):
    page.write_text(page.read_text().replace("<!-- check: python", "Text.\n\n<!-- python"))
    assert [line.partition(": ")[2] for line in check_docs.unmarked_tables(page)] == []
    page.write_text("| method | distance |\n|---|---|\n| `a` | 0.3 |\n")
    assert list(check_docs.unmarked_tables(page)) == ["page.md:1: | method | distance |"]


@pytest.mark.parametrize(
    ("cell", "figures"),
    [
        ("73.7 ± 0.1 (72)", [("73.7", 0.1, 0.1)]),
        ("**2,158 ± 1,004**", [("2,158", 1.0, 1004.0)]),
        ("0 (2e-13)", [("0", 1.0, None)]),
        ("72.6 / 73.6, **0.302**", [("72.6", 0.1, None), ("73.6", 0.1, None), ("0.302", 0.001, None)]),
        ("7e-5", [("7e-5", 1e-5, None)]),
        ("2.5e-4", [("2.5e-4", 1e-5, None)]),
        ("none of the thousand", []),
        ("`unlearned_minus2`", []),
    ],
)
def test_figures_are_read_from_cells(cell, figures):
    found = [(one.text, one.unit, one.spread) for one in check_docs.figures_of(cell)]
    assert [(text, pytest.approx(unit), spread) for text, unit, spread in figures] == found
