"""Tidy rows: what a run says about each of its methods, one row a method, as metrics.json holds it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

Row = Mapping[str, Any]
Metrics = Mapping[str, Any]
"""The content of metrics.json."""

LABELS = ("access", "tuning", "applied", "note", "details", "error", "isolation", "attacks")
"""What a row says besides its metrics."""


PROTECTIONS = ("process", "files", "network")
"""What ``isolation`` may list of a row without the retained data: a process of its own, and what was closed to it."""


def unenforced(row: Row) -> list[str]:
    """Return the protections that a row ran without; none are missing for one that may see the retained data."""
    had = str(row.get("isolation")).split(", ")
    return [] if row.get("access") == "retained" else [name for name in PROTECTIONS if name not in had]


def is_number(value: Any) -> TypeGuard[float]:
    """True for a finite int or float; a bool, None, text, NaN or infinity is not a number here."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_scalar(value: Any) -> bool:
    """True for what fits one table cell: text, a bool, a finite number, or None."""
    return value is None or isinstance(value, (bool, str)) or is_number(value)


def rows_of(metrics: Metrics) -> dict[str, Row]:
    """Return the rows of a metrics.json by method, in their own order."""
    return {str(name): row for name, row in (metrics.get("rows") or {}).items()}


def flatten_row(row: Row) -> dict[str, Any]:
    """Return a row's scalars, and no others.

    Those of ``details`` are ``details.<key>``, and numbers of attacks ``attacks.<attack>.<key>``.
    """
    flat = {key: value for key, value in row.items() if key != "details" and is_scalar(value)}
    details = row.get("details") or {}
    flat |= {f"details.{key}": value for key, value in details.items() if is_scalar(value)}
    return flat | {
        f"attacks.{name}.{key}": value for name, found in attacks_of_row(row).items() for key, value in found.items()
    }


def attacks_of_row(row: Row) -> dict[str, dict[str, float]]:
    """Return the numbers of every attack on a row; the ends of intervals are ``<key>.low`` and ``<key>.high``."""
    found: dict[str, dict[str, float]] = {}
    for name, figures in (row.get("attacks") or {}).items():
        found[name] = {key: value for key, value in figures.items() if is_number(value)}
        for key, value in figures.items():
            if isinstance(value, list) and len(value) == 2 and all(map(is_number, value)):
                found[name] |= {f"{key}.low": value[0], f"{key}.high": value[1]}
    return found


def flat_items(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a nested configuration as ``("head.l2", 0.001)``; lists and empty mappings are one value."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat_items(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
