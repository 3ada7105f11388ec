from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from sfu.errors import DataError
from sfu.reporting.pictures.choose import pictures_of
from sfu.reporting.pictures.drawing import look_of
from sfu.reporting.report import page, write
from sfu.reporting.report.build import Report, build_report, limits
from sfu.reporting.text_tables import escape_cell

from ..samples import catastrophic_run, good_run, make_row
from .folders import config_with, killed_status, write_run, write_sweep
from .html_checks import check

NOTHING_DRAWN: tuple[list[Any], list[str]] = ([], [])


def troubled(root: Path) -> Path:
    """A sweep with everything in it that can go wrong."""
    write_sweep(root / "sweep", fractions=(0.05, 0.1))
    write_run(root / "killed", None, config_with(seed=7), **killed_status())
    write_run(root / "failed", None, config_with(seed=8), state="failed", error="SingularHessianError: head.l2 = 0")
    write_run(root / "newer", {"schema": 2, "rows": {}}, config_with(seed=9))
    write_run(root / "damaged", None, config_with(seed=10)).joinpath("metrics.json").write_text('{"schema": 1, "ro')
    write_run(root / "settingless", good_run()).joinpath("config.yaml").unlink()
    lacking = good_run()
    del lacking["rows"]["closed_form"]["mia"]
    write_run(root / "lacking", lacking, config_with(seed=11), overrides=("seed=11",))
    return root


def bare(report: Report) -> str:
    """The page without its pictures, which take time."""
    return page.html_page(report, [NOTHING_DRAWN] * len(report.sections))


def test_every_run_is_in_a_table_or_named_with_its_trouble(tmp_path: Path) -> None:
    report = build_report([troubled(tmp_path)])
    assert (len(report.runs), len(report.finished)) == (12, 8)
    told = {report.name_of(run): (run.state, run.problem) for run in report.troubled}
    assert told["killed"] == ("killed", "killed midway")
    assert told["failed"] == ("failed", "SingularHessianError: head.l2 = 0")
    assert told["newer"][1] == "metrics.json has schema 2, and this sfu reads 1. Use the sfu that wrote it."
    assert told["damaged"][1].startswith("metrics.json cannot be read (Invalid JSON")
    assert told["settingless"][1].startswith("config.yaml cannot be read")
    (section,) = report.sections
    half = next(g for g in section.table.groups if g.overrides == {"forget.fraction": "0.1"})
    assert (half.n, half.n_failed) == (4, 4)
    assert half.rows["closed_form"]["mia"].missing == 1
    parsed = check(bare(report))
    for text in ("killed midway", "has schema 2", "closed_form at forget.fraction = 0.1: mia over 3 of 4 runs"):
        assert text in parsed.text
    for form in ("markdown", "latex"):
        assert "SingularHessianError" in write.TEXTS[form](report)


LAUGHS = "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("status.json", '{"state": "", "started": "2026-11-27", "overrides": []}'),
        ("status.json", "[" * 100_000),
        ("status.json", '{"state": "finished", "started": 5, "overrides": []}'),
        ("status.json", '{"state": "finished", "started": "2026-11-27", "overrides": "seed=1"}'),
        ("metrics.json", '{"schema": 1, "rows": "jit"}'),
        ("metrics.json", '{"schema": 1, "rows": {"jit": ["x"]}}'),
        ("metrics.json", '{"schema": 1, "rows": {"jit": {"distance": ' + "9" * 400 + "}}}"),
        ("metrics.json", '{"schema": 1, "run": {"data": "x", "head": []}, "rows": {}}'),
        ("metrics.json", '{"schema": 1, "rows": ' + '{"a":' * 5000),
        ("config.yaml", LAUGHS),
        ("config.yaml", "a: &a [*a]"),
        ("config.yaml", "a: " + "[" * 400 + "]" * 400),
        ("config.yaml", "a: 0x" + "f" * 20_000),
        ("config.yaml", "!!int ''"),
    ],
)
def test_a_bad_folder_costs_the_report_a_line(tmp_path: Path, file: str, text: str) -> None:
    write_run(tmp_path / "good", good_run())
    write_run(tmp_path / "bad", good_run(), config_with(seed=1)).joinpath(file).write_text(text)
    report = build_report([tmp_path])
    assert [run.folder.name for run in report.troubled] == ["bad"]
    assert report.troubled[0].problem.startswith(f"{file} cannot be read (")
    assert [list(group.rows) for section in report.sections for group in section.table.groups if group.n] == [
        list(good_run()["rows"])
    ]
    for form in ("markdown", "latex", "csv"):
        assert write.TEXTS[form](report)
    assert f"{file} cannot be read" in check(bare(report)).text


