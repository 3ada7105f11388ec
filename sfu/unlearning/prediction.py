"""Predict what a Newton step is worth: its share of the distance, that of all requests so far, and of what it consists.

Shapes: C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from sfu.curvature.caution import Assessment
from sfu.curvature.cross_validation import Validation
from sfu.curvature.share import PredictedShare, predict_share
from sfu.curvature.source_fit import expected_gain, noise_factor
from sfu.heads.base import Head
from sfu.heads.recipe import OPTIMUM, SUM
from sfu.lazy import torch
from sfu.operators.base import DampedInverse
from sfu.request import ForgetRequest
from sfu.unlearning.further_steps import Candidate

if TYPE_CHECKING:
    from torch import Tensor

_OPTIMUM = 0.1
"""A head is at its optimum if the gradient of a forget set has no larger part that is no sampling noise."""
_MOST = 0.3
"""Of more than this share of the training rows no share is predicted: there, the interval was seldom right."""
_HALF_OF_SIGNAL = 0.7
"""Half-width of the interval of the log of what is left of a known part; measured on estimators of scikit-learn."""


def share_of_step(
    request: ForgetRequest, right_CE: Tensor, assessment: Assessment, validation: Validation, chosen: Candidate
) -> PredictedShare | None:
    """Predict the share of the squared distance that a step removes, if it is a Newton step from an optimum.

    ``right_CE`` is the right-hand side of the step. Of a head that was stopped early, nothing is known.
    """
    head, inverse = request.head, chosen.inverse
    signal = max(float(fold.signal_CE.norm()) for fold in validation.folds)
    optimum = signal <= _OPTIMUM * float(right_CE.norm())
    grown = head.recipe.l2_reduction == SUM  # then l2 is larger for the retained rows, and the rest is known
    few = request.count <= _MOST * head.n_train
    if inverse is None or assessment.reasons or head.feature_weights_CD is None or not ((optimum or grown) and few):
        return None
    rows = assessment.evidence.effective_rows + (0.0 if request.earlier is None else request.earlier.effective)
    share = predict_share(request, validation.sources, chosen.choice, inverse, rows)
    return share if share is None or optimum else _with_signal(share, validation, chosen, inverse, head.l2)


def _with_signal(
    share: PredictedShare, validation: Validation, chosen: Candidate, inverse: DampedInverse, l2: float
) -> PredictedShare | None:
    r"""Return the share if a part s of the gradient is no sampling noise, but known.

    Its part of the squared distance, :math:`s^T H_r^{-1} s`, is that of the estimate at the ridge where traces agree,
    times that ridge over l2.
    """
    alone = [replace(fold, gradient_CE=fold.signal_CE, signal_CE=0 * fold.signal_CE) for fold in validation.folds]
    of_signal, signal_CE = expected_gain(alone, chosen.choice, 1.0), validation.folds[0].signal_CE
    of_noise = chosen.choice.gain - of_signal
    known = share.ridge / l2 * float((signal_CE * inverse.solve(signal_CE, share.ridge - l2)).sum())
    if not (of_noise > 0 and 0 < of_signal < known):
        return None
    noise = of_noise / share.value
    left_of_noise, left_of_signal = (1 - share.value) * noise, known - of_signal
    left = left_of_noise + left_of_signal
    low, middle, high = map(_logit, (share.interval[0], share.value, share.interval[1]))
    value, part = 1 - left / (known + noise), left_of_noise / left
    below, above = (math.hypot(part * off, (1 - part) * _HALF_OF_SIGNAL) for off in (middle - low, high - middle))
    return PredictedShare(value, (_logistic(_logit(value) - below), _logistic(_logit(value) + above)), share.ridge)


def _logit(share: float) -> float:
    return math.log(share / (1 - share))


def _logistic(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def removed_so_far(
    share: PredictedShare | None, assessment: Assessment, request: ForgetRequest, given: Head
) -> tuple[float, float, float] | None:
    """Return what a head predicts after a request (:attr:`sfu.heads.forgotten.Forgotten.removed`).

    The squared distances of random requests add up, in proportion to their rows. Rows too few for a prediction may have
    removed any share; none is the best guess. ``given`` is the head before the request.
    """
    before = (0.0, 0.0, 0.0) if request.earlier is not None else given.forgotten.removed
    optimum = request.head.recipe.trained == OPTIMUM and request.head.feature_weights_CD is not None
    if before is None or assessment.reasons or not optimum or given.recipe.trained != OPTIMUM:
        return None
    parts = (0.0, 0.0, 1.0) if share is None else (share.interval[0], share.value, share.interval[1])
    low, value, high = (old + request.count * part for old, part in zip(before, parts, strict=True))
    return low, value, high


def gains_apart(
    gain: float | None, chosen: Candidate, validation: Validation, request: ForgetRequest, given: Head
) -> dict[str, float]:
    """Return the gains of forgetting and of training that was left undone, each alone, if a step does both.

    What one of the two brings about for the other is in neither.
    """
    folds = validation.folds
    if gain is None or not folds or given.recipe.trained == OPTIMUM or request.head.recipe.trained != OPTIMUM:
        return {}
    nothing_CE = torch.zeros_like(folds[0].signal_CE)
    noise = noise_factor(len(folds), 1 - request.n_retain / request.head.n_train) if validation.divided else 1.0
    alone = {
        "gain_of_training": (1.0, [replace(one, gradient_CE=one.signal_CE, signal_CE=nothing_CE) for one in folds]),
        "gain_of_forgetting": (
            noise,
            [replace(one, gradient_CE=one.gradient_CE - one.signal_CE, signal_CE=nothing_CE) for one in folds],
        ),
    }
    square = request.step_ratio**2
    return {
        name: square * expected_gain(parts, chosen.choice, factor, floor=chosen.floor)
        for name, (factor, parts) in alone.items()
    }
