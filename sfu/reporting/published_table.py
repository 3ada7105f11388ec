"""A sweep in the layout of a table of the paper: our mean and spread, the published figure, the difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sfu.reporting import format as fmt
from sfu.reporting.export import csv_rows, escape_cell, markdown_rows
from sfu.reporting.layout import WORSE, legend
from sfu.reporting.published import METRICS, PublishedTable
from sfu.reporting.sweep_export import heading_of, marked
from sfu.reporting.sweep_words import failures, setting_of
from sfu.reporting.table import row_flags
from sfu.reporting.verdict import is_worse_than_nothing

Aggregate = Mapping[str, Any]

_HEADINGS = ("test", "remaining", "forget", "MIA")
_ALSO = ("distance", "seconds", "peak_memory_mb")
"""What the paper does not print."""


class Line(NamedTuple):
    """One row at one setting; metrics and published figures in the order of the paper, then the row as aggregated."""

    group: Mapping[str, Any]
    name: str
    entries: list[Mapping[str, Any]]
    published: list[float | None]
    row: Mapping[str, Any]

    def difference(self, index: int) -> float | None:
        """Ours less the published figure, in points."""
        ours, published = self.entries[index].get("mean"), self.published[index]
        return ours - published if fmt.is_number(ours) and published is not None else None

    def spread(self, metric: str) -> str:
        """Mean and spread of a metric that the paper does not have; ``!`` after a distance beyond doing nothing."""
        entry = self.row["metrics"].get(metric) or {}
        worse = metric == "distance" and is_worse_than_nothing({metric: entry.get("mean")})
        return fmt.spread(entry.get("mean"), entry.get("std"), "compact") + (f" {WORSE}" if worse else "")


def lines_of(total: Aggregate, table: PublishedTable) -> Iterator[Line]:
    """Every row of the sweep, group by group."""
    for group in total["groups"]:
        overrides = {**total["fixed"], **group["overrides"]}
        for name, row in group["rows"].items():
            entries = [row["metrics"].get(metric) or {} for metric in METRICS]
            figures = [table.figure(overrides, name, metric) for metric in METRICS]
            yield Line(group, name, entries, figures, row)


def heading(total: Aggregate, table: PublishedTable) -> list[str]:
    """Title, what the paper measured on, and what these runs did."""
    given = {**total["fixed"], **dict.fromkeys(total["varied"], "several")}
    ours = ", ".join(f"{key}={value}" for key, value in given.items() if key.split(".")[0] in ("dataset", "backbone"))
    return [
        f"{table.title} of the paper",
        f"Published: {table.setting}.",
        f"Here: {ours or 'settings of the experiment'}; mean ± sample standard deviation over "
        f"{' and '.join(total['over'])} (n = {_most(total)}), below it the published figure and our difference from it "
        "in points. Distance: 0 is Retrained, 1 nothing done.",
    ]


def _most(total: Aggregate) -> int:
    return max((int(group["n"]) for group in total["groups"]), default=0)


def terminal_published_table(total: Aggregate, table: PublishedTable) -> RenderableType:
    """The table for a console of 80 columns or more; two lines a row."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    grid.add_column("")
    for name in (*_HEADINGS, "distance"):
        grid.add_column(name, justify="right", no_wrap=True)
    last, most, marks = None, _most(total), set[str]()
    for line in lines_of(total, table):
        if line.group is not last:
            last = line.group
            grid.add_row(Text(setting_of(last) or "all runs", style="bold"))
            if last["n"] != most:
                grid.add_row(Text(f"  n = {last['n']}", style="dim"))
        cells = []
        for index, entry in enumerate(line.entries):
            cells.append(Text(fmt.spread(entry.get("mean"), entry.get("std"), "percent").replace(" ± ", "±")))
            if any(figure is not None for figure in line.published):
                cells[-1].append("\n" + _beside(line, index), "dim")
        distance, flags = line.spread("distance").replace(" ", ""), row_flags(line.row)
        marks |= {*flags, *distance[-1]}
        grid.add_row(Text(f"{flags:2}{line.name}"), *cells, distance)
    title, *rest = heading(total, table)
    parts: list[RenderableType] = [Text(title, style="bold"), *map(Text, rest), Text(""), grid]
    if (meaning := legend(marks)) is not None:
        parts += [Text(""), meaning]
    if lines := failures(total):
        parts += [Text(""), Text("Failed:", style="bold red"), *(Text(f"  {line}", style="red") for line in lines)]
    return Group(*parts)


def _beside(line: Line, index: int) -> str:
    published = line.published[index]
    if published is None:
        return ""
    return f"{published:g} {fmt.points(line.difference(index))}".rstrip()


def markdown_published_table(total: Aggregate, table: PublishedTable) -> str:
    """The table as Markdown: ``ours ± sd (published, difference)``."""
    body = []
    for line in lines_of(total, table):
        cells = [*line.group["overrides"].values(), marked(line.name, line.row)]
        for index, entry in enumerate(line.entries):
            ours = fmt.spread(entry.get("mean"), entry.get("std"), "percent")
            published = line.published[index]
            cells.append(ours if published is None else f"{ours} ({published:g}, {fmt.points(line.difference(index))})")
        cells += [line.spread(metric) for metric in _ALSO]
        body.append([escape_cell(cell) for cell in cells])
    title, *rest = heading(total, table)
    rest[-1] = rest[-1].replace("below it", "in brackets")
    rows = markdown_rows([*map(escape_cell, total["varied"]), "row", *_HEADINGS, *map(heading_of, _ALSO)], body)
    parts = [f"**{escape_cell(title)}**", *map(escape_cell, rest), rows]
    if lines := failures(total):
        parts.append("\n".join(["Failed jobs:", "", *(f"- {escape_cell(line)}" for line in lines)]))
    return "\n\n".join(parts) + "\n"


def csv_published_table(total: Aggregate, table: PublishedTable) -> str:
    """One line a row, metric and setting, at full precision."""
    header = [*total["varied"], "row", "metric", "mean", "std", "n", "published", "difference"]
    body = [
        [*line.group["overrides"].values(), marked(line.name, line.row), metric, line.entries[index].get("mean"),
         line.entries[index].get("std"), line.entries[index].get("n", 0), line.published[index], line.difference(index)]
        for line in lines_of(total, table)
        for index, metric in enumerate(METRICS)
    ]  # fmt: skip
    return csv_rows(header, body)
