r"""Logistic regression, or binary cross-entropy, of each output on its own:

.. math:: l = \sum_c t_c \log(1 + e^{-z_c}) + (1 - t_c) \log(1 + e^{z_c})

with t_c = 1 for c = y and 0 for the others (one class against the rest), or with given targets: several of them may be
1, or none, or they lie between 0 and 1.

The classes are C separate problems. A binary problem has one output, or two: then it is two mirrored problems, each the
usual one (at the optimum ``w_0 = -w_1``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sfu.losses.base import Constants, Layout, Loss, OutputHessian, Targets, one_hot

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Logistic(Loss, name="logistic"):
    """Stable at any output: softplus and the sigmoid of a signed output never overflow nor cancel."""

    layout: ClassVar[Layout] = Layout.blocks
    targets: ClassVar[Targets] = Targets.shares
    attained: ClassVar[bool] = False

    @property
    def constants(self) -> Constants:
        r"""Bounds for one class.

        With :math:`s = \sigma(z)` the slope is :math:`|s - t| \le 1`; the second derivative :math:`s(1-s) \le 1/4`;
        the third :math:`s(1-s)(1-2s)` is largest at :math:`s = \tfrac12 - \tfrac1{2\sqrt3}`, where it is
        :math:`\tfrac1{6\sqrt3}` (the paper on certified removal uses the looser 1/4).
        """
        return Constants(1.0, 0.25, 1 / (6 * math.sqrt(3)))

    def values(self, outputs: Tensor, labels_N: Tensor) -> Tensor:
        """The two softplus of each class, of which only one counts unless its target lies between 0 and 1."""
        from torch.nn.functional import softplus

        hot = one_hot(labels_N, outputs)
        return hot * softplus(-outputs, threshold=50) + (1 - hot) * softplus(outputs, threshold=50)

    def slopes(self, outputs: Tensor, labels_N: Tensor) -> Tensor:
        hot = one_hot(labels_N, outputs)
        return (1 - hot) * outputs.sigmoid() - hot * (-outputs).sigmoid()  # s - t would lose digits where they are near

    def curvature(self, outputs: Tensor, labels_N: Tensor) -> OutputHessian:
        return OutputHessian(outputs.sigmoid() * (-outputs).sigmoid())
