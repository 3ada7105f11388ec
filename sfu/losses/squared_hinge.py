r"""The squared hinge, one class against the rest: :math:`l = \tfrac12 \sum_c \max(0, 1 - t_c z_c)^2`, t_c = 1 for
c = y, else -1.

scikit-learn's ``LinearSVC`` minimises :math:`\tfrac12 |w|^2 + C_{svc} \sum_i \max(0, 1 - t_i z_i)^2` for each class,
which is this loss with :math:`l_2 = 1 / (2\, C_{svc} N)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sfu.losses.base import Constants, Layout, Loss, OutputHessian, signs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SquaredHinge(Loss, name="squared_hinge"):
    """Half the squared shortfall of each class's signed output from 1."""

    layout: ClassVar[Layout] = Layout.blocks

    @property
    def constants(self) -> Constants:
        """The slope is unbounded; the second derivative is 0 or 1 and jumps, so gamma is infinite."""
        return Constants(math.inf, 1.0, math.inf)

    def values(self, outputs: Tensor, labels_N: Tensor) -> Tensor:
        return 0.5 * self._shortfall(outputs, labels_N).square()

    def slopes(self, outputs: Tensor, labels_N: Tensor) -> Tensor:
        return -signs(labels_N, outputs) * self._shortfall(outputs, labels_N)

    def curvature(self, outputs: Tensor, labels_N: Tensor) -> OutputHessian:
        return OutputHessian((signs(labels_N, outputs) * outputs <= 1).to(outputs.dtype))

    def _shortfall(self, outputs: Tensor, labels_N: Tensor) -> Tensor:
        return (1 - signs(labels_N, outputs) * outputs).clamp(min=0)
