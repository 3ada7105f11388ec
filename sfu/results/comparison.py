"""Compare a run with its repetition: heads, figures, settings and the environment.

Two runs agree if no head and no figure differs by more than a tolerance that depends on what the runs have in common:

* the same versions, device, threads and dtype: heads and figures agree to rounding in float64 (:data:`SAME`);
* otherwise, float64 heads to :data:`OTHER`, and float32 heads to :data:`SINGLE`. An accuracy may then differ by what a
  few rows at the boundary of two classes make.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sfu.results.rows import Metrics, flat_items, is_number, rows_of

_NOT_RESULTS = ("seconds", "peak_memory_mb")
_PERCENTAGES = ("accuracy", "gap", "agreement", "mia")
_ENVIRONMENT = ("sfu_version", "versions", "device", "threads", "dtype", "tf32", "git")
_LOCAL = ("logger.", "reuse", "device", "threads", "seeds")
"""Settings of a repetition that may differ."""


class Tolerance(NamedTuple):
    """What may differ: relative differences of heads and of figures, and accuracies in points."""

    head: float
    figure: float
    points: float


SAME = Tolerance(1e-10, 1e-8, 0.0)
OTHER = Tolerance(1e-6, 1e-4, 0.1)
SINGLE = Tolerance(1e-3, 1e-2, 0.5)


@dataclass(frozen=True)
class RowComparison:
    """How a row differs.

    Attributes:
        name: The row.
        head: Relative difference of the heads' parameters; ``None`` if one of them is missing.
        figure: The metric that differs most, in units of what is tolerated, or an empty string.
        first: Its value in the first run.
        second: Its value in the repetition.
        agrees: Whether head and figures agree.
    """

    name: str
    head: float | None
    figure: str
    first: Any
    second: Any
    agrees: bool


@dataclass(frozen=True)
class Comparison:
    """How a run and its repetition differ.

    Attributes:
        rows: Each row of either run.
        environment: What differs of versions and machine: name, first and second value.
        settings: What differs of the resolved settings.
        tolerance: What was tolerated.
    """

    rows: list[RowComparison]
    environment: list[tuple[str, Any, Any]]
    settings: list[tuple[str, Any, Any]]
    tolerance: Tolerance

    @property
    def agrees(self) -> bool:
        """Whether all rows agree, and the settings are the same."""
        return not self.settings and all(row.agrees for row in self.rows)


def compare(
    first: tuple[Metrics, Mapping[str, Any]], second: tuple[Metrics, Mapping[str, Any]],
    heads: Mapping[str, float | None],
) -> Comparison:  # fmt: skip
    """Compare two runs.

    Args:
        first: The metrics and the resolved configuration of the first run.
        second: Those of the repetition.
        heads: Relative differences of the heads, by row (:func:`head_differences`).
    """
    environment = list(_differences(*(_environment(metrics) for metrics, _ in (first, second))))
    settings = [
        one for one in _differences(*(dict(flat_items(config)) for _, config in (first, second)))
        if not one[0].startswith(_LOCAL)
    ]  # fmt: skip
    single = any((metrics.get("run") or {}).get("dtype") == "float32" for metrics, _ in (first, second))
    other = any(name != "git" and not name.startswith("git.") for name, *_ in environment)
    tolerance = SAME if not other else SINGLE if single else OTHER
    ours, theirs = rows_of(first[0]), rows_of(second[0])
    names = dict.fromkeys([*ours, *theirs])
    rows = [_compare_row(name, ours.get(name), theirs.get(name), heads.get(name), tolerance) for name in names]
    return Comparison(rows, environment, settings, tolerance)


def head_differences(first: Path, second: Path) -> dict[str, float | None]:
    """Return ``|w - v| / |w|`` of the heads of two run folders, by row; ``None`` if one is missing or unlike.

    Raises:
        ArtifactError: A head is damaged.
    """
    from sfu.heads.files import load_head

    found: dict[str, float | None] = {}
    for path in sorted((first / "heads").glob("*.json")):
        other = second / "heads" / path.name
        if not other.is_file():
            found[path.stem] = None
            continue
        ours, theirs = (load_head(one.with_suffix("")).parameters_CE.double() for one in (path, other))
        size = float(ours.norm()) if ours.shape == theirs.shape else math.nan
        found[path.stem] = None if math.isnan(size) else float((ours - theirs).norm()) / (size or 1.0)
    return found


def _environment(metrics: Metrics) -> dict[str, Any]:
    run = metrics.get("run") or {}
    return dict(flat_items({key: run.get(key) for key in _ENVIRONMENT}))


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in dict.fromkeys([*first, *second]):
        if first.get(key) != second.get(key):
            yield key, first.get(key), second.get(key)


def _compare_row(
    name: str, first: Mapping[str, Any] | None, second: Mapping[str, Any] | None, head: float | None,
    tolerance: Tolerance,
) -> RowComparison:  # fmt: skip
    if first is None or second is None:
        return RowComparison(name, head, "row", first is not None, second is not None, agrees=False)
    worst, excess = "", 0.0
    for key in dict.fromkeys([*first, *second]):
        found = _excess(key, first.get(key), second.get(key), tolerance)
        if found > excess:
            worst, excess = key, found
    known = head is not None or (first.get("error") is not None and second.get("error") is not None)
    agrees = excess <= 1 and known and (head is None or head <= tolerance.head)
    return RowComparison(name, head, worst, first.get(worst), second.get(worst), agrees)


def _excess(key: str, first: Any, second: Any, tolerance: Tolerance) -> float:
    """Return a difference in units of what is tolerated; infinity for what must be equal."""
    if key in _NOT_RESULTS or isinstance(first, dict | list) or isinstance(second, dict | list):
        return 0.0
    if key in ("note", "error") or first == second:
        return 0.0
    if not (is_number(first) and is_number(second)):
        return math.inf
    apart = abs(first - second)
    if any(word in key for word in _PERCENTAGES):
        return apart / tolerance.points if tolerance.points else (0.0 if apart <= SAME.figure * 100 else math.inf)
    size = max(abs(first), abs(second), 1e-9)
    return apart / (size * tolerance.figure)
