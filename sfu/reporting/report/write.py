"""A report in the terminal, and its files: tables for people, programs and papers, pictures, and the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from sfu.files import replacing, write_text
from sfu.reporting.export import csv_rows, escape_cell
from sfu.reporting.layout import WORSE_STYLE
from sfu.reporting.report.build import Report, Track, untracked
from sfu.reporting.report.pictures import pictures_of
from sfu.reporting.report.verdicts import verdicts
from sfu.reporting.sweep_export import CSV_LEAD, latex_sweep_table, markdown_sweep_table, sweep_records
from sfu.reporting.sweep_table import terminal_sweep_table

PAGE, PICTURES = "report.html", "pictures"
_LISTED = 8  # runs with a problem, or repeated, in the terminal


def print_report(report: Report, console: Console) -> None:
    """Verdict, table and troubles of every section, for any console of 80 columns or more."""
    for section in report.sections:
        console.print(Text(section.title, style="bold reverse"))
        for sentence in verdicts(section.total):
            console.print(Text(sentence, style="bold"))
        console.print()
        console.print(terminal_sweep_table(section.total), highlight=False)
        for key, others in section.implied.items():
            console.print(Text(f"With {key} also went: {', '.join(others)}.", style="dim"))
        console.print()
    for title, lines in (
        ("Runs with a problem:", [f"{run.folder} ({run.state}): {run.problem}" for run in report.unlisted]),
        ("Repeated, so counted once:", [f"{old.folder}, by {new.folder}" for old, new in report.repeated]),
    ):
        if lines:
            console.print(Text(title, style=WORSE_STYLE if "problem" in title else "bold"))
            more = (
                [f"and {len(lines) - _LISTED} more ({PAGE} lists all)"] if len(lines) > _LISTED + 1 else lines[_LISTED:]
            )
            for line in [*lines[:_LISTED], *more]:
                console.print(Padding(Text(line, overflow="fold"), (0, 0, 0, 2), expand=False))


def markdown_report(report: Report) -> str:
    """Every section as Markdown: a heading, the verdict, the table of all metrics; then the troubles."""
    parts = [f"# {escape_cell(report.title)}"]
    for section in report.sections:
        parts += [f"## {escape_cell(section.title)}", *map(escape_cell, verdicts(section.total))]
        parts.append(markdown_sweep_table(section.total).rstrip())
    if report.troubled:
        lines = [f"- {run.folder} ({run.state}): {run.problem}" for run in report.troubled]
        parts += ["## Runs with a problem", "\n".join(map(escape_cell, lines))]
    return "\n\n".join(parts) + "\n"


def csv_report(report: Report) -> str:
    """All sections as one table with the settings of all of them as columns; empty where a section has no such key."""
    records = [
        {"section": section.title, **section.fixed, **section.total["fixed"], **record}
        for section in report.sections
        for record in sweep_records(section.total)
    ]
    keys = dict.fromkeys(key for record in records for key in record)
    metrics = [key for key in keys if key.rsplit(".", 1)[-1] in ("mean", "std", "stderr", "n") and "." in key]
    settings = [key for key in keys if key not in metrics and key not in CSV_LEAD]
    header = [*settings, *CSV_LEAD, *metrics]
    return csv_rows(header, [[record.get(key) for key in header] for record in records])


def latex_report(report: Report) -> str:
    r"""A ``tabular`` for each section, for a document with ``\usepackage{booktabs}``."""
    parts = [f"% {' '.join(section.title.split())}\n{latex_sweep_table(section.total)}" for section in report.sections]
    return "\n".join(parts)


TEXTS = {"markdown": markdown_report, "csv": csv_report, "latex": latex_report}
FILES = {"markdown": "tables.md", "csv": "tables.csv", "latex": "tables.tex"}


def save_report(report: Report, folder: Path, curves: Sequence[str] = (), track: Track = untracked) -> list[Path]:
    """Writes report.html, tables.md, tables.csv, tables.tex and the pictures as PNG.

    Args:
        report: What to write.
        folder: Where to.
        curves: See ``pictures_of``.
        track: Passes the pictures on and shows progress.

    Returns:
        The files, the page first.

    Raises:
        ArtifactError: A file cannot be written.
    """
    from sfu.reporting.report.page import html_page

    drawn = [pictures_of(section.total, curves) for section in report.sections]
    for picture in track([picture for pictures, _ in drawn for picture in pictures], "drawing"):
        _ = picture.wide, picture.narrow
    written = [folder / PAGE]
    write_text(folder / PAGE, html_page(report, drawn))
    for name, make in TEXTS.items():
        write_text(folder / FILES[name], make(report))
        written.append(folder / FILES[name])
    for number, (pictures, _) in enumerate(drawn, start=1):
        for index, picture in enumerate(pictures, start=1):
            path = folder / PICTURES / f"{number}-{index}-{picture.kind}.png"
            with replacing(path) as temporary:
                temporary.write_bytes(picture.wide)
            written.append(path)
    return written
