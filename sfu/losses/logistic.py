r"""Logistic regression, one class against the rest: :math:`l = \sum_c \log(1 + e^{-t_c z_c})`, t_c = 1 for c = y, else
-1.

The classes are C separate problems. A binary problem is C = 2: two mirrored problems, each the usual binary one on its
own (at the optimum ``w_0 = -w_1``), so that every loss keeps the same shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sfu.losses.base import Constants, Layout, Loss, OutputHessian, signs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Logistic(Loss, name="logistic"):
    """Stable at any output: softplus and the sigmoid of a signed output never overflow nor cancel."""

    layout: ClassVar[Layout] = Layout.blocks
    attained: ClassVar[bool] = False

    @property
    def constants(self) -> Constants:
        r"""Bounds for one class.

        With :math:`s = \sigma(z)` the slope is :math:`\sigma(-tz) < 1`; the second derivative :math:`s(1-s) \le 1/4`;
        the third :math:`s(1-s)(1-2s)` is largest at :math:`s = \tfrac12 - \tfrac1{2\sqrt3}`, where it is
        :math:`\tfrac1{6\sqrt3}` (the paper on certified removal uses the looser 1/4).
        """
        return Constants(1.0, 0.25, 1 / (6 * math.sqrt(3)))

    def values(self, outputs: Tensor, labels_N: Tensor) -> Tensor:
        """``softplus(-t z)`` of each class."""
        from torch.nn.functional import softplus

        return softplus(-signs(labels_N, outputs) * outputs, threshold=50)

    def slopes(self, outputs: Tensor, labels_N: Tensor) -> Tensor:
        sign = signs(labels_N, outputs)
        return -sign * (-sign * outputs).sigmoid()

    def curvature(self, outputs: Tensor, labels_N: Tensor) -> OutputHessian:
        return OutputHessian(outputs.sigmoid() * (-outputs).sigmoid())
