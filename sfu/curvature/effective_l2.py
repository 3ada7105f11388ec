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
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sfu.errors import DataError
from sfu.lazy import torch
from sfu.request import ForgetRequest

if TYPE_CHECKING:
    from torch import Tensor

NOMINAL = 0.9
"""Probability that the interval holds the value of all training rows."""


@dataclass(frozen=True)
class Estimate:
    """A mean over all training rows, estimated from a random sample of them.

    Attributes:
        value: The mean over the sample.
        error: Its standard error, for rows that are drawn without replacement.
        interval: Where the mean over all training rows is, with probability :data:`NOMINAL`.
        third_moment: Of the estimate about its mean.
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


@dataclass(frozen=True)
class EffectiveL2(Estimate):
    """An estimate of l2.

    ``value`` is kappa. It is negative if larger weights would fit the rows worse, as on rows that were not trained on.
    Its third moment is below 0, since rows that fit badly have values far below others.
    """


def mean_over_training(request: ForgetRequest, values_F: Tensor) -> Estimate:
    """Estimate the mean of a number over the training rows, by their weights, from its values at two rows or more."""
    from scipy.special import stdtrit

    count, left = request.n_forget, 1 - request.n_forget / request.head.n_train
    shares_F = request.data().shares_N.to(values_F)
    value = float(shares_F @ values_F)
    spread = float(shares_F.square() @ (values_F - value).square()) * count / (count - 1)
    error = math.sqrt(spread * left)
    wide = float(stdtrit(count - 1, (1 + NOMINAL) / 2)) * error
    third = float(shares_F.pow(3) @ (values_F - value).pow(3)) * left * (2 * left - 1)
    return Estimate(value, error, (value - wide, value + wide), third)


def effective_l2(request: ForgetRequest) -> EffectiveL2:
    """Estimate the l2 that a head was trained with from a random sample of its training rows.

    The value of a row is ``-<d_i, W> / |W|^2``; kappa is their mean, by the weights that the rows had in training.
    Neither the head's l2 nor its stored gradient is used.

    Raises:
        DataError: There are fewer than two rows, or all regularised weights of the head are 0.
    """
    count, weight_CE = request.n_forget, regularized(request)
    square = float(weight_CE.square().sum())
    if count < 2 or square == 0:
        what = "a single row" if count < 2 else "a head whose weights are all 0"
        raise DataError(f"l2 cannot be read off {what}. Give the l2 that the head was trained with as a number.")
    loss, found = request.head.loss, []
    for chunk in request.data().chunks():
        slopes_BC = loss.slopes(chunk.outputs(request.head.parameters_CE), chunk.labels_B)
        found.append((slopes_BC * chunk.push(weight_CE.to(slopes_BC))).sum(1))
    of_all = mean_over_training(request, -torch.cat(found).double() / square)
    return EffectiveL2(of_all.value, of_all.error, of_all.interval, of_all.third_moment)


def regularized(request: ForgetRequest) -> Tensor:
    """Return the regularised weights in float64, without the part along which the loss has no slope."""
    head = request.head
    weight_CE = (head.parameters_CE * head.regularized_E).double()
    if head.loss.shift_invariant and head.feature_weights_CD is not None:
        return weight_CE - weight_CE.mean(0)
    return weight_CE
