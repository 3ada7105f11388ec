"""The tables of the paper beside ours: our mean and spread, the published figure, on the paper's data the difference.

Source: "Towards Source-Free Machine Unlearning", CVPR 2025 (``published.yaml`` beside this file).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table

from sfu.errors import ConfigError
from sfu.registry import unknown
from sfu.reporting import format as fmt
from sfu.reporting.columns import COLUMNS, PAPER_METRICS, PRINTED, cells_of
from sfu.reporting.terminal import WORSE, Text, flags_of, legend, stacked
from sfu.reporting.text_tables import csv_rows, escape_cell, markdown_list, markdown_rows
from sfu.reporting.words import failures, marked, setting_of, spread_words
from sfu.results.aggregate import Group, MethodResult, ResultTable, number_of

_SHOWN = (*PRINTED, "seconds", "peak_memory_mb")


@dataclass(frozen=True)
class PublishedTable:
    """One table of the paper; ``title`` is its number and subject, ``setting`` what it was measured on.

    Attributes:
        name: As in ``published=NAME``.
        dataset: The dataset that was measured; ``None`` if the table is by dataset.
        backbone: The backbone under the head that was measured.
        by: The key whose values are its rows; ``None`` if its rows are methods alone.
        ours: Rows of a run that stand beside a published row, if not the one of the same name.
        rows: Published figures by value of ``by`` ("" without) and row, in the order of ``PAPER_METRICS``.
    """

    name: str
    title: str
    setting: str
    dataset: str | None
    backbone: str
    by: str | None
    ours: Mapping[str, list[str]]
    rows: Mapping[str, Mapping[str, list[float]]]

    def figure(self, overrides: Mapping[str, str], row: str, metric: str) -> float | None:
        """Return the published figure for a row of ours at a setting, or ``None`` if the paper has none."""
        given = "" if self.by is None else overrides.get(self.by, "?")
        number = number_of(given)
        alike = [value for value in self.rows if value == given or (number is not None and number == number_of(value))]
        published = next((name for name, ours in self.ours.items() if row in ours), row)
        figures = self.rows[alike[0]].get(published, ()) if alike else ()
        return dict(zip(PAPER_METRICS, map(float, figures), strict=False)).get(metric)

    def is_own_data(self, overrides: Mapping[str, str], group: Group) -> bool:
        """Return True if a group measured the paper's dataset, all of it, through the paper's backbone.

        Only then does the difference between our figure and the published one mean anything.
        """
        own = [self.dataset or overrides.get(self.by or "", ""), self.backbone]
        return group.data == [own] and overrides.get("dataset.limit_per_class", "null") == "null"


@cache
def published_tables() -> dict[str, PublishedTable]:
    """Return all tables of the paper by name."""
    from sfu.readers import Percent, Record, read_yaml, refusing

    class TableRecord(Record):
        title: str
        setting: str
        dataset: str | None
        backbone: str
        by: str | None
        ours: dict[str, list[str]]
        rows: dict[str, dict[str, list[Percent]]]

    path = Path(__file__).with_name("published.yaml")
    with refusing(path, "Install sfu again."):
        tables = {name: TableRecord.model_validate(table) for name, table in read_yaml(path).items()}
    return {name: PublishedTable(name, **dict(table)) for name, table in tables.items()}


def published_table(name: str) -> PublishedTable:
    """Return a table of the paper.

    Raises:
        ConfigError: There is no such table.
    """
    tables = published_tables()
    if name not in tables:
        raise ConfigError(unknown("published", name, tables))
    return tables[name]


class _Line(NamedTuple):
    """One method at one setting: our cells, and by metric the published figure and our difference from it in points.

    The difference is ``None`` where the data are not the paper's.
    """

    group: Group
    name: str
    row: MethodResult
    ours: dict[str, str]
    theirs: dict[str, tuple[float | None, float | None]]


def _lines(table: ResultTable, published: PublishedTable) -> Iterator[_Line]:
    for group in table.groups:
        overrides = {**table.fixed, **group.overrides}
        is_own = published.is_own_data(overrides, group)
        for name, row, cells in cells_of(table, group, _SHOWN):
            ours = [f"{cell.text} {WORSE}" if cell.worse else cell.text for cell in cells]
            theirs = {}
            for metric in PAPER_METRICS:
                figure, mean = published.figure(overrides, name, metric), row.mean(metric)
                theirs[metric] = figure, None if not is_own or mean is None or figure is None else mean - figure
            yield _Line(group, name, row, dict(zip(_SHOWN, ours, strict=True)), theirs)


def _heading(table: ResultTable, published: PublishedTable, where: str) -> list[str]:
    """Title, what the paper measured on, what these runs did, and whether the two can be compared."""
    pairs = dict.fromkeys(tuple(pair) for group in table.groups for pair in group.data)
    ours = ", ".join(" through ".join(filter(None, pair)) for pair in pairs if any(pair))
    own = [published.is_own_data({**table.fixed, **group.overrides}, group) for group in table.groups if group.rows]
    note = "" if all(own) else "The difference is only shown where dataset and backbone are the paper's. "
    if not any(own):
        note = "The data are not the paper's, so differences from its figures are not shown. "
    return [
        f"{published.title} of the paper",
        f"Published: {published.setting}.",
        f"Here: {ours or 'unknown data'}; mean ± {spread_words(table)} "
        f"(n = {_most_runs(table)}), {where} the published figure"
        f"{' and our difference from it in points' if any(own) else ''}. {note}"
        "Distance: 0 is Retrained, 1 is the untouched head.",
    ]


def _most_runs(table: ResultTable) -> int:
    return max((group.n for group in table.groups), default=0)


def terminal_published_table(table: ResultTable, published: PublishedTable) -> RenderableType:
    """Return the table for a console of 80 columns or more; two lines a row."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    grid.add_column("")
    for metric in PRINTED:
        grid.add_column(COLUMNS[metric].short, justify="right", no_wrap=True)
    last, most, marks, lines = None, _most_runs(table), set[str](), list(_lines(table, published))
    width = max((len(flags_of(line.row)) for line in lines), default=0)
    for line in lines:
        if line.group is not last:
            last = line.group
            grid.add_row(Text(setting_of(last) or "all runs", style="bold"))
            if last.n != most:
                grid.add_row(Text(f"  n = {last.n}", style="dim"))
        cells: list[RenderableType] = []
        for metric, (figure, difference) in line.theirs.items():
            ours = Text(line.ours[metric].replace(" ± ", "±"))
            if any(published is not None for published, _ in line.theirs.values()):
                theirs = "" if figure is None else f"{figure:g} {fmt.points(difference)}".rstrip()
                cells.append(stacked(ours, Text(theirs, style="dim")))
            else:
                cells.append(ours)
        distance, flags = line.ours["distance"].replace(" ", ""), flags_of(line.row)
        marks |= {*flags, *distance[-1]}
        grid.add_row(Text(f"{flags:{width}} {line.name}"), *cells, distance)
    title, *more = _heading(table, published, "below it")
    parts: list[RenderableType] = [Text(title, style="bold"), *map(Text, more), Text(""), grid]
    if (meaning := legend(marks)) is not None:
        parts += [Text(""), meaning]
    if failed := failures(table):
        parts += [Text(""), Text("Failed:", style="bold red"), *(Text(f"  {line}", style="red") for line in failed)]
    return Lines(*parts)


