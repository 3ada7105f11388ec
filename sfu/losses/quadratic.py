r"""Squared error on one target for the label's class and another for the rest, or on real-valued targets.

The loss is :math:`l = \tfrac12 \sum_c (z_c - t_c)^2`, with t_c = s for c = y and o for the others. By default o = 0, so
the targets are scaled one-hot ones. scikit-learn's ``RidgeClassifier`` has s = 1 and o = -1. With s = 1 and o = 0,
targets may also be given as any real numbers, as those of a regression are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sfu.errors import ConfigError
from sfu.losses.base import Constants, Layout, Loss, OutputHessian, Targets, one_hot
from sfu.schema import setting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Quadratic(Loss, name="quadratic"):
    """Its output Hessian is the identity: one E x E block serves all classes, wherever the parameters are."""

    target_scale: float = setting(1.0, "Value of the hot target.", above=0)
    other_target: float = setting(0.0, "Value of the targets of the other classes, below target_scale.")

    layout: ClassVar[Layout] = Layout.shared

    def check_settings(self) -> None:
        super().check_settings()
        if not self.other_target < self.target_scale:
            raise ConfigError(
                f"loss.other_target={self.other_target:g} is not below loss.target_scale={self.target_scale:g}, so the "
                "largest output would not be the predicted class. Give a smaller loss.other_target."
            )

    @property
    def targets(self) -> Targets:
        """Real numbers as they are, or, if 1 and 0 stand for other numbers, only these two."""
        return Targets.real if (self.target_scale, self.other_target) == (1.0, 0.0) else Targets.binary

    @property
    def constants(self) -> Constants:
        """The slope ``z - t`` is unbounded; the second derivative is 1 everywhere, so gamma = 0."""
        return Constants(math.inf, 1.0, 0.0)

    def values(self, outputs: Tensor, labels_N: Tensor) -> Tensor:
        return 0.5 * self.slopes(outputs, labels_N).square()

    def slopes(self, outputs: Tensor, labels_N: Tensor) -> Tensor:
        hot = one_hot(labels_N, outputs)
        return outputs - self.other_target - (self.target_scale - self.other_target) * hot

    def curvature(self, outputs: Tensor, labels_N: Tensor) -> OutputHessian:
        """The identity."""
        return OutputHessian(outputs.new_ones(outputs.shape))
