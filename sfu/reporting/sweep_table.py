"""The result of a sweep in the terminal: mean ± spread for each setting and method, as wide as the console allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from sfu.reporting import format as fmt
from sfu.reporting.aggregate import aggregate, mean_rows, spread_of
from sfu.reporting.layout import BEST, BEST_STYLE, WORSE, WORSE_STYLE, Cell, Strip, fitting, grid, legend
from sfu.reporting.sweep_export import csv_sweep_table, latex_sweep_table, markdown_sweep_table
from sfu.reporting.sweep_words import Aggregate, count_of, failures, gaps_in_data, headline, setting_of
from sfu.reporting.table import row_flags, row_style
from sfu.reporting.verdict import best_rows, is_worse_than_nothing

__all__ = ["aggregate", "csv_sweep_table", "latex_sweep_table", "markdown_sweep_table", "terminal_sweep_table"]

_SHOWN = (
    ("test_accuracy", "test", "percent"),
    ("remain_accuracy", "remain", "percent"),
    ("forget_accuracy", "forget", "percent"),
    ("mia", "MIA", "percent"),
    ("distance", "distance", "compact"),
    ("test_gap", "test gap", "points"),
    ("agreement", "agree", "percent"),
    ("seconds", "seconds", "compact"),
)
_NAMES = {"remain_accuracy": "remaining accuracy", "forget_accuracy": "forget accuracy", "mia": "MIA"}
_DROPPED = (  # from the richest set of columns to the barest
    (),
    ("seconds",),
    ("seconds", "agreement"),
    ("seconds", "agreement", "test_gap"),
    ("seconds", "agreement", "test_gap", "remain_accuracy"),
    ("seconds", "agreement", "test_gap", "remain_accuracy", "mia"),
    ("seconds", "agreement", "test_gap", "remain_accuracy", "mia", "forget_accuracy"),
)


def _spread(total: Aggregate, entry: Mapping[str, Any] | None, kind: str, plus_minus: str) -> str:
    entry = entry or {}
    if kind == "points":
        return fmt.points(entry.get("mean")) or fmt.MISSING
    return fmt.spread(entry.get("mean"), spread_of(total, entry), kind, plus_minus)


class _SweepBody:
    """The groups one under the other, with the same columns in all; the columns depend on the width."""

    def __init__(self, total: Aggregate) -> None:
        self.total = total
        self.groups = [group for group in total["groups"] if group["rows"]]
        self.means = [mean_rows(group) for group in self.groups]
        self.best = [best_rows(means) for means in self.means]

    def marks(self) -> set[str]:
        """The marks in use anywhere."""
        flags = {mark for means in self.means for row in means.values() for mark in row_flags(row)}
        return flags | ({BEST} if any(names for best in self.best for names in best.values()) else set())

    def _strip(self, metric: str, heading: str, kind: str, sign: str) -> Strip:
        cells = []
        for group, means, best in zip(self.groups, self.means, self.best, strict=True):
            for name, row in group["rows"].items():
                value = _spread(self.total, row["metrics"].get(metric), kind, sign)
                if metric == "distance" and is_worse_than_nothing(means[name]):
                    cells.append(Cell(value, mark=WORSE, style=WORSE_STYLE))
                elif name in best.get(metric, ()):
                    cells.append(Cell(value, mark=BEST, style=BEST_STYLE))
                else:
                    cells.append(Cell(value))
        return Strip(heading, tuple(cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        sign = "+-" if options.ascii_only else "±"
        strips = {spec[0]: self._strip(*spec, sign) for spec in _SHOWN}
        choices = [[strip for key, strip in strips.items() if key not in dropped] for dropped in _DROPPED]
        rows = [row for means in self.means for row in means.values()]
        names, flags = [name for means in self.means for name in means], [row_flags(row) for row in rows]
        width = options.max_width
        chosen = fitting(choices[:-2], choices[-2:], names, flags, width)
        styles = [row_style(row) for row in rows]
        yield grid(chosen, names, flags, styles, width, rows=range(0))
        start = 0
        for group in self.groups:
            setting = setting_of(group)
            yield Text(f"{setting}  " if setting else "", style="bold").append(count_of(group), style="not bold dim")
            stop = start + len(group["rows"])
            yield grid(chosen, names, flags, styles, width, rows=range(start, stop), header=False)
            start = stop
        left_out = [label for key, label in _NAMES.items() if strips[key] not in chosen]
        if left_out:
            yield Text(f"Not shown at this width: {', '.join(left_out)}.", style="dim")


def terminal_sweep_table(total: Aggregate) -> RenderableType:
    """The sweep for a console of 80 columns or more: settings, methods, ``73.7 ± 0.1``, failures and missing values.

    Args:
        total: What ``aggregate`` returned.
    """
    body = _SweepBody(total)
    parts: list[RenderableType] = [Text(headline(total), style="bold"), Text("")]
    parts.append(body if body.groups else Text("No run finished."))
    parts.append(Text(""))
    if (marks := legend(body.marks())) is not None:
        parts.append(marks)
    for title, lines, style in (
        ("Averaged over fewer runs:", gaps_in_data(total), ""),
        ("Failed:", failures(total), WORSE_STYLE),
    ):
        if lines:
            parts.append(Text(title, style=style or "bold"))
            parts += [Padding(Text(line, style=style), (0, 0, 0, 2), expand=False) for line in lines]
    return Group(*parts)
