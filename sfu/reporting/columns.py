"""The columns of every table (keys in metrics.json, headings, how values are written) and their cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sfu.reporting import format as fmt
from sfu.reporting.verdict import CRITERIA, best_rows
from sfu.results.aggregate import Group, MethodResult, ResultTable
from sfu.results.rows import Metrics, flatten_row, rows_of
from sfu.results.statistic import MARGINS, Relation, relation


@dataclass(frozen=True)
class Column:
    """One metric: its key in a row, its heading, how its value is written, its terminal heading, and its full name."""

    key: str
    heading: str
    write: Callable[[Any], str] = fmt.compact
    short: str = ""
    name: str = ""


COLUMNS: dict[str, Column] = {
    column.key: column
    for column in (
        Column("test_accuracy", "Test %", fmt.fixed, "test", "test accuracy"),
        Column("test_gap", "Test gap", fmt.points, "test gap"),
        Column("remain_accuracy", "Remaining %", fmt.fixed, "remain", "remaining accuracy"),
        Column("remain_gap", "Remaining gap", fmt.points),
        Column("forget_accuracy", "Forget %", fmt.fixed, "forget", "forget accuracy"),
        Column("forget_gap", "Forget gap", fmt.points),
        Column("canary_accuracy", "Canaries %", fmt.fixed, "canary", "canary accuracy"),
        Column("canary_gap", "Canary gap", fmt.points),
        Column("mia", "MIA %", fmt.fixed, "MIA", "membership inference"),
        Column("mia_std", "MIA std", fmt.fixed),
        Column("mia_gap", "MIA gap", fmt.points),
        Column("distance", "Distance", short="distance"),
        Column("agreement", "Agreement %", fmt.fixed, "agree"),
        Column("forget_kl", "Forget KL (nats)"),
        Column("klom_forget", "Forget KLoM (nats)", short="KLoM"),
        Column("retain_gradient_norm", "Retain gradient", fmt.gradient_norm, "|grad|"),
        Column("seconds", "Seconds", fmt.seconds, "seconds"),
        Column("peak_memory_mb", "Peak MB", fmt.whole, "MB"),
        Column("predicted_distance", "Predicted distance", short="pred."),
        Column("predicted_share", "Predicted share"),
        Column("predicted_distance_gain", "Predicted gain", fmt.significant),
        Column("measured_distance_gain", "Measured gain", fmt.significant),
    )
}
PRINTED = tuple(CRITERIA)
"""What a printed table shows."""
PAPER_METRICS = PRINTED[:-1]
"""What the paper prints, in its order: all but the distance."""


def column_of(key: str) -> Column:
    """Return the column of a metric; one that sfu does not know is headed by its key."""
    return COLUMNS.get(key) or Column(key, key)


def metrics_in(table: ResultTable, among: Sequence[str] | None = None) -> list[str]:
    """Return the metrics that some row has a value of, the known ones first and in order; or those ``among``."""
    found = dict.fromkeys(key for row in table.results for key, entry in row.metrics.items() if entry.n)
    keys = [*(key for key in COLUMNS if key in found), *(key for key in found if key not in COLUMNS)]
    return keys if among is None else [key for key in keys if key in among]


@dataclass(frozen=True)
class ResultCell:
    """One metric of one method at one setting: ``73.7 ± 0.1``, or ``-``.

    ``n`` counts the runs that have the metric where they are fewer than have the method. ``best`` is best among the
    source-free methods of the setting; ``worse`` is a distance beyond that of the untouched head.
    """

    text: str
    n: int | None
    best: bool
    worse: bool


def cells_of(
    table: ResultTable, group: Group, keys: Sequence[str], plus_minus: str = "±"
) -> Iterator[tuple[str, MethodResult, list[ResultCell]]]:
    """Yield each method of a group: its name, its result, and its cells in the order of ``keys``."""
    best = best_rows(group.rows)
    for name, row in group.rows.items():
        cells = []
        for key in keys:
            entry, worse = row[key], key == "distance" and row.is_worse_than_nothing
            text = fmt.spread(entry.mean, table.spread_of(entry), column_of(key).write, plus_minus)
            fewer = entry.n if 0 < entry.n < row.n else None
            cells.append(ResultCell(text, fewer, not worse and name in best.get(key, ()), worse))
        yield name, row, cells


DIFFERENCES = {gap: metric for metric, gap in CRITERIA.items()}
"""What is compared with Retrained within a run: the gaps and the distance, each with the metric that it belongs to."""
EQUAL, DIFFERENT, UNCLEAR = "=", "≠", "?"


def difference_cells(row: MethodResult) -> dict[str, tuple[str, str]]:
    """Return the paired differences from Retrained: by gap ``+0.1 [-0.2, +0.4]`` (95 % interval), and what it shows.

    A gap shows ``EQUAL`` if the two one-sided tests place it within the margin, ``DIFFERENT`` if the interval leaves
    out 0, else ``UNCLEAR``. A distance, or a gap over fewer than two runs, shows nothing.
    """
    cells = {}
    for gap, metric in DIFFERENCES.items():
        entry, shows = row[gap], ""
        if entry.n > 1 and gap != "distance":
            found = relation((value for value in entry.values if value is not None), MARGINS[metric])
            shows = EQUAL if found is Relation.equal else UNCLEAR if found is Relation.unclear else DIFFERENT
        cells[gap] = fmt.interval(entry.mean, entry.interval, column_of(gap).write), shows
    return cells


def compared_rows(group: Group) -> dict[str, MethodResult]:
    """Return the rows of a group that have a difference from Retrained over several runs; Retrained itself has none."""
    return {
        name: row
        for name, row in group.rows.items()
        if name != "retrained" and any(row[gap].n > 1 for gap in DIFFERENCES)
    }


def tidy_table(metrics: Metrics) -> tuple[list[str], list[list[Any]]]:
    """Return the header and the lines of a run's rows: ``method``, every scalar, details and note last."""
    flat = {name: flatten_row(row) for name, row in rows_of(metrics).items()}
    found = dict.fromkeys(key for row in flat.values() for key in row)
    known = [key for key in (*COLUMNS, "access", "tuning", "applied") if key in found]
    details = [key for key in found if key.startswith("details.")]
    others = [key for key in found if key not in {*known, *details, "note"}]
    keys = [*known, *others, *details, *(["note"] if "note" in found else [])]
    return ["method", *keys], [[name, *(row.get(key) for key in keys)] for name, row in flat.items()]
