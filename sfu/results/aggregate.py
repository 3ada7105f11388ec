"""One table from any number of runs: mean and spread over seeds for every setting, method and metric.

A single run is a table of one run, so that every table, picture and verdict is made from the same thing.
``ResultTable.to_json`` is the content of sweep.json::

    {"schema": 1, "over": ["seed"], "spread": "std", "varied": ["head.l2"], "fixed": {"dataset": "digits"}, "n_runs": 9,
     "failed": [{"overrides": {...}, "error": str | None}],
     "failed_rows": [{"overrides": {...}, "row": str, "error": str}],
     "ranks": {method: {"mean": float, "low": float, "high": float, "best": float}},
     "groups": [{"overrides": {"head.l2": "0.001"}, "n": 3, "n_failed": 0, "over": {"seed": ["0", "1", "2"]},
                 "data": [[dataset | None, backbone | None]],
                 "rows": {method: {"access": str | None, "tuning": str | None, "n": 3, "n_applied": 3, "notes": [str],
                                   "attacks": {attack: {key: statistic}},
                                   "metrics": {name: {"mean": float | None, "std": float | None,
                                                      "stderr": float | None, "n": 3, "missing": 0,
                                                      "interval": [float, float] | None,
                                                      "values": [float | None]}}}}}]}

where a ``statistic`` is what ``metrics`` holds for each name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from sfu.results.ranks import Rank, rank_methods
from sfu.results.rows import LABELS, Metrics, Row, attacks_of_row, is_number, rows_of, unenforced
from sfu.results.statistic import MARGINS, Relation, Statistic, relation

Overrides = Mapping[str, str]
Run = tuple[Overrides, Metrics | None]
Spread = Literal["std", "stderr"]

SCHEMA = 1
SPREADS: Mapping[str, str] = {"std": "sample standard deviation", "stderr": "standard error"}
"""What may stand after ± in a table, in words."""


@dataclass(frozen=True)
class MethodResult:
    """One method over the ``n`` runs of a group that have it, and what its numbers mean.

    ``access`` says what it may read (``none``, ``forget``, ``stored`` or ``retained``), ``tuning`` how its settings
    were chosen, ``n_applied`` in how many runs the whole step was applied, ``unenforced`` what did not keep it from the
    retained data in some run (:func:`sfu.results.rows.unenforced`), ``attacks`` the figures of each membership attack.
    """

    access: str | None
    tuning: str | None
    n: int
    n_applied: int
    notes: list[str]
    metrics: dict[str, Statistic]
    unenforced: list[str] = field(default_factory=list)
    attacks: dict[str, dict[str, Statistic]] = field(default_factory=dict)

    def __getitem__(self, metric: str) -> Statistic:
        return self.metrics.get(metric) or Statistic()

    def mean(self, metric: str) -> float | None:
        """Return the mean of a metric, or None if no run has it."""
        return self[metric].mean

    @property
    def is_tuned_on_retrained(self) -> bool:
        """True if its settings were chosen by the distance to Retrained: an upper bound, not source-free."""
        return (self.tuning or "").startswith("oracle")

    @property
    def is_source_free(self) -> bool:
        """True if the method, and whoever chose its settings, saw nothing but the head and the forget set."""
        return self.access == "forget" and not self.is_tuned_on_retrained

    @property
    def is_untouched(self) -> bool:
        """True for the head as it was."""
        return self.access == "none"

    @property
    def is_withheld(self) -> bool:
        """True if a step was computed but in no run (fully) applied."""
        return self.n_applied == 0 and not self.is_untouched

    @property
    def is_closer_than_nothing(self) -> bool:
        """True if it ended closer to Retrained than the untouched head, by the rule of ``Relation``."""
        return self._beside_nothing is Relation.better

    @property
    def is_worse_than_nothing(self) -> bool:
        """True if it ended further from Retrained than the untouched head, by the rule of ``Relation``."""
        return not self.is_untouched and self._beside_nothing is Relation.worse

    @property
    def _beside_nothing(self) -> Relation | None:
        """The distance beside that of the untouched head, which is 1."""
        return relation((value - 1 for value in self["distance"].values if value is not None), MARGINS["distance"])


@dataclass(frozen=True)
class Group:
    """The ``n`` runs of one setting: the value of each key that varies, and the methods by name.

    ``data`` holds the datasets and backbones that the runs record, each pair once.
    """

    overrides: dict[str, str]
    n: int
    n_failed: int
    over: dict[str, list[str]]
    rows: dict[str, MethodResult]
    data: list[list[str | None]] = field(default_factory=list)

    def entry(self, method: str, metric: str) -> Statistic:
        """Return a metric of a method; an empty one if the group does not have it."""
        return self.rows[method][metric] if method in self.rows else Statistic()


@dataclass(frozen=True)
class ResultTable:
    """Results by setting and method: ``groups`` in the order of their values (by size where a key is numeric).

    ``varied`` keys tell the groups apart, ``over`` keys are averaged over, ``fixed`` keys have one value in all runs.
    ``n_runs`` includes the runs that ``failed``; ``failed_rows`` are methods that failed in a run with other results.
    """

    over: list[str]
    spread: Spread
    varied: list[str]
    fixed: dict[str, str]
    n_runs: int
    failed: list[dict[str, Any]]
    failed_rows: list[dict[str, Any]]
    groups: list[Group]

    @property
    def methods(self) -> list[str]:
        """Every method's name, in the order of the group that has most of them."""
        return _names(group.rows for group in self.groups)

    @property
    def results(self) -> list[MethodResult]:
        """Every row of every group."""
        return [row for group in self.groups for row in group.rows.values()]

    @cached_property
    def ranks(self) -> dict[str, Rank]:
        """Rank the untouched head and the methods that see no more than the forget set, over all settings.

        They are those that have a distance in every run of every setting; no method is ranked without several runs.
        """
        groups = [group for group in self.groups if group.rows]
        found = {
            name: [group.entry(name, "distance").values for group in groups]
            for name in self.methods
            if all(name in group.rows and _is_ranked(group.rows[name]) for group in groups)
        }
        known = {
            name: [[value for value in values if value is not None] for values in settings]
            for name, settings in found.items()
            if all(value is not None for values in settings for value in values)
        }
        return rank_methods(known) if groups and all(group.n > 1 for group in groups) else {}

    def spread_of(self, statistic: Statistic) -> float | None:
        """Return what stands after ± beside a mean, or None below two values."""
        return statistic.stderr if self.spread == "stderr" else statistic.std

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain data (see the top of this module)."""
        return {"schema": SCHEMA, **asdict(self), "ranks": {name: asdict(rank) for name, rank in self.ranks.items()}}


def _is_ranked(row: MethodResult) -> bool:
    return row.is_source_free or row.is_untouched


def number_of(value: str) -> float | None:
    """Return an override's value as a finite number, or None."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def in_order(values: Iterable[str]) -> list[str]:
    """Return the distinct values, by size if all are numbers, else as they came."""
    distinct = list(dict.fromkeys(values))
    if all(number_of(value) is not None for value in distinct):
        return sorted(distinct, key=float)
    return distinct