def markdown_published_table(table: ResultTable, published: PublishedTable) -> str:
    """Return the table as Markdown: ``ours ± sd (published, difference)``; no difference on data of one's own."""
    body = []
    for line in _lines(table, published):
        cells = dict(line.ours)
        for metric, (figure, difference) in line.theirs.items():
            shown = [f"{figure:g}", fmt.points(difference)] if figure is not None else []
            cells[metric] += f" ({', '.join(filter(None, shown))})" if shown else ""
        body.append([*line.group.overrides.values(), marked(line.name, line.row), *cells.values()])
    title, *more = _heading(table, published, "in brackets")
    header = [*table.varied, "Method", *(COLUMNS[metric].heading for metric in _SHOWN)]
    parts = [f"**{escape_cell(title)}**", *map(escape_cell, more), markdown_rows(header, body)]
    return "\n\n".join([*parts, *markdown_list("Failed:", failures(table))]) + "\n"


def csv_published_table(table: ResultTable, published: PublishedTable) -> str:
    """Return one line for each row, metric and setting, at full precision."""
    header = [*table.varied, "row", "metric", "mean", "std", "n", "published", "difference"]
    body = [
        [*line.group.overrides.values(), marked(line.name, line.row), metric, line.row.mean(metric),
         line.row[metric].std, line.row[metric].n, figure, difference]
        for line in _lines(table, published)
        for metric, (figure, difference) in line.theirs.items()
    ]  # fmt: skip
    return csv_rows(header, body)
