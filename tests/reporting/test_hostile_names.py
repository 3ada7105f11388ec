"""Names of rows, files and classes, and messages, as an attacker would choose them, in every medium sfu writes."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from sfu.cli import features as features_cli
from sfu.data.features.store import cached_features
from sfu.progress import ProgressDisplay
from sfu.reporting.pictures.choose import pictures_of
from sfu.reporting.published import csv_published_table, markdown_published_table, published_tables
from sfu.reporting.published import terminal_published_table as terminal_published
from sfu.reporting.report.build import Report, build_report
from sfu.reporting.report.page import html_page
from sfu.reporting.report.write import TEXTS, print_report
from sfu.reporting.terminal import print_run, terminal_table
from sfu.reporting.text_tables import (
    csv_rows,
    csv_table,
    escape_cell,
    latex_table,
    markdown_table,
    run_csv,
    run_markdown,
)
from sfu.results.aggregate import ResultTable, aggregate
from sfu.store import cache_dir
from tests.experiment.cases import sfu, write_folder

from .report.folders import config_with, write_run
from .report.html_checks import check
from .samples import good_run, make_row

CLEAR, BACKWARDS, BELL = "\x1b[2J\x1b[31m", "\u202egnp.exe", "\x07\x9b1m\x08\x7f"
HOSTILE = f"=1+1[red]{CLEAR}{BACKWARDS}{BELL}\n\r\t<script>alert(1)</script>|![x](//evil)`&lt;"
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def hostile_run() -> dict:
    metrics = good_run()
    rows = metrics["rows"]
    rows[HOSTILE] = {**rows.pop("closed_form"), "note": HOSTILE, "tuning": HOSTILE, HOSTILE: 1.0}
    rows["failed"] = make_row(1.0, 1.0, 1.0, 1.0, None, error=f"OSError: {HOSTILE}", note=HOSTILE)
    rows["skipped"] = make_row(70.0, 1.0, 1.0, 1.0, 0.2, applied=False, note=HOSTILE)
    metrics["run"]["data"]["name"] = metrics["run"]["name"] = HOSTILE
    metrics["run"]["forget"] = {"kind": "classes", "classes": [HOSTILE]}
    metrics["run"]["device"] = HOSTILE
    return metrics


def hostile_table() -> ResultTable:
    given = {HOSTILE: HOSTILE, "forget.classes": f"[{HOSTILE}]"}
    runs = [({**given, "seed": str(seed), "dataset.path": f"{HOSTILE}{seed}"}, hostile_run()) for seed in (0, 1)]
    return aggregate([*runs, ({**given, "seed": "2"}, {"error": HOSTILE})])


def hostile_report(folder: Path) -> Report:
    write_run(folder / "a\x1b[31m", hostile_run(), config_with(dataset__path=f"/x/{HOSTILE}", variants={HOSTILE: 1}))
    failed = {"state": "failed", "error": f"OSError: {HOSTILE}", "overrides": (HOSTILE,)}
    write_run(folder / "b", None, config_with(seed=3), **failed)
    return build_report([folder], title=f"my {HOSTILE}")


def printed(show) -> str:
    """What goes to a terminal without colours, so that every escape sequence is an attacker's."""
    file = io.StringIO()
    show(Console(file=file, width=300, force_terminal=True, color_system=None))
    return file.getvalue()


def texts(folder: Path) -> dict[str, str]:
    table, report, published = hostile_table(), hostile_report(folder), published_tables()["table_1"]
    (folder / f"\x1b[31m{BACKWARDS}").touch()
    found = {
        "terminal": printed(lambda console: console.print(terminal_table(table), highlight=False)),
        "run": printed(lambda console: print_run(hostile_run(), folder, console)),
        "published": printed(lambda console: console.print(terminal_published(table, published))),
        "report": printed(lambda console: print_report(report, console)),
        "markdown": markdown_table(table), "run.md": run_markdown(hostile_run()), "latex": latex_table(table),
        "csv": csv_table(table), "run.csv": run_csv(hostile_run()),
        "published.md": markdown_published_table(table, published),
        "published.csv": csv_published_table(table, published),
        "page": html_page(report, [([], [])] * len(report.sections)),
    }  # fmt: skip
    return found | {f"report.{name}": make(report) for name, make in TEXTS.items()}