def test_no_run_at_all_and_none_with_results(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no runs in .*empty\. A run's folder holds status\.json"):
        build_report([tmp_path / "empty"])
    write_run(tmp_path / "killed", None, **killed_status())
    report = build_report([tmp_path])
    assert report.sections == []
    assert report.title == "sfu: no results"
    assert "killed midway" in check(bare(report)).text
    write_run(tmp_path / "alone" / "x", None, **killed_status()).joinpath("config.yaml").unlink()
    report = build_report([tmp_path / "alone"])
    assert report.sections == []
    assert "No run could be put into a table" in check(bare(report)).text


def test_failed_runs_are_one_list_whatever_was_typed(tmp_path: Path) -> None:
    """Each has a configuration of its own, so each would be a table."""
    write_run(tmp_path / "good", good_run())
    for index in range(8):
        typo = config_with(dataset__name=f"digit{index}")
        write_run(tmp_path / f"typo{index}", None, typo, state="failed", error=f"ConfigError: digit{index}?")
    report = build_report([tmp_path])
    assert [section.title for section in report.sections] == ["digits"]
    assert [run.folder.name for run in report.left_out] == [f"typo{index}" for index in range(8)]
    parsed = check(bare(report))
    assert "No run finished" not in parsed.text
    assert "8 runs have no results." in parsed.text
    console = Console(width=80, record=True, file=io.StringIO())
    write.print_report(report, console)
    printed = console.export_text()
    assert "No run finished" not in printed
    for index in range(8):
        texts = (parsed.text, printed, write.markdown_report(report), write.latex_report(report))
        assert [text.count(f"ConfigError: digit{index}?") for text in texts] == [1] * 4


def test_harm_is_one_sentence_for_all_tables(tmp_path: Path) -> None:
    for index in range(10):
        data = config_with(dataset__name="features", dataset__path=f"{index}.npz")
        write_run(tmp_path / str(index), catastrophic_run() if index else good_run(), data)
    report = build_report([tmp_path])
    assert len(report.sections) == 10
    text = check(bare(report)).text
    assert text.count("Worse than doing nothing:") == 1
    assert "unlearned_minus_paper at 9 of 10 settings (distance 801)." in text
    assert text.count("Closest to Retrained without source data") == 10


def test_a_row_shows_its_look_what_it_sees_and_whether_its_step_was_applied(tmp_path: Path) -> None:
    metrics = catastrophic_run()
    metrics["rows"]["closed_form"].update(applied=False, distance=1.0)
    write_run(tmp_path, metrics)
    parsed = check(bare(build_report([tmp_path])))
    told = dict(re.findall(r"^(\S)\n(\w+) ", parsed.text, flags=re.M))
    assert told == {look_of(name).symbol: name for name in metrics["rows"]}
    assert set(parsed.all("style")) == {f"color:{look_of(name).colour}" for name in metrics["rows"]}
    for words in ("original nothing", "unlearned_plus retained data", "closed_form forget set, not applied"):
        assert f"\n{words}\n" in parsed.text


def test_limits_begin_with_what_is_peculiar(tmp_path: Path) -> None:
    once = write_run(tmp_path / "a" / "0", good_run()).parent
    assert "run once" in limits(build_report([once]))[0]
    three = build_report([troubled(tmp_path / "b")])
    assert limits(three)[0].startswith("A spread over 3 runs is itself uncertain")
    assert limits(three)[1] == "5 of 12 runs have a problem, listed below."
    other = good_run()
    other["run"]["versions"] = {"torch": "1.0"}
    write_run(once / "1", other, config_with(seed=1))
    assert any("different versions" in line for line in limits(build_report([once])))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    few = ("unlearned_plus", "closed_form", "unlearned_minus_paper")  # drawing takes time
    report = build_report([write_sweep(root / "runs", fractions=(0.05, 0.1), seeds=2, without=few)])
    write.save_report(report, root / "out")
    return root / "out"


def test_the_files_of_a_report(saved: Path) -> None:
    files = ["pictures", "report.html", "tables.csv", "tables.md", "tables.tex"]
    assert sorted(path.name for path in saved.iterdir()) == files
    names = sorted(path.name for path in (saved / "pictures").iterdir())
    assert names == ["1-1-curve.png", "1-2-plane.png", "1-3-gaps.png"]
    with Image.open(saved / "pictures" / "1-1-curve.png") as picture:
        assert picture.width > 1000
    parsed = check((saved / "report.html").read_text())
    assert len(parsed.images()) == 6
    assert (saved / "report.html").stat().st_size < 1_000_000
    assert "unlearned_minus 0.308 to 0.339" in str(parsed.images()[0]["alt"])
    assert "+1.0 [+1.0, +1.0] ≠" in parsed.text  # the untouched head's forget gap, the same in both runs
    for heading in ("Differences from Retrained", "What the numbers do not show", "Settings", "Versions", "Runs"):
        assert heading in parsed.text
    assert parsed.text.index("Closest to Retrained") < parsed.text.index("Method")  # verdict first


def test_csv_is_one_table_with_the_settings_of_all_sections(tmp_path: Path) -> None:
    write_sweep(tmp_path / "a", fractions=(0.1, 0.2))
    write_run(tmp_path / "b", good_run(), config_with(dataset__name="features", dataset__path="f.npz"))
    rows = list(csv.DictReader(io.StringIO(write.csv_report(build_report([tmp_path])))))
    assert len(rows) == 2 * 6 + 5
    row = next(r for r in rows if r["forget.fraction"] == "0.2" and r["method"] == "original")
    assert float(row["test_accuracy.mean"]) == pytest.approx(75.0)
    assert float(row["test_accuracy.stderr"]) == pytest.approx(0.2 / 3**0.5)
    assert {r["forget.fraction"] for r in rows if r["section"] == "features f.npz"} == {""}


HOSTILE = '<script>alert(1)</script>"><img src=x onerror=alert(2)> | \\input{x} [red] {{ 7*7 }}'


def test_hostile_names_are_text_everywhere(tmp_path: Path) -> None:
    metrics = good_run()
    metrics["rows"][HOSTILE] = make_row(73.6, 74.3, 73.9, 50.3, 0.4, note=HOSTILE)
    metrics["run"]["versions"][HOSTILE] = HOSTILE
    write_run(tmp_path / "a", metrics, config_with(dataset__path=HOSTILE), overrides=(f"dataset.path={HOSTILE}",))
    write_run(tmp_path / "b", None, config_with(seed=1), state="failed", error=HOSTILE)
    report = build_report([tmp_path], title=HOSTILE)
    parsed = check(bare(report))
    assert HOSTILE in parsed.text
    assert parsed.images() == []
    assert escape_cell(HOSTILE) in write.markdown_report(report)
    assert "\\input" not in re.sub(r"^%.*$", "", write.latex_report(report), flags=re.M)
    for picture in pictures_of(report.sections[0].table)[0]:
        assert picture.draw(True) is not None


def test_a_home_folder_is_not_mailed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    run = write_run(tmp_path / "a", good_run(), config_with(dataset__path=f"{tmp_path}/x.npz"))
    (run / "metrics.json").write_text(json.dumps({"schema": 3}))
    write_run(tmp_path / "b", good_run(), config_with(dataset__path=f"{tmp_path}/x.npz", seed=1))
    html = bare(build_report([tmp_path]))
    assert str(tmp_path) not in html
    assert "~/x.npz" in html


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_real_browser_nothing_is_wider_than_the_window(saved: Path, tmp_path: Path, width: int) -> None:
    """The page reports its own widths: a script for the test alone, in a copy of the page."""
    probe = (
        "<script>document.title = JSON.stringify({page: document.documentElement.scrollWidth, window: innerWidth, "
        "shown: [...document.images].filter(i => i.offsetWidth > 0).map(i => [i.className, i.naturalWidth > 0]), "
        "widths: [...document.querySelectorAll('main p, .scroll, figure, .verdict')].map(e => e.offsetWidth), "
        "broken: [...document.querySelectorAll('dt')].filter(e => e.offsetHeight > 30).map(e => e.textContent)})"
        "</script></body>"
    )
    copy = tmp_path / "probe.html"
    copy.write_text((saved / "report.html").read_text().replace("</body>", probe))
    frame = tmp_path / "frame.html"  # headless windows are 500 pixels wide at least
    frame.write_text(
        f'<iframe src="probe.html" style="width:{width}px;height:800px;border:0"></iframe><script>onload = () => '
        "document.body.append(document.querySelector('iframe').contentDocument.title)</script>"
    )
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--allow-file-access-from-files", "--window-size=1400,900", "--dump-dom", frame.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    seen = json.loads(re.search(r"\{.*\}", done.stdout).group().replace("&quot;", '"'))
    assert seen["window"] == width
    assert seen["page"] <= width
    assert len(set(seen["widths"])) == 1  # text, tables and pictures
    assert seen["broken"] == []
    assert seen["shown"] == [["narrow" if width < 700 else "wide", True]] * 3


def test_many_repeated_runs_do_not_bury_the_verdict_in_the_terminal(tmp_path: Path) -> None:
    for index in range(24):
        write_run(tmp_path / f"r{index}", good_run(), config_with(seed=index // 2))
    console = Console(width=200, record=True, file=io.StringIO())
    write.print_report(build_report([tmp_path]), console)
    text = console.export_text()
    assert "and 4 more (report.html lists all)" in text
    assert text.count(", replaced by ") == 8