def aggregate(runs: Sequence[Run], over: Sequence[str] = ("seed",), spread: Spread = "stderr") -> ResultTable:
    """Group runs by every override except those in ``over``, and average each group.

    Args:
        runs: ``(overrides, metrics)`` of each job, in job order. Metrics of a failed job are None, or a dict without
            ``rows`` whose ``error`` says why. Overrides beginning with ``hydra.`` are ignored.
        over: The override keys to average over.
        spread: What tables and pictures show beside a mean.
    """
    cleaned: list[tuple[dict[str, str], Metrics]] = [
        ({str(k): str(v) for k, v in overrides.items() if not str(k).startswith("hydra.")}, metrics or {})
        for overrides, metrics in runs
    ]
    keys = dict.fromkeys(key for overrides, _ in cleaned for key in overrides if key not in over)
    values = {key: in_order(overrides.get(key, "") for overrides, _ in cleaned) for key in keys}
    varied = [key for key in keys if len(values[key]) > 1]
    by_setting: dict[tuple[str, ...], list[tuple[dict[str, str], Metrics]]] = {}
    for run in cleaned:
        by_setting.setdefault(tuple(run[0].get(key, "") for key in varied), []).append(run)

    def place(setting: tuple[str, ...]) -> list[int]:
        return [values[key].index(value) for key, value in zip(varied, setting, strict=True)]

    return ResultTable(
        over=list(over),
        spread=spread,
        varied=varied,
        fixed={key: values[key][0] for key in keys if key not in varied},
        n_runs=len(cleaned),
        failed=[
            {"overrides": overrides, "error": metrics.get("error")}
            for overrides, metrics in cleaned
            if "rows" not in metrics
        ],
        failed_rows=[
            {"overrides": overrides, "row": name, "error": row["error"]}
            for overrides, metrics in cleaned
            for name, row in rows_of(metrics).items()
            if row.get("error")
        ],
        groups=[
            _group(dict(zip(varied, setting, strict=True)), by_setting[setting], over)
            for setting in sorted(by_setting, key=place)
        ],
    )


