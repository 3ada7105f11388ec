"""Many runs as one: mean and spread over seeds for every setting, method and metric.

The aggregate is plain data that ``json.dumps`` accepts::

    {"schema": 1, "over": ["seed"], "spread": "std", "varied": ["head.l2"], "fixed": {"dataset": "digits"}, "n_runs": 9,
     "failed": [{"overrides": {...}, "error": str | None}],
     "failed_rows": [{"overrides": {...}, "row": str, "error": str}],
     "groups": [{"overrides": {"head.l2": "0.001"}, "n": 3, "n_failed": 0, "over": {"seed": ["0", "1", "2"]},
                 "rows": {method: {"access": str | None, "tuning": str | None, "n": 3, "n_applied": 3, "notes": [str],
                                   "metrics": {name: {"mean": float | None, "std": float | None,
                                                      "stderr": float | None, "n": 3, "missing": 0}}}}}]}

``std`` is the sample standard deviation (divisor n - 1), ``stderr`` that of the mean (std / sqrt n), both None below
two values; ``spread`` says which of the two tables and pictures show. A metric that some runs lack is averaged over the
runs that have it, and ``missing`` counts the others; it is never read as zero.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sfu.reporting import format as fmt
from sfu.reporting.columns import COLUMNS, Metrics, rows_of

Overrides = Mapping[str, str]
Run = tuple[Overrides, Metrics | None]
SCHEMA = 1
SPREADS: Mapping[str, str] = {"std": "sample standard deviation", "stderr": "standard error"}
"""What may stand after ± in a table, in words."""


def number_of(value: str) -> float | None:
    """An override's value as a finite number, or None."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _failed(metrics: Metrics | None) -> bool:
    return not metrics or "rows" not in metrics


def in_order(values: Iterable[str]) -> list[str]:
    """Distinct values: by size if all are numbers, else as they came."""
    distinct = list(dict.fromkeys(values))
    if all(number_of(value) is not None for value in distinct):
        return sorted(distinct, key=float)
    return distinct


def summarize(values: Sequence[Any]) -> dict[str, Any]:
    """Mean, sample standard deviation, standard error, how many values there are and how many are missing."""
    present = [float(value) for value in values if fmt.is_number(value)]
    std = statistics.stdev(present) if len(present) > 1 else None
    return {
        "mean": statistics.fmean(present) if present else None,
        "std": std,
        "stderr": None if std is None else std / math.sqrt(len(present)),
        "n": len(present),
        "missing": len(values) - len(present),
    }


def _aggregate_method(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One method over the runs of a group; a run without the method contributes an empty row."""
    present = [row for row in rows if row]
    numeric = [column.key for column in COLUMNS if column.numeric]
    others = {key for row in present for key, value in row.items() if fmt.is_number(value) and key not in numeric}
    keys = [key for key in [*numeric, *sorted(others)] if any(key in row for row in present)]
    return {
        "access": present[0].get("access"),
        "tuning": present[0].get("tuning"),
        "n": len(present),
        "n_applied": sum(row.get("applied") is not False for row in present),
        "notes": list(dict.fromkeys(str(row["note"]) for row in present if row.get("note"))),
        "metrics": {key: summarize([row.get(key) for row in rows]) for key in keys},
    }


def _aggregate_group(
    key: Sequence[tuple[str, str]], runs: Sequence[tuple[Overrides, Metrics | None]], over: Sequence[str]
) -> dict[str, Any]:
    done = [(overrides, rows_of(metrics)) for overrides, metrics in runs if metrics and not _failed(metrics)]
    done = [(given, {name: row for name, row in rows.items() if not row.get("error")}) for given, rows in done]
    fullest_first = sorted((rows for _, rows in done), key=len, reverse=True)
    methods = dict.fromkeys(name for rows in fullest_first for name in rows)
    return {
        "overrides": dict(key),
        "n": len(done),
        "n_failed": len(runs) - len(done),
        "over": {
            name: in_order(str(overrides[name]) for overrides, _ in done if name in overrides)
            for name in over
            if any(name in overrides for overrides, _ in runs)
        },
        "rows": {name: _aggregate_method([rows.get(name) or {} for _, rows in done]) for name in methods},
    }


def aggregate(runs: Sequence[Run], over: Sequence[str] = ("seed",), spread: str = "std") -> dict[str, Any]:
    """Groups runs by every override except those in ``over`` and averages each group.

    Args:
        runs: ``(overrides, metrics)`` of each job, in job order. Metrics of a failed job are None, or a dict without
            ``rows`` whose ``error`` says why. Overrides beginning with ``hydra.`` are ignored.
        over: The override keys to average over.
        spread: What tables and pictures show beside a mean, a key of ``SPREADS``.

    Returns:
        The aggregate described at the top of this module. Groups come in the order of their values (by size where a
        key is numeric).
    """
    cleaned: list[Run] = [
        ({str(k): str(v) for k, v in overrides.items() if not str(k).startswith("hydra.")}, metrics)
        for overrides, metrics in runs
    ]
    keys = list(dict.fromkeys(key for overrides, _ in cleaned for key in overrides if key not in over))
    values = {key: in_order(overrides.get(key, "") for overrides, _ in cleaned) for key in keys}
    varied = [key for key in keys if len(values[key]) > 1]
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for overrides, metrics in cleaned:
        groups.setdefault(tuple((key, overrides.get(key, "")) for key in varied), []).append((overrides, metrics))
    ordered = sorted(groups, key=lambda group: [values[key].index(value) for key, value in group])
    failed = [
        {"overrides": dict(overrides), "error": (metrics or {}).get("error")}
        for overrides, metrics in cleaned
        if _failed(metrics)
    ]
    failed_rows = [
        {"overrides": dict(overrides), "row": name, "error": row["error"]}
        for overrides, metrics in cleaned
        for name, row in rows_of(metrics or {}).items()
        if row.get("error")
    ]
    return {
        "schema": SCHEMA,
        "over": list(over),
        "spread": spread,
        "varied": varied,
        "fixed": {key: values[key][0] for key in keys if len(values[key]) == 1},
        "n_runs": len(cleaned),
        "failed": failed,
        "failed_rows": failed_rows,
        "groups": [_aggregate_group(group, groups[group], over) for group in ordered],
    }


def mean_of(row: Mapping[str, Any], metric: str) -> float | None:
    """The mean of a metric in one aggregated row, or None."""
    return (row["metrics"].get(metric) or {}).get("mean")


def mean_rows(group: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A group's means in the shape of one run's rows, so that the same judgements apply."""
    return {
        name: {
            **{metric: entry["mean"] for metric, entry in row["metrics"].items()},
            "access": row["access"],
            "tuning": row.get("tuning"),
            "applied": row["n_applied"] > 0,
        }
        for name, row in group["rows"].items()
    }


def spread_of(total: Mapping[str, Any], entry: Mapping[str, Any]) -> float | None:
    """What stands after ± beside a mean: the standard deviation, or the standard error where that was asked for."""
    return entry.get(total["spread"])


def methods_of(total: Mapping[str, Any]) -> list[str]:
    """Every method's name, in the order of the group that has most of them."""
    fullest_first = sorted((group["rows"] for group in total["groups"]), key=len, reverse=True)
    return list(dict.fromkeys(name for rows in fullest_first for name in rows))
