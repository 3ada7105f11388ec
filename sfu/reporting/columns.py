"""The columns of a result: their keys in metrics.json, their headings, and how each is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sfu.reporting import format as fmt

Row = Mapping[str, Any]
Metrics = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """One column: ``key`` in the row, ``heading`` with its unit, ``write`` from value to text."""

    key: str
    heading: str
    write: Callable[[Any], str]
    numeric: bool = True


COLUMNS: tuple[Column, ...] = (
    Column("test_accuracy", "Test %", fmt.fixed),
    Column("test_gap", "Test gap", fmt.points),
    Column("remain_accuracy", "Remaining %", fmt.fixed),
    Column("remain_gap", "Remaining gap", fmt.points),
    Column("forget_accuracy", "Forget %", fmt.fixed),
    Column("forget_gap", "Forget gap", fmt.points),
    Column("mia", "MIA %", fmt.fixed),
    Column("mia_std", "MIA std", fmt.fixed),
    Column("mia_gap", "MIA gap", fmt.points),
    Column("distance", "Distance", fmt.compact),
    Column("agreement", "Agreement %", fmt.fixed),
    Column("forget_kl", "Forget KL (nats)", fmt.compact),
    Column("retain_gradient_norm", "Retain gradient", fmt.gradient_norm),
    Column("seconds", "Seconds", fmt.seconds),
    Column("peak_memory_mb", "Peak MB", lambda value: fmt.fixed(value, 0)),
    Column("predicted_distance_gain", "Predicted gain", fmt.significant),
    Column("measured_distance_gain", "Measured gain", fmt.significant),
    Column("access", "Data seen", fmt.text, numeric=False),
    Column("tuning", "Settings", fmt.text, numeric=False),
    Column("applied", "Applied", fmt.text, numeric=False),
)

KNOWN = {column.key: column for column in COLUMNS}
NOT_COLUMNS = frozenset({"details", "note"})


def is_scalar(value: Any) -> bool:
    """True for what fits one table cell: text, a bool, a finite number, or None."""
    return value is None or isinstance(value, (bool, str)) or fmt.is_number(value)


def rows_of(metrics: Metrics) -> dict[str, Row]:
    """The rows of a metrics dict by method name, in their own order."""
    return {str(name): row for name, row in (metrics.get("rows") or {}).items()}


def flatten(row: Row) -> dict[str, Any]:
    """One row as scalars only, its ``details`` under ``details.<key>``; what is not a scalar is left out."""
    flat = {key: value for key, value in row.items() if key != "details" and is_scalar(value)}
    details = row.get("details") or {}
    flat.update({f"details.{key}": value for key, value in details.items() if is_scalar(value)})
    return flat


def scalar_keys(rows: Iterable[Row]) -> list[str]:
    """Every scalar column that some row has: the known ones in order, then the others, then details and note."""
    found: dict[str, None] = {}
    for row in rows:
        found.update(dict.fromkeys(flatten(row)))
    known = [column.key for column in COLUMNS if column.key in found]
    details = [key for key in found if key.startswith("details.")]
    others = [key for key in found if key not in KNOWN and key not in NOT_COLUMNS and key not in details]
    return known + others + details + (["note"] if "note" in found else [])
