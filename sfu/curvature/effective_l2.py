r"""Read the l2 of a head off rows that it was trained on.

At the optimum of ``mean loss + l2/2 |W|^2``, the mean gradient of the loss over the training rows is -l2 W. So

.. math:: \kappa = - \langle d, W \rangle / |W|^2

estimates l2, with the mean gradient d of the loss over a random sample of those rows and the regularised weights W. A
head whose optimiser has a weight decay of another kind, or was stopped early, has a kappa, too: it is the l2 under
which the head is nearest to an optimum. On rows that are no random sample, kappa estimates nothing.

Shapes: F rows, B of a chunk, C classes, E = D features (+ 1 with bias).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sfu.curvature.caution import assess
from sfu.curvature.evidence import examine
from sfu.data.settings import RANDOM
from sfu.errors import ConfigError, DataError
from sfu.lazy import torch
from sfu.names import counted
from sfu.request import ForgetRequest

if TYPE_CHECKING:
    from torch import Tensor

NOMINAL = 0.9
"""Probability that the interval holds the kappa of all training rows."""
_FEW = 20  # rows; the intervals of fewer were too narrow
_DEVIATIONS, _RATIO, _FEWEST = 3.0, 1.2, 100
"""A stated l2 is contradicted if kappa is so many standard errors off, and so many times it or its inverse: a smaller
error hardly matters. Fewer rows hide how skewed their values are."""


@dataclass(frozen=True)
class EffectiveL2:
    """An estimate of l2.

    Attributes:
        value: kappa. It is negative if larger weights would fit the rows worse, as on rows that were not trained on.
        error: Its standard error, for rows that are drawn without replacement.
        interval: Where the kappa of all training rows is, with probability :data:`NOMINAL`.
        third_moment: Of the estimate about its mean; below 0, since rows that fit badly have values far below others.
    """

    value: float
    error: float
    interval: tuple[float, float]
    third_moment: float

    def deviations(self, expected: float) -> float:
        """Return by how many standard errors the estimate exceeds what was expected.

        It is corrected for skewness (P. Hall, On the removal of skewness by transformation, 1992): without that, 100
        rows would exceed 3 standard errors by chance up to 25 times in 1,000.
        """
        if self.error == 0:
            return 0.0 if math.isclose(self.value, expected, rel_tol=1e-9) else math.copysign(math.inf, self.value)
        off, variance = self.value - expected, self.error**2
        skew = self.third_moment / variance
        return (off + skew / 6 + skew * off**2 / (3 * variance) + skew**2 * off**3 / (27 * variance**2)) / self.error


def effective_l2(request: ForgetRequest) -> EffectiveL2:
    """Estimate the l2 that a head was trained with from a random sample of its training rows.

    The value of a row is ``-<d_i, W> / |W|^2``; kappa is their mean, by the weights that the rows had in training.
    Neither the head's l2 nor its stored gradient is used.

    Raises:
        DataError: There are fewer than two rows, or all regularised weights of the head are 0.
    """
    from scipy.special import stdtrit

    count, left = request.n_forget, 1 - request.n_forget / request.head.n_train
    weight_CE = _regularized(request)
    square = float(weight_CE.square().sum())
    if count < 2 or square == 0:
        what = "a single row" if count < 2 else "a head whose weights are all 0"
        raise DataError(f"l2 cannot be read off {what}. Give the l2 that the head was trained with as a number.")
    rows, loss, found = request.data(), request.head.loss, []
    for chunk in rows.chunks():
        slopes_BC = loss.slopes(chunk.outputs(request.head.parameters_CE), chunk.labels_B)
        found.append((slopes_BC * chunk.push(weight_CE.to(slopes_BC))).sum(1))
    values_F = -torch.cat(found).double() / square
    shares_F = rows.shares_N.to(values_F)
    value = float(shares_F @ values_F)
    spread = float(shares_F.square() @ (values_F - value).square()) * count / (count - 1)
    error = math.sqrt(spread * left)
    wide = float(stdtrit(count - 1, (1 + NOMINAL) / 2)) * error
    third = float(shares_F.pow(3) @ (values_F - value).pow(3)) * left * (2 * left - 1)
    return EffectiveL2(value, error, (value - wide, value + wide), third)


def check_l2(request: ForgetRequest) -> None:
    """Compare the l2 that a head states with the one that a random request shows.

    Nothing is compared where they may differ for another reason: the request is declared to be no random sample, or
    what kappa leaves of its gradient is unlike a random sample's; the head has served a request, so it is only near an
    optimum; or there are fewer than 100 rows.

    Raises:
        ConfigError: They contradict each other.
        DataError: The rows show no l2 of at least 0: they are not as they were in training.
    """
    head, weight_CE = request.head, _regularized(request)
    served = head.forgotten.requests > 0 or not bool(weight_CE.any())
    if served or request.n_forget < _FEWEST or not _may_be_random(request):
        return
    found = effective_l2(request)
    of_gradient = float((head.rows_gradient_CE.double() * weight_CE).sum() / weight_CE.square().sum())
    deviations, shown = found.deviations(head.l2 - of_gradient), found.value + of_gradient
    plainly = abs(shown - head.l2) / found.error if found.error > 0 else math.inf
    near = head.l2 / _RATIO <= shown <= head.l2 * _RATIO
    if abs(deviations) <= _DEVIATIONS or near:
        return
    settled = replace(head, l2=max(shown, 0.0))
    if examine(replace(request, head=settled))["gradient"].alarm:
        return
    low, high = (bound + of_gradient for bound in found.interval)
    if shown <= 0:
        raise DataError(
            f"the rows to forget contradict the head and its l2={head.l2:.3g}: smaller weights would fit them better, "
            f"as if l2 were {shown:.3g}. The labels, the scale of the features or the loss differ from training, or "
            "these rows were not trained on. Check them."
        )
    raise ConfigError(
        f"l2={head.l2:.3g} contradicts the rows to forget. If they are a random sample of the training rows, the head "
        f"was trained as if l2 were {shown:.3g} ({low:.3g} to {high:.3g}), {plainly:.1f} standard errors away. "
        "AdamW's weight decay is no l2, training may have stopped early, or the loss may be another one "
        '(docs/heads.md). Give l2="estimate" or the right loss, or request="selected" if the rows are no random sample.'
    )


def estimate_l2(request: ForgetRequest, *, force: bool = False) -> tuple[ForgetRequest, EffectiveL2]:
    """Return the request with a head whose l2 is the one that its rows show; ``force`` takes them for a random sample.

    Raises:
        DataError: The rows are no random sample, or too few to show an l2 above 0.
    """
    remedy = "Give l2 as a number: sfu.effective_l2 reads it off any random sample of the training rows."
    if not (force or _may_be_random(request)):
        raise DataError(
            "the head's l2 is to be estimated, but only a random sample of the training rows shows it, and the request "
            f"is of kind {'class' if request.kind == RANDOM else request.kind}. {remedy}"
        )
    found = effective_l2(request)
    if request.n_forget < _FEW or not found.interval[0] > 0:
        raise DataError(
            f"the head's l2 is to be estimated, but {counted(request.n_forget, 'row')} do not show that it is above 0: "
            f"{found.value:.3g} ({found.interval[0]:.3g} to {found.interval[1]:.3g}). They are fewer than {_FEW} or "
            "still too few, or no random sample of the training rows, or their labels, their scale or the loss are not "
            f"those of training. {remedy}"
        )
    recipe = replace(request.head.recipe, estimate_l2=False)
    settled = replace(request, head=replace(request.head, l2=found.value, recipe=recipe))
    reasons = () if force else assess(settled).reasons
    if reasons:
        raise DataError(
            "the head's l2 is to be estimated, but only a random sample of the training rows shows it, and "
            f"{', and '.join(reasons)}. Rows look so with a wrong loss, too, so check the loss. {remedy}"
        )
    return settled, found


def _may_be_random(request: ForgetRequest) -> bool:
    return request.kind == RANDOM and request.classes is None


def _regularized(request: ForgetRequest) -> Tensor:
    """Return the regularised weights, without the part along which the loss has no slope."""
    head = request.head
    weight_CE = (head.parameters_CE * head.regularized_E).double()
    if head.loss.shift_invariant and head.feature_weights_CD is not None:
        return weight_CE - weight_CE.mean(0)
    return weight_CE
