"""Means over seeds with their uncertainty, and one rule for better, equal and worse.

Differences are paired: both numbers of a pair come from the same run, so they share its split. Over n >= 2 runs, their
95 % interval is mean ± t(0.975, n - 1) std / sqrt n (Student). ``Relation`` states the rule. One run has no interval.
Its numbers are compared as they are, and the tables say that they come from one run.

Source: D. J. Schuirmann, "A comparison of the two one-sided tests procedure and the power approach", Journal of
Pharmacokinetics and Biopharmaceutics 15 (1987).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from sfu.results.rows import is_number

CONFIDENCE, _ROUNDING = 0.95, 1e-9
MARGINS: Mapping[str, float] = {
    "distance": 0.01, "test_accuracy": 0.1, "remain_accuracy": 0.1, "forget_accuracy": 0.1, "mia": 0.5,
}  # fmt: skip
"""Differences up to which two methods count as equal: a share of the original distance, and percentage points."""


@dataclass(frozen=True)
class Statistic:
    """A metric over the ``n`` runs of a group that have it; the ``missing`` others are never read as zero.

    ``mean`` is None if no run has it. ``std`` is the sample standard deviation (divisor n - 1), ``stderr`` that of the
    mean (std / sqrt n) and ``interval`` the mean's 95 % interval; they are None below two values. ``values`` has an
    entry for each run of the group, in the same order for all its methods and metrics.
    """

    mean: float | None = None
    std: float | None = None
    stderr: float | None = None
    n: int = 0
    missing: int = 0
    interval: list[float] | None = None
    values: list[float | None] = field(default_factory=list)

    @property
    def low(self) -> float | None:
        """Lower end of the interval."""
        return None if self.interval is None else self.interval[0]

    @property
    def high(self) -> float | None:
        """Upper end of the interval."""
        return None if self.interval is None else self.interval[1]

    @classmethod
    def of(cls, values: Sequence[Any]) -> Statistic:
        """Summarise values, some of which may be missing."""
        known = [float(value) if is_number(value) else None for value in values]
        present = [value for value in known if value is not None]
        missing = len(values) - len(present)
        if not present:
            return cls(missing=missing, values=known)
        mean = statistics.fmean(present)
        if len(present) == 1:
            return cls(mean, None, None, 1, missing, None, known)
        std = statistics.stdev(present)
        return cls(mean, std, std / math.sqrt(len(present)), len(present), missing, interval(present), known)


class Relation(Enum):
    """How a quantity compares with another of which less is better.

    * ``equal``: the 90 % interval of the difference lies within ± the margin (two one-sided tests at 5 %);
    * otherwise ``better`` or ``worse``: the 95 % interval lies on one side of 0;
    * otherwise ``unclear``: the runs do not tell.
    """

    better = "better"
    equal = "equal"
    worse = "worse"
    unclear = "unclear"


def relation(differences: Iterable[float], margin: float) -> Relation | None:
    """Return what paired differences say of the first of each pair; ``None`` if there are none.

    Args:
        differences: First minus second, one for each run.
        margin: The largest difference that does not matter, in the same unit.
    """
    found = list(differences)
    if not found:
        return None
    low, high = interval(found, 2 * CONFIDENCE - 1)  # both one-sided tests reject, each at 1 - CONFIDENCE
    if -margin - _ROUNDING <= low and high <= margin + _ROUNDING:
        return Relation.equal
    low, high = interval(found, CONFIDENCE)
    return Relation.better if high < 0 else Relation.worse if low > 0 else Relation.unclear


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> list[float]:
    """Return Student's interval of the mean; of a single value, the value twice."""
    from scipy.special import stdtrit  # quicker to import than scipy.stats

    mean, n = statistics.fmean(values), len(values)
    if n == 1:
        return [mean, mean]
    half = float(stdtrit(n - 1, (1 + confidence) / 2)) * statistics.stdev(values) / math.sqrt(n)
    return [mean - half, mean + half]
