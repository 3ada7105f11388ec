"""A report in the terminal, and its files: tables for people, programs and papers, pictures, and the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from sfu.files import replacing, write_text
from sfu.reporting.pictures.choose import pictures_of
from sfu.reporting.report.build import Report, Track
from sfu.reporting.report.page import html_page
from sfu.reporting.terminal import WORSE_STYLE, Text, indented, print_verdicts, terminal_table
from sfu.reporting.text_tables import (
    CSV_LEAD,
    csv_records,
    csv_rows,
    escape_cell,
    latex_comment,
    latex_table,
    markdown_table,
)
from sfu.reporting.verdict import verdicts
from sfu.results.run_folder import FoundRun

PAGE, PICTURES = "report.html", "pictures"
_LISTED = 8
"""Runs with a problem, or repeated, that the terminal lists."""


def print_report(report: Report, console: Console) -> None:
    """Print verdict, table and troubles of every section, for any console of 80 columns or more."""
    for section in report.sections:
        console.print(Text(section.title, style="bold reverse"))
        print_verdicts(section.table, console)
        console.print()
        console.print(terminal_table(section.table), highlight=False)
        for key, others in section.implied.items():
            console.print(Text(f"Also different wherever {key} is: {', '.join(others)}.", style="dim"))
        console.print()
    troubled = list(map(_trouble, report.unlisted))
    _print_list("Runs with a problem:", WORSE_STYLE, troubled, console)
    repeated = [f"{old.folder}, replaced by {new.folder}" for old, new in report.repeated]
    _print_list("Repeated, so counted once:", "bold", repeated, console)


def _trouble(run: FoundRun) -> str:
    """One line on a run with a problem: its folder, its state with what was given, and why."""
    return f"{run.folder} ({', '.join(filter(None, (run.state, run.given)))}): {run.problem}"


def _print_list(title: str, style: str, lines: Sequence[str], console: Console) -> None:
    if len(lines) > _LISTED + 1:
        lines = [*lines[:_LISTED], f"and {len(lines) - _LISTED} more ({PAGE} lists all)"]
    if lines:
        console.print(Text(title, style=style))
    for line in lines:
        console.print(indented(Text(line, overflow="fold")))


def markdown_report(report: Report) -> str:
    """Return every section as Markdown: a heading, the verdict, the table of all metrics; then the troubles."""
    parts = [f"# {escape_cell(report.title)}"]
    for section in report.sections:
        parts += [f"## {escape_cell(section.title)}", *map(escape_cell, verdicts(section.table))]
        parts.append(markdown_table(section.table).rstrip())
    if report.troubled:
        lines = [f"- {_trouble(run)}" for run in report.troubled]
        parts += ["## Runs with a problem", "\n".join(map(escape_cell, lines))]
    return "\n\n".join(parts) + "\n"


def csv_report(report: Report) -> str:
    """Return all sections as one table with the settings of all of them as columns; empty where one has no such key."""
    records = [
        {"section": section.title, **section.fixed, **section.table.fixed, **record}
        for section in report.sections
        for record in csv_records(section.table)
    ]
    settings = {key: None for section in report.sections for key in (*section.fixed, *section.table.fixed)}
    settings |= {key: None for section in report.sections for key in section.table.varied}
    metrics = {key: None for record in records for key in record if key not in {"section", *settings, *CSV_LEAD}}
    header = ["section", *settings, *CSV_LEAD, *metrics]
    return csv_rows(header, [[record.get(key) for key in header] for record in records])


def latex_report(report: Report) -> str:
    r"""Return a ``tabular`` for each section, for a document with ``\usepackage{booktabs}``."""
    tables = [f"{latex_comment(section.title)}{latex_table(section.table)}" for section in report.sections]
    failed = [latex_comment(f"failed: {report.name_of(run)}: {run.problem}") for run in report.unlisted]
    return "\n".join([*tables, *(["".join(failed)] if failed else [])])


TEXTS = {"markdown": markdown_report, "csv": csv_report, "latex": latex_report}
SUFFIXES = {"markdown": "md", "csv": "csv", "latex": "tex"}


def save_report(
    report: Report, folder: Path, curves: Sequence[str] = (), track: Track = lambda items, _: items
) -> list[Path]:
    """Write report.html, tables.md, tables.csv, tables.tex and the pictures as PNG; return them, the page first.

    ``track`` passes the pictures on and shows progress.

    Raises:
        ArtifactError: A file cannot be written.
    """
    drawn = [pictures_of(section.table, curves) for section in report.sections]
    for picture in track([picture for pictures, _ in drawn for picture in pictures], "drawing"):
        _ = picture.wide, picture.narrow
    written = [folder / PAGE]
    write_text(folder / PAGE, html_page(report, drawn))
    for name, make in TEXTS.items():
        written.append(folder / f"tables.{SUFFIXES[name]}")
        write_text(written[-1], make(report))
    for number, (pictures, _) in enumerate(drawn, start=1):
        for index, picture in enumerate(pictures, start=1):
            path = folder / PICTURES / f"{number}-{index}-{picture.kind}.png"
            with replacing(path) as temporary:
                temporary.write_bytes(picture.wide)
            written.append(path)
    return written
