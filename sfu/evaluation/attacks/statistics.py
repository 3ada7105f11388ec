r"""What membership scores show: the area under the ROC curve, rates at small false-positive rates, and their intervals.

Members are rows that were trained on and then forgotten; the others were never seen. A larger score says "member".
Intervals hold 95 % of the time.

* The area A counts pairs of a member and another row: those in the right order, and half of the ties. Its interval is
  the score interval of Hanley and McNeil's variance (Newcombe's method 5): all :math:`\theta` with
  :math:`|A - \theta| \le 1.96\, \sqrt{V(\theta)}` and, for m members, n others and :math:`k = (m + n)/2 - 1`,

  .. math:: V(\theta) = \frac{\theta (1 - \theta)}{m n}
            \left(1 + k\, \frac{1 - \theta}{2 - \theta} + k\, \frac{\theta}{1 + \theta}\right).

  For :math:`m = n` and :math:`\theta = 1/2` it is the exact variance of the Mann-Whitney statistic without ties, so the
  interval holds 1/2 exactly as often as that test accepts. It is never empty, even at an area of 1.
* Counts have Clopper and Pearson's exact interval.
* The lower bound of epsilon is that of one run (Steinke et al.): guesses of which r were made and v were right cannot
  be so good under a smaller epsilon (delta = 0).

Sources: Hanley and McNeil 1982; Newcombe 2006 (part 2, method 5); Clopper and Pearson 1934; Steinke, Nasr and Jagielski
2023, "Privacy auditing with one (1) training run", theorem 5.2 for pure differential privacy.
Shapes: M members, K others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from numpy.typing import NDArray

RATES = (0.01, 0.001)
"""False-positive rates at which the true-positive rate is told."""
CONFIDENCE = 0.95
_Z = 1.959963984540054
_GUESSED = 0.1
"""Share of all rows that the audit of epsilon calls members, and that it calls others."""
_FEWEST = 4
"""Fewest rows of each side for a threshold that is chosen on one half and used on the other."""


class Roc(NamedTuple):
    """The curve: false- and true-positive rates from (0, 0) to (1, 1), a point for each distinct score."""

    false: NDArray[Any]
    true: NDArray[Any]


def measure(members_M: NDArray[Any], others_K: NDArray[Any], *, seed: int) -> dict[str, Any]:
    """Return all figures of an attack, as ``metrics.json`` has them; those that cannot be had are ``None``.

    The ``note`` says why. Rates and areas run from 0 to 1. The seed is that of the halves on which the threshold of the
    balanced accuracy is chosen and used.
    """
    n_members, n_others = len(members_M), len(others_K)
    curve, notes = roc(members_M, others_K), []
    area = area_under(members_M, others_K)
    found: dict[str, Any] = {"auc": area, "auc_interval": area_interval(area, n_members, n_others)}
    found["balanced_accuracy"] = balanced_accuracy(members_M, others_K, seed=seed)
    if found["balanced_accuracy"] is None:
        notes.append(f"balanced_accuracy needs {_FEWEST} rows of each side")
    for rate in RATES:
        key, needed = f"tpr_at_fpr_{rate:g}", round(1 / rate)
        found |= {key: None, f"{key}_interval": None}
        if n_others < needed:
            notes.append(f"{key} needs {needed:,} rows that were never seen, and there are {n_others:,}")
            continue
        right = round(float(curve.true[curve.false <= rate].max()) * n_members)
        found |= {key: right / n_members, f"{key}_interval": binomial_interval(right, n_members)}
    found["epsilon_lower"] = epsilon_bound(members_M, others_K)
    return found | {"n_members": n_members, "n_others": n_others, "note": "; ".join(notes) or None}


def area_under(members_M: NDArray[Any], others_K: NDArray[Any]) -> float:
    """Return the share of pairs in which the member has the larger score; ties count half."""
    import numpy as np

    sorted_K = np.sort(others_K)
    below_M, up_to_M = (np.searchsorted(sorted_K, members_M, side) for side in ("left", "right"))
    return float((below_M + up_to_M).sum() / (2 * len(members_M) * len(others_K)))


def area_interval(area: float, n_members: int, n_others: int) -> list[float]:
    """Return the 95 % score interval of an area (Hanley and McNeil's variance)."""
    mean = (n_members + n_others) / 2 - 1

    def outside(theta: float) -> float:
        """Positive if theta is too far from the area."""
        spread = 1 + mean * (1 - theta) / (2 - theta) + mean * theta / (1 + theta)
        return (area - theta) ** 2 - _Z**2 * theta * (1 - theta) / (n_members * n_others) * spread

    def end(far: float) -> float:
        near = area
        if outside(far) <= 0:
            return far
        for _ in range(60):
            middle = (near + far) / 2
            near, far = (near, middle) if outside(middle) > 0 else (middle, far)
        return near

    return [end(0.0), end(1.0)]


def binomial_interval(successes: int, trials: int, confidence: float = CONFIDENCE) -> list[float]:
    """Return Clopper and Pearson's interval of a probability."""
    from scipy.special import betaincinv  # quicker to import than scipy.stats

    tail = (1 - confidence) / 2
    low = 0.0 if successes == 0 else float(betaincinv(successes, trials - successes + 1, tail))
    high = 1.0 if successes == trials else float(betaincinv(successes + 1, trials - successes, 1 - tail))
    return [low, high]


def roc(members_M: NDArray[Any], others_K: NDArray[Any]) -> Roc:
    """Return the curve of all thresholds; rows of equal scores are called members together."""
    import numpy as np

    scores = np.concatenate([members_M, others_K])
    order = np.argsort(-scores, kind="stable")
    is_member = order < len(members_M)
    last = np.append(np.diff(scores[order]) != 0, True)
    true, false = np.cumsum(is_member)[last], np.cumsum(~is_member)[last]
    return Roc(np.append(0.0, false / len(others_K)), np.append(0.0, true / len(members_M)))


def balanced_accuracy(members_M: NDArray[Any], others_K: NDArray[Any], *, seed: int) -> float | None:
    """Return the mean of the true-positive and the true-negative rate, at a threshold chosen on other rows.

    Each half of the rows is called by the threshold that is best on the other half. Returns ``None`` with too few rows.
    """
    import numpy as np

    if min(len(members_M), len(others_K)) < _FEWEST:
        return None
    rng = np.random.default_rng(seed)
    halves = [np.array_split(rng.permutation(side), 2) for side in (members_M, others_K)]
    found = []
    for chosen_on in range(2):
        threshold = _best_threshold(halves[0][chosen_on], halves[1][chosen_on])
        members, others = halves[0][1 - chosen_on], halves[1][1 - chosen_on]
        found.append(((members >= threshold).mean() + (others < threshold).mean()) / 2)
    return float(np.mean(found))


def _best_threshold(members: NDArray[Any], others: NDArray[Any]) -> float:
    """Return the threshold, midway between two scores, from which on calling rows members is best."""
    import numpy as np

    scores = np.unique(np.concatenate([members, others]))
    scores = np.append(scores[0], (scores[1:] + scores[:-1]) / 2)
    hits = len(members) - np.searchsorted(np.sort(members), scores)
    right = hits / len(members) + np.searchsorted(np.sort(others), scores) / len(others)
    return float(scores[right.argmax()])


def epsilon_bound(members_M: NDArray[Any], others_K: NDArray[Any]) -> float:
    """Return what epsilon is at least, with 95 % confidence, if half of the rows were drawn at random as members.

    The tenth of all rows with the largest scores is guessed to be members, the tenth with the smallest to be others.
    How many are guessed was settled before; ties are broken against the attack.
    """
    import numpy as np

    scores = np.concatenate([members_M, others_K])
    is_member = np.arange(len(scores)) < len(members_M)
    count = max(1, round(_GUESSED * len(scores)))
    top = np.lexsort((is_member, -scores))[:count]  # among equal scores, the wrong ones first
    bottom = np.lexsort((~is_member, scores))[:count]
    return epsilon_of_guesses(int(is_member[top].sum() + (~is_member[bottom]).sum()), 2 * count)


def epsilon_of_guesses(right: int, made: int) -> float:
    r"""Return the smallest epsilon under which ``right`` of ``made`` guesses are not too good at the 5 % level.

    Each guess is right with probability :math:`e^\epsilon / (1 + e^\epsilon)` at most, so epsilon is at least the logit
    of the one-sided lower bound of Clopper and Pearson, or 0.
    """
    low = binomial_interval(right, made, 2 * CONFIDENCE - 1)[0]
    return max(0.0, math.log(low / (1 - low))) if low > 0 else 0.0


def thinned(curve: Roc, points: int = 400) -> dict[str, list[float]]:
    """Return a curve for a file: all corners near 0, where log axes show them, and fewer further on."""
    import numpy as np

    keep: Sequence[int] | NDArray[Any] = np.arange(len(curve.false))
    if len(curve.false) > points:
        along = np.geomspace(1, len(curve.false), points)
        keep = np.unique(np.append(along.astype(np.int64) - 1, len(curve.false) - 1))
    return {"fpr": curve.false[keep].tolist(), "tpr": curve.true[keep].tolist()}
