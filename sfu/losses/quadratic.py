r"""Squared error on scaled one-hot targets: :math:`l = \tfrac12 \|z - s\, e_y\|^2`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sfu.losses.base import Constants, Layout, Loss, OutputHessian, one_hot
from sfu.schema import setting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Quadratic(Loss, name="quadratic"):
    """Its output Hessian is the identity: one E x E block serves all classes, wherever the parameters are."""

    target_scale: float = setting(1.0, "Value of the hot target.", above=0)

    layout: ClassVar[Layout] = Layout.shared

    @property
    def constants(self) -> Constants:
        """The slope ``z - s e_y`` is unbounded; the second derivative is 1 everywhere, so gamma = 0."""
        return Constants(math.inf, 1.0, 0.0)

    def values(self, outputs: Tensor, labels_N: Tensor) -> Tensor:
        return 0.5 * self.slopes(outputs, labels_N).square()

    def slopes(self, outputs: Tensor, labels_N: Tensor) -> Tensor:
        return outputs - self.target_scale * one_hot(labels_N, outputs)

    def curvature(self, outputs: Tensor, labels_N: Tensor) -> OutputHessian:
        """The identity."""
        return OutputHessian(outputs.new_ones(outputs.shape))