def test_no_medium_lets_a_name_control_the_terminal_or_turn_text_around(tmp_path: Path) -> None:
    for medium, text in texts(tmp_path).items():
        assert not CONTROL.search(text), (medium, CONTROL.search(text))
        shown = r"\textbackslash{}x1b{[}2J" if "latex" in medium else r"\x1b[2J"
        assert shown in text, medium
        assert "[red]" in text, medium


def test_no_csv_cell_is_a_formula(tmp_path: Path) -> None:
    for medium, text in texts(tmp_path).items():
        if medium.endswith("csv"):
            cells = [cell for line in csv.reader(io.StringIO(text)) for cell in line]
            assert any(cell.startswith("'=1+1") for cell in cells), medium
            assert not [cell for cell in cells if cell.startswith(("=", "@", "\t", "\r")) or re.match(r"[+-]\D", cell)]


@pytest.mark.parametrize("lead", ["=", "+", "-", "@", "\t=", "\r=", "\uff1d", "-1+", "+1-", "-="])
def test_formulas_become_text_and_numbers_stay_numbers(lead: str) -> None:
    (cell,) = next(csv.reader(io.StringIO(csv_rows([f"{lead}cmd|' /C calc'!A0"], []))))
    assert cell[0] not in "=+-@\t\r\uff1d"


def test_numbers_in_csv_are_untouched() -> None:
    values = ["-0.5", "+1e-3", "-7", -0.25, None, True, "a=b", "x@y", "two\nlines"]
    (line,) = csv.reader(io.StringIO(csv_rows(values, [])))
    assert line == ["-0.5", "+1e-3", "-7", "-0.25", "", "true", "a=b", "x@y", "two\nlines"]


def test_markdown_holds_no_html_link_or_picture(tmp_path: Path) -> None:
    for medium, text in texts(tmp_path).items():
        if "md" in medium or "markdown" in medium:
            assert "<" not in text, medium
            assert "](" not in text, medium
            assert "&lt;script>" in text, medium
    assert escape_cell("a & b < c \\ d | e\nf &lt;") == r"a &amp; b &lt; c \\ d \| e f &amp;lt;"


def test_the_page_is_whole_and_runs_nothing(tmp_path: Path) -> None:
    page = check(texts(tmp_path)["page"].replace("//evil", ""))
    assert "<script>alert(1)</script>" in page.text


def test_pictures_can_be_drawn(tmp_path: Path) -> None:
    drawn, _ = pictures_of(hostile_table())
    assert all(picture.wide for picture in drawn)


def test_progress_shows_names_as_they_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with ProgressDisplay() as display, display.stage("[red]row [/] \x1b]0;title\x07"):
        display.say("[bold]file [/] \x1b]0;title\x07")
        time.sleep(0.3)  # the bar is drawn ten times a second
    shown = capsys.readouterr().err
    assert r"[red]row [/] \x1b]0;title\x07" in shown
    assert r"sfu: [bold]file [/] \x1b]0;title\x07" in shown
    assert "\x1b]0" not in shown


def test_errors_and_listings_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sfu(monkeypatch, "dataset=features", "dataset.path='/no/\x1b[31mfile.npz'", "logger=none") == 1
    with pytest.raises(SystemExit):
        features_cli.main(["rm", "\x1b[31m"])
    shown = capsys.readouterr().err
    assert r"sfu: dataset.path=/no/\x1b[31mfile.npz does not exist" in shown
    assert r"sfu-features: \x1b[31m names no features" in shown
    assert "\x1b" not in shown
    features_cli.main(["extract", "dataset=digits", "backbone=pixels"])
    (entry,) = cached_features(cache_dir("features"))
    about = entry.folder / "entry.json"
    about.write_text(about.read_text().replace('"digits"', r'"[red]d\u001b[31m"'))
    capsys.readouterr()
    features_cli.main(["ls"])
    assert r"[red]d\x1b[31m" in capsys.readouterr().out


def test_warnings_of_a_run_on_the_terminal(tmp_path: Path) -> None:
    """In a process of its own, because pytest handles the log of this one."""
    folder = write_folder(tmp_path / "a\x1b[31m", per_class=4, n_test=2)
    (folder / "labels.csv").write_text("file,label\ntrain/class-0/000.png,a\ntrain/class-1/000.png,b\n")
    command = [sys.executable, "-m", "sfu.cli.features", "extract", "dataset=image_folder", "backbone=pixels"]
    settings = [f"dataset.path='{folder}'", "dataset.labels_csv=labels.csv"]
    done = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=120, check=False)
    assert r"a\x1b[31m are not in" in done.stderr
    assert "\x1b" not in done.stderr + done.stdout
