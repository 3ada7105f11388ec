r"""Squared error on scaled one-hot targets: :math:`l = \tfrac12 \|z - s\, e_y\|^2`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sfu.errors import ConfigError
from sfu.losses.base import Constants, Layout, Loss, OutputHessian, one_hot


@dataclass(frozen=True)
class Quadratic(Loss):
    """The squared error. Its output Hessian is the identity, so one E x E block serves all classes at any parameters.

    Attributes:
        target_scale: s, the value of the hot target.
    """

    target_scale: float = 1.0

    name: ClassVar[str] = "quadratic"
    layout: ClassVar[Layout] = Layout.shared

    def __post_init__(self) -> None:
        """Check the class weights and the scale.

        Raises:
            ConfigError: It is not a finite number above 0.
        """
        super().__post_init__()
        if not (math.isfinite(self.target_scale) and self.target_scale > 0):
            raise ConfigError(f"loss.target_scale={self.target_scale}. Give a finite number above 0.")

    @property
    def constants(self) -> Constants:
        """The slope ``z - s e_y`` is unbounded; the second derivative is 1 everywhere, so gamma = 0."""
        return Constants(math.inf, 1.0, 0.0)

    def values(self, outputs: Tensor, labels_N: Tensor) -> Tensor:
        return 0.5 * self.slopes(outputs, labels_N).square()

    def slopes(self, outputs: Tensor, labels_N: Tensor) -> Tensor:
        return outputs - self.target_scale * one_hot(labels_N, outputs)

    def curvature(self, outputs: Tensor, labels_N: Tensor) -> OutputHessian:
        return OutputHessian(torch.ones_like(outputs))
