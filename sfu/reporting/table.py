"""The result of one run in the terminal: a table readable at 80 columns, a verdict, and where the files are.

Colour is never the only sign: ``*`` marks the best source-free value, ``!`` what is worse than doing nothing, ``r`` a
row that may read retained data, ``o`` settings chosen by the distance to Retrained, ``=`` a step, or one of several,
that was computed but not applied. Columns are added while they fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from sfu.reporting import format as fmt
from sfu.reporting.columns import Metrics, Row, rows_of
from sfu.reporting.export import csv_table, markdown_table
from sfu.reporting.heading import headline, machine_line
from sfu.reporting.layout import (
    BEST,
    BEST_STYLE,
    ORACLE,
    RETAINED,
    RETAINED_STYLE,
    STORED,
    WITHHELD,
    WORSE,
    WORSE_STYLE,
    Cell,
    Strip,
    fitting,
    grid,
    legend,
)
from sfu.reporting.verdict import (
    best_rows,
    is_tuned_on_retrained,
    is_worse_than_nothing,
    notes,
    sees_retained,
    sees_stored,
    verdict,
    was_withheld,
    worse_sentence,
)

__all__ = ["csv_table", "markdown_table", "print_run", "row_flags", "row_style", "terminal_table"]

SCALE = "Signed numbers: points from Retrained. Distance: 0 Retrained, 1 nothing done."

_ACCURACIES = (
    ("test_accuracy", "test_gap", "test"),
    ("remain_accuracy", "remain_gap", "remain"),
    ("forget_accuracy", "forget_gap", "forget"),
)


def row_flags(row: Row) -> str:
    """The marks before a method's name, for example ``r``, ``!`` or nothing."""
    seen = RETAINED if sees_retained(row) else STORED if sees_stored(row) else ""
    tuned = ORACLE if is_tuned_on_retrained(row) else ""
    return seen + tuned + (WORSE if is_worse_than_nothing(row) else WITHHELD if was_withheld(row) else "")


def row_style(row: Row) -> str:
    """The colour of a method's name."""
    return (
        WORSE_STYLE if is_worse_than_nothing(row) else RETAINED_STYLE if sees_retained(row) or sees_stored(row) else ""
    )


class _RunTable:
    """The table alone; it decides its columns when it learns the width."""

    def __init__(self, metrics: Metrics) -> None:
        self.rows = rows_of(metrics)
        self.best = best_rows(self.rows)

    def marks(self) -> set[str]:
        """The marks this table uses."""
        flags = {mark for row in self.rows.values() for mark in row_flags(row)}
        return flags | ({BEST} if any(self.best.values()) else set())

    def _cell(self, name: str, metric: str, value: str, gap: str = "") -> Cell:
        if metric == "distance" and is_worse_than_nothing(self.rows[name]):
            return Cell(value, gap, WORSE, WORSE_STYLE)
        if name in self.best.get(metric, ()):
            return Cell(value, gap, BEST, BEST_STYLE)
        return Cell(value, gap)

    def _percent(self, metric: str, gap: str | None, heading: str) -> Strip:
        cells = []
        for name, row in self.rows.items():
            shown = fmt.points(row.get(gap)) if gap and name != "retrained" else ""
            cells.append(self._cell(name, metric, fmt.fixed(row.get(metric)), shown))
        return Strip(heading, tuple(cells))

    def _plain(self, key: str, heading: str) -> Strip:
        writers: Mapping[str, Any] = {
            "agreement": fmt.fixed,
            "retain_gradient_norm": fmt.gradient_norm,
            "seconds": fmt.seconds,
            "peak_memory_mb": lambda value: fmt.fixed(value, 0),
        }
        return Strip(heading, tuple(Cell(writers[key](row.get(key))) for row in self.rows.values()))

    def choices(self) -> tuple[list[list[Strip]], list[list[Strip]]]:
        """Sets of columns from the richest to the barest: those with gaps, and those for narrow consoles."""
        accuracies = [self._percent(*spec) for spec in _ACCURACIES]
        distance_cells = tuple(
            self._cell(name, "distance", fmt.compact(row.get("distance"))) for name, row in self.rows.items()
        )
        distance, brief = Strip("distance", distance_cells), Strip("dist.", distance_cells)
        mia_gap, mia = self._percent("mia", "mia_gap", "MIA"), self._percent("mia", None, "MIA")
        extra = [
            self._plain("agreement", "agree"),
            self._plain("retain_gradient_norm", "|grad|"),
            self._plain("seconds", "seconds"),
            self._plain("peak_memory_mb", "MB"),
        ]
        base = [*accuracies, mia_gap, distance]
        found = [[*base, *extra[:count]] for count in range(len(extra), 0, -1)]
        found.insert(1, [*accuracies, mia, distance, *extra])
        bare = [self._percent(metric, None, heading) for metric, _, heading in _ACCURACIES]
        with_gaps = [*found, base, [*accuracies, mia, distance], [*accuracies, mia, brief]]
        return with_gaps, [[*bare, mia, brief], [bare[0], brief]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if not self.rows:
            yield Text("no rows")
            return
        names, flags = list(self.rows), [row_flags(row) for row in self.rows.values()]
        styles = [row_style(row) for row in self.rows.values()]
        width = options.max_width
        yield grid(fitting(*self.choices(), names, flags, width), names, flags, styles, width)


def terminal_table(metrics: Metrics) -> RenderableType:
    """A headline, the table of methods and its legend, for any console of 60 columns or more.

    Args:
        metrics: The content of metrics.json.

    Returns:
        A rich renderable that chooses its columns when it is printed: gaps to Retrained beside the accuracies, the
        membership attack and the distance always; the attack's gap, agreement, retain-gradient norm, seconds and
        memory while they fit.
    """
    table = _RunTable(metrics)
    parts: list[RenderableType] = [Text(headline(metrics), style="bold")]
    if machine := machine_line(metrics):
        parts.append(Text(machine, style="dim"))
    parts += [Text(""), table, Text("")]
    if (marks := legend(table.marks())) is not None:
        parts.append(marks)
    if any(fmt.is_number(row.get("distance")) or fmt.is_number(row.get("test_gap")) for row in table.rows.values()):
        parts.append(Text(SCALE, style="dim"))
    return Group(*parts)


def print_run(metrics: Metrics, folder: str | Path, console: Console) -> None:
    """Prints the table, the verdict, what is worse than nothing, the methods' notes, and where the files were saved.

    Args:
        metrics: The content of metrics.json.
        folder: The run's folder.
        console: Where to print; 80 columns are enough.
    """
    console.print(terminal_table(metrics), highlight=False)
    console.print()
    console.print(Text(verdict(metrics), style="bold"))
    if worse := worse_sentence(metrics):
        console.print(Text(worse, style=WORSE_STYLE))
    for name, note in notes(metrics):
        line = Text(f"{name}: ", style="bold").append(note, style="not bold")
        console.print(Padding(line, (0, 0, 0, 2)))
    path = Path(folder).absolute()
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    console.print(Text("Saved in ").append(str(shown), style="bold"), overflow="fold")
    files = sorted(entry.name for entry in path.iterdir() if entry.is_file()) if path.is_dir() else []
    if files:
        console.print(Padding(Text(", ".join(files), style="dim"), (0, 0, 0, 2)))
