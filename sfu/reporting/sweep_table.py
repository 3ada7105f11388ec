"""The result of a sweep as one table: mean ± sample standard deviation for each setting and method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from sfu.reporting import format as fmt
from sfu.reporting.aggregate import aggregate, mean_rows
from sfu.reporting.columns import COLUMNS
from sfu.reporting.export import csv_rows, escape_cell, markdown_rows
from sfu.reporting.judge import best_rows, is_tuned_on_retrained, is_worse_than_nothing
from sfu.reporting.layout import BEST, BEST_STYLE, WORSE, WORSE_STYLE, Cell, Strip, fitting, grid, legend
from sfu.reporting.table import row_flags, row_style

__all__ = ["aggregate", "csv_sweep_table", "markdown_sweep_table", "terminal_sweep_table"]

Aggregate = Mapping[str, Any]
GroupOf = Mapping[str, Any]

PAPER = "paper_test_accuracy"
_SHOWN = (
    ("test_accuracy", "test", "percent"),
    ("remain_accuracy", "remain", "percent"),
    ("forget_accuracy", "forget", "percent"),
    ("mia", "MIA", "percent"),
    ("distance", "distance", "compact"),
    ("test_gap", "test gap", "points"),
    ("agreement", "agree", "percent"),
    ("seconds", "seconds", "compact"),
    (PAPER, "paper: test", "published"),
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


def setting_of(group: GroupOf) -> str:
    """A group's settings in words: ``head.l2 = 0.001, forget.fraction = 0.1``; empty if nothing varied."""
    return ", ".join(f"{key} = {value or '(default)'}" for key, value in group["overrides"].items())


def count_of(group: GroupOf) -> str:
    """How many runs a group averages: ``n = 3 (seed 0, 1, 2)``, with failures named."""
    over = "; ".join(f"{key} {', '.join(values)}" for key, values in group["over"].items() if values)
    return (
        f"n = {group['n']}"
        + (f" ({over})" if over else "")
        + (f", {group['n_failed']} failed" if group["n_failed"] else "")
    )


def headline(total: Aggregate) -> str:
    """The first line of every sweep table."""
    fixed = ", ".join(f"{key}={value}" for key, value in total["fixed"].items())
    over = " and ".join(total["over"]) or "nothing"
    done = total["n_runs"] - len(total["failed"])
    return f"{done} of {total['n_runs']} runs, mean and sample standard deviation over {over}" + (
        f" ({fixed})" if fixed else ""
    )


def failures(total: Aggregate) -> list[str]:
    """One line for each failed job."""
    lines = []
    for job in total["failed"]:
        told_apart_by = {key: value for key, value in job["overrides"].items() if key not in total["fixed"]}
        overrides = " ".join(f"{key}={value}" for key, value in told_apart_by.items()) or "(no overrides)"
        lines.append(overrides + (f": {job['error']}" if job["error"] else ""))
    return lines


def gaps_in_data(total: Aggregate) -> list[str]:
    """One line for each method whose averages do not cover all runs of its group."""
    lines = []
    for group in total["groups"]:
        where = f" at {setting_of(group)}" if group["overrides"] else ""
        for name, row in group["rows"].items():
            partial: dict[int, list[str]] = {}
            for key, entry in row["metrics"].items():
                if 0 < entry["n"] < group["n"]:
                    partial.setdefault(entry["n"], []).append(key)
            for count, keys in partial.items():
                what = (
                    "every metric"
                    if len(keys) == sum(entry["n"] > 0 for entry in row["metrics"].values())
                    else ", ".join(keys)
                )
                lines.append(f"{name}{where}: {what} over {count} of {group['n']} runs")
    return lines


def _spread(entry: Mapping[str, Any] | None, kind: str, plus_minus: str) -> str:
    entry = entry or {}
    if kind == "points":
        return fmt.points(entry.get("mean")) or fmt.MISSING
    if kind == "published":
        return fmt.fixed(entry.get("mean"))
    return fmt.spread(entry.get("mean"), entry.get("std"), kind, plus_minus)


