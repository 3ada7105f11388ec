r"""The Huberised hinge, one class against the rest: a hinge whose corner is a parabola of half-width h.

With the margin :math:`m = t_c z_c` (t_c = 1 for c = y, else -1) each class adds

.. math:: 0 \;(m > 1 + h), \qquad \frac{(1 + h - m)^2}{4h} \;(|1 - m| \le h), \qquad 1 - m \;(m < 1 - h)

Source: Chapelle, Training a support vector machine in the primal, 2007. The second derivative jumps at the two ends of
the parabola: Newton's method is a semismooth one, finite near the optimum, and no certificate that needs a Lipschitz
Hessian exists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sfu.losses.base import Constants, Layout, Loss, OutputHessian, signs
from sfu.schema import setting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class HuberHinge(Loss, name="huber_hinge"):
    """A hinge with a rounded corner; ``smoothing`` is h."""

    smoothing: float = setting(0.5, "Half-width of the rounded corner, in units of the margin.", above=0, at_most=1)

    layout: ClassVar[Layout] = Layout.blocks

    @property
    def constants(self) -> Constants:
        """Bounds for one class: the slope is at most 1; the second derivative jumps, so gamma is infinite."""
        return Constants(1.0, 1 / (2 * self.smoothing), math.inf)

    def values(self, outputs: Tensor, labels_N: Tensor) -> Tensor:
        depth = self._depth(outputs, labels_N)
        inside = depth.clamp(max=2 * self.smoothing)  # the part on the parabola; the rest is on the line
        return inside.square() / (4 * self.smoothing) + (depth - inside)

    def slopes(self, outputs: Tensor, labels_N: Tensor) -> Tensor:
        depth = self._depth(outputs, labels_N)
        return -signs(labels_N, outputs) * (depth / (2 * self.smoothing)).clamp(max=1)

    def curvature(self, outputs: Tensor, labels_N: Tensor) -> OutputHessian:
        depth = 1 + self.smoothing - signs(labels_N, outputs) * outputs  # at the parabola's ends, its own curvature
        inside = (depth >= 0) & (depth <= 2 * self.smoothing)
        return OutputHessian(inside.to(outputs.dtype) / (2 * self.smoothing))

    def _depth(self, outputs: Tensor, labels_N: Tensor) -> Tensor:
        """How far the margin is below ``1 + h``; 0 where it is above."""
        return (1 + self.smoothing - signs(labels_N, outputs) * outputs).clamp(min=0)
