r"""How like the training rows each set of unlabelled rows is: how far it may stand for them.

Moments of the training rows, which a head keeps, tell. What counts is the largest drift that the rows do not rule out,
so few rows are trusted little. Sets are judged one by one: a foreign one takes no trust from the others, and scores
nothing; the fit may still find it a useful source.

Shapes: U unlabelled rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from sfu.curvature.calibration import factors_to
from sfu.curvature.evidence import Evidence, Finding
from sfu.lazy import torch
from sfu.request import ForgetRequest

if TYPE_CHECKING:
    from torch import Tensor

_DRIFT = (0.1, 0.18)
"""If unlabelled rows may have drifted by so much (root mean square over moments of the training rows, each in its
standard deviation), trust in them falls from 1 to 0. Half of them from another dataset are 0.15 or more."""
_TRACES = 1.5
"""Unlabelled rows are as unlike the training rows as this times the logarithm of the ratio of traces."""
_DRIFTED, _NOT_RULED_OUT = 35.0, 1.75
"""The gain that n forget rows show of other rows may err: it must exceed that without them by the first over n, if they
have drifted, and by the second over n^(3/4), if that is not ruled out."""
_LEAST = 1e-9  # likeness of a set that counts for nothing, so that sets of which none is like the training rows count


class Likeness(NamedTuple):
    """What sets of unlabelled rows may stand for.

    Attributes:
        like: How far they, taken together, may stand for the training rows, 0 to 1.
        alike: How far nothing tells the forget rows from them, or them from the training rows, 0 to 1.
        rows: How many rows that are equally curved they count for.
        weights: What a row of each set counts for, against one of the set most like the training rows, 0 to 1.
        doubts: See :class:`~sfu.curvature.source_fit.Caution`.
    """

    like: float
    alike: float
    rows: float
    weights: tuple[float, ...]
    doubts: tuple[float, ...]


NO_ROWS = Likeness(0.0, 0.0, 0.0, (), ())


def judge(request: ForgetRequest, evidence: Evidence, rows: float) -> Likeness:
    """Judge every set of unlabelled rows beside forget rows that count for ``rows`` rows."""
    findings = [evidence.each(name) for name in ("drift", "mean", "norms")]
    likes, alikes, doubts, sizes = [], [], [], []
    for j, rows_UD in enumerate(request.unlabelled):
        drift, *others = (found[j % len(found)] for found in findings)
        traces_U, unlike = _compared(request, rows_UD, drift)
        likes.append(1 - unlike)
        alikes.append(1 - max(finding.significance for finding in (drift, *others)))
        doubts.append(max(_NOT_RULED_OUT * unlike / rows**0.75, drift.significance * _DRIFTED / rows))
        sizes.append(traces_U * len(traces_U))
    weights = [max(like, _LEAST) / max(*likes, _LEAST) for like in likes]
    counts = torch.tensor([weight * len(of_set) for weight, of_set in zip(weights, sizes, strict=True)]).double()
    like, alike = (float(counts @ torch.tensor(of_sets).double() / counts.sum()) for of_sets in (likes, alikes))
    more = counted(torch.cat([weight * of_set for weight, of_set in zip(weights, sizes, strict=True)]))
    return Likeness(like, alike, max(1e-9, more), tuple(weights), tuple(doubts))


def counted(traces_N: Tensor) -> float:
    r"""Return how many equally curved rows would scatter as much: :math:`(\sum_i h_i)^2 / \sum_i h_i^2`.

    :math:`h_i` is what a row adds to the trace of the Hessian (:meth:`sfu.heads.base.Head.traces`); the result is 0
    where no row is curved.
    """
    return float(traces_N.sum()) ** 2 / max(float(traces_N.square().sum()), 1e-300)


def _compared(request: ForgetRequest, rows_UD: Tensor, drift: Finding) -> tuple[Tensor, float]:
    """Return the rows' traces ``[U]``, and how unlike the training rows they may be, 0 to 1."""
    head, wanted = request.head, request.head.kept.trace
    traces_U = head.traces(request.unlabelled_rows(rows_UD))
    if head.feature_weights_CD is not None:
        return traces_U, max(_unlike_in_trace(traces_U, request.trace if wanted is None else wanted), _drifted(drift))
    # the mean of heavy-tailed rows says nothing, and no number of them rules out a drift: it counts once it is seen
    scaled_U = traces_U if wanted is None else traces_U * factors_to(wanted / len(traces_U), traces_U)
    return scaled_U, drift.significance


def _drifted(drift: Finding) -> float:
    """Return 0 if the rows are known to be like the training rows, 1 if they may be far from them."""
    if drift.at_most is None:
        return 0.0
    none, all_of_it = _DRIFT
    return min(1.0, max(0.0, (math.sqrt(drift.at_most) - none) / (all_of_it - none)))


def _unlike_in_trace(traces_U: Tensor, wanted: float) -> float:
    """Compare the trace of the rows' Hessian with that of the training rows, or of the forget rows if it is unknown."""
    found, chance = float(traces_U.sum()), 3 * float(traces_U.std(correction=0)) * len(traces_U) ** 0.5
    nearest = min(max(wanted, found - chance), found + chance)
    return min(1.0, _TRACES * abs(math.log(max(nearest, 1e-300) / max(wanted, 1e-300))))