class _SweepBody:
    """The groups one under the other, with the same columns in all; the columns depend on the width."""

    def __init__(self, total: Aggregate) -> None:
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
                value = _spread(row["metrics"].get(metric), kind, sign)
                if metric == "distance" and is_worse_than_nothing(means[name]):
                    cells.append(Cell(value, mark=WORSE, style=WORSE_STYLE))
                elif name in best.get(metric, ()):
                    cells.append(Cell(value, mark=BEST, style=BEST_STYLE))
                else:
                    cells.append(Cell(value))
        return Strip(heading, tuple(cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        sign = "+-" if options.ascii_only else "±"
        known = any(PAPER in row["metrics"] for group in self.groups for row in group["rows"].values())
        strips = {spec[0]: self._strip(*spec, sign) for spec in _SHOWN if spec[0] != PAPER or known}
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


def _metric_keys(total: Aggregate) -> list[str]:
    """Metrics that some row has at least one value of: the known ones in order, then any others."""
    found = dict.fromkeys(
        key
        for group in total["groups"]
        for row in group["rows"].values()
        for key, entry in row["metrics"].items()
        if entry["n"]
    )
    known = [column.key for column in COLUMNS if column.key in found]
    return known + [key for key in found if key not in known]


def markdown_sweep_table(total: Aggregate) -> str:
    """Every metric of every setting and method as a Markdown table of ``mean ± standard deviation``.

    Args:
        total: What ``aggregate`` returned.
    """
    kinds = {key: kind for key, _, kind in _SHOWN if kind == "percent"} | dict.fromkeys(
        ("test_gap", "remain_gap", "forget_gap", "mia_gap"), "points"
    )
    kinds["mia_std"] = "percent"
    headings = {column.key: column.heading for column in COLUMNS}
    keys = _metric_keys(total)
    body = []
    for group in total["groups"]:
        means = mean_rows(group)
        best = best_rows(means)
        for name, row in group["rows"].items():
            mark = f" ({row['tuning']})" if is_tuned_on_retrained(row) else ""
            cells = [*group["overrides"].values(), name + mark, str(row["n"])]
            for key in keys:
                entry = row["metrics"].get(key) or {}
                value = _spread(entry, "published" if key.startswith("paper_") else kinds.get(key, "compact"), "±")
                if key == "distance" and is_worse_than_nothing(means[name]):
                    value += " !"
                elif name in best.get(key, ()):
                    value = f"**{value}**"
                cells.append(value + (f" (n={entry['n']})" if entry.get("n") and entry["n"] != row["n"] else ""))
            body.append([escape_cell(cell) for cell in cells])
    header = [*map(escape_cell, total["varied"]), "Method", "n", *(headings.get(key, key) for key in keys)]
    parts = [f"**{escape_cell(headline(total))}**", markdown_rows(header, body)]
    parts.append(
        "Gaps are percentage points from Retrained. Distance: 0 = Retrained, 1 = nothing done. "
        "**Bold**: best among the methods without source data at this setting. `!`: worse than doing nothing."
    )
    for title, lines in (("Averaged over fewer runs:", gaps_in_data(total)), ("Failed jobs:", failures(total))):
        if lines:
            parts.append("\n".join([title, "", *(f"- {escape_cell(line)}" for line in lines)]))
    return "\n\n".join(parts) + "\n"


def csv_sweep_table(total: Aggregate) -> str:
    """One line for each setting and method: ``<metric>.mean``, ``.std`` and ``.n`` at full precision.

    Args:
        total: What ``aggregate`` returned.
    """
    keys = _metric_keys(total)
    header = [*total["varied"], "method", "access", "tuning", "n", "n_applied"]
    header += [f"{key}.{part}" for key in keys for part in ("mean", "std", "n")]
    body = []
    for group in total["groups"]:
        for name, row in group["rows"].items():
            entries = [row["metrics"].get(key) or {"mean": None, "std": None, "n": 0} for key in keys]
            lead = [*group["overrides"].values(), name, row["access"], row.get("tuning"), row["n"], row["n_applied"]]
            body.append([*lead, *(entry[part] for entry in entries for part in ("mean", "std", "n"))])
    return csv_rows(header, body)