def table_of_run(metrics: Metrics) -> ResultTable:
    """Return the table of a single run."""
    return aggregate([({}, metrics)])


def _group(setting: dict[str, str], runs: Sequence[tuple[dict[str, str], Metrics]], over: Sequence[str]) -> Group:
    done = [
        (overrides, {name: row for name, row in rows_of(metrics).items() if not row.get("error")})
        for overrides, metrics in runs
        if "rows" in metrics
    ]
    given = {key for overrides, _ in runs for key in overrides}
    return Group(
        overrides=setting,
        n=len(done),
        n_failed=len(runs) - len(done),
        over={key: in_order(o[key] for o, _ in done if key in o) for key in over if key in given},
        rows={name: _method_result([rows.get(name) for _, rows in done]) for name in _names(r for _, r in done)},
        data=list(map(list, dict.fromkeys(_data_of(metrics) for _, metrics in runs if "rows" in metrics))),
    )


def _data_of(metrics: Metrics) -> tuple[str | None, str | None]:
    data = (metrics.get("run") or {}).get("data") or {}
    return data.get("name"), (data.get("backbone") or {}).get("name")


def _names(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """All names of rows, in the order of what has most of them."""
    return list(dict.fromkeys(name for rows in sorted(found, key=len, reverse=True) for name in rows))


def _method_result(rows: Sequence[Row | None]) -> MethodResult:
    """Summarise one method; ``rows`` has None for a run without it."""
    present = [row for row in rows if row is not None]
    values = [(key, value) for row in present for key, value in row.items() if key not in LABELS]
    attacks = [attacks_of_row(row or {}) for row in rows]
    names = dict.fromkeys(name for found in attacks for name in found)
    texts = {key for key, value in values if value is not None and not is_number(value)}
    return MethodResult(
        access=present[0].get("access"),
        tuning=present[0].get("tuning"),
        n=len(present),
        n_applied=sum(row.get("applied") is not False for row in present),
        notes=list(dict.fromkeys(str(row["note"]) for row in present if row.get("note"))),
        unenforced=max(map(unenforced, present), key=len),
        metrics={
            key: Statistic.of([(row or {}).get(key) for row in rows])
            for key in dict.fromkeys(key for key, _ in values)
            if key not in texts
        },
        attacks={name: _statistics([found.get(name, {}) for found in attacks]) for name in names},
    )


def _statistics(figures: Sequence[Mapping[str, float]]) -> dict[str, Statistic]:
    """Summarise every number that some run has."""
    keys = dict.fromkeys(key for found in figures for key in found)
    return {key: Statistic.of([found.get(key) for found in figures]) for key in keys}
