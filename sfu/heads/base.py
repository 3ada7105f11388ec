"""What every head has: parameters in which its outputs are affine, and what must be known of its training to unlearn.

Shapes: N rows, D features, C classes; parameters are ``[C, E]``, or ``[1, p]`` where the classes share them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from sfu.errors import DataError
from sfu.heads.certificate import Certificate
from sfu.losses import Layout, Loss, Objective, Quadratic, Rows

LOGIT_ROWS = 8192


@dataclass(frozen=True)
class Head(ABC):
    """A trained classifier whose outputs are affine in its parameters, under one of the losses of :mod:`sfu.losses`.

    Attributes:
        parameters_CE: The parameters (of a linear head with the bias as last column, if ``bias``).
        gradient_CE: Gradient of the mean training objective at these parameters; 0 at the optimum. The Newton step
            corrects for it, so a head that was stopped early can be unlearned from too.
        l2: Weight of the regulariser (of the mean objective; never on the bias of a linear head).
        n_train: Number N of training rows.
        bias: Whether there is a bias that is not regularised.
        loss: The loss it was trained with, class weights included.
        data_hessian: Hessian of the data term of the training objective at these parameters, if it was stored: a
            summary, from which no single example can be read unless they are very few. ``[E, E]``, ``[C, E, E]`` or
            ``[C E, C E]``, by the loss; ``None`` otherwise.
        weight: Total weight V of the training rows; ``None`` for N, as it is without sample and class weights. A loss
            with class weights needs it.
        certificate: Of a head trained for certified removal. Its gradient is that of the perturbed objective.
    """

    parameters_CE: Tensor
    gradient_CE: Tensor
    l2: float
    n_train: int
    bias: bool = False
    loss: Loss = field(default_factory=Quadratic)
    data_hessian: Tensor | None = None
    weight: float | None = None
    certificate: Certificate | None = None

    def __post_init__(self) -> None:
        """Check shapes and values.

        Raises:
            DataError: Parameters and gradient differ in shape or are not finite, a number is out of range, or the loss
                has class weights and the weight is missing.
        """
        if isinstance(self.n_train, bool) or not isinstance(self.n_train, int) or self.n_train < 1:
            raise DataError(f"n_train={self.n_train}; the number of training rows, a whole number above 0, is needed.")
        if not (math.isfinite(self.l2) and self.l2 >= 0):
            raise DataError(f"l2={self.l2}; a finite number of at least 0 is needed.")
        if self.weight is not None and not (math.isfinite(self.weight) and self.weight > 0):
            raise DataError(f"weight={self.weight}; the total weight of the training rows is a finite number above 0.")
        if self.weight is None and self.loss.class_weights is not None:
            raise DataError(
                "a loss with class weights needs the total weight of the training rows, sum of sample weight times "
                "class weight, as the head's `weight`: give weight=."
            )
        if self.parameters_CE.ndim != 2 or self.parameters_CE.shape != self.gradient_CE.shape:
            raise DataError(
                f"head parameters {list(self.parameters_CE.shape)} and gradient {list(self.gradient_CE.shape)} must "
                "both be [classes, features (+ 1 with bias)]."
            )
        self._check()
        if not (torch.isfinite(self.parameters_CE).all() and torch.isfinite(self.gradient_CE).all()):
            raise DataError("the head has NaN or infinite parameters or gradient; it cannot be unlearned from.")

    def _check(self) -> None:  # noqa: B027
        """Further checks of a kind of head."""

    @property
    @abstractmethod
    def n_classes(self) -> int:
        """C."""

    @property
    @abstractmethod
    def n_features(self) -> int:
        """D: numbers of a row."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """The shape of the Hessian over all parameters."""

    @property
    def regularized_E(self) -> Tensor:
        """1 for each regularised parameter of a class, 0 for the bias."""
        mask = torch.ones_like(self.parameters_CE[0])
        if self.bias:
            mask[-1] = 0.0
        return mask

    @property
    def total_weight(self) -> float:
        """V: what the training rows weigh together."""
        return float(self.n_train) if self.weight is None else self.weight

    @property
    def rows_gradient_CE(self) -> Tensor:
        """Mean gradient of the training rows alone (regulariser included): without the b/V of objective perturbation.

        It is what the gradient of a random sample of them scatters about.
        """
        if self.certificate is None:
            return self.gradient_CE
        return self.gradient_CE - self.certificate.noise_CE.to(self.gradient_CE) / self.total_weight

    def objective(self) -> Objective:
        """Loss and regulariser, as of any set of rows."""
        return Objective(self.loss, self.l2, self.regularized_E)

    def objective_of(self, weight: float) -> Objective:
        """The mean objective of a training set of this total weight: with objective perturbation, if there was any."""
        objective, certificate = self.objective(), self.certificate
        return objective if certificate is None else replace(objective, linear_CE=certificate.noise_CE / weight)

    @abstractmethod
    def rows(self, features_ND: Tensor, labels_N: Tensor, weights_N: Tensor | None = None, **options: Any) -> Rows:
        """Labelled rows as this head's loss sees them, on its device and in its dtype."""

    @abstractmethod
    def outputs(self, features_ND: Tensor, parameters_CE: Tensor) -> Tensor:
        """Outputs ``[N, C]`` at any parameters, through which autograd may differentiate (both ways)."""

    @property
    def feature_weights_CD(self) -> Tensor | None:
        """W, if the outputs are ``W x + b`` in the features, too; else ``None``."""
        return None

    def squared_pulls(self, features_BD: Tensor, bent_BC: Tensor, share_B: Tensor) -> Tensor:
        """``sum_i share_i (J_i^T b_i)^2`` with the Jacobians J of the outputs, in the shape of the parameters.

        A reverse pass for each row, as squares of sums are no sums of squares; a head may have a shorter way.
        """
        parameters_CE = self.parameters_CE.detach().clone().requires_grad_()
        total_CE = torch.zeros_like(self.parameters_CE)
        for feature_D, bent_C, share in zip(features_BD, bent_BC, share_B.tolist(), strict=True):
            along = self.outputs(feature_D[None], parameters_CE)[0] @ bent_C
            total_CE += share * torch.autograd.grad(along, parameters_CE)[0].square()
        return total_CE

    @abstractmethod
    def save(self, stem: Path) -> list[Path]:
        """Write the head beside ``stem`` as safetensors and JSON; returns the paths.

        Raises:
            ArtifactError: A file cannot be written.
        """

    def without_summary(self) -> Self:
        """The same head without what was stored of the training data's curvature."""
        return replace(self, data_hessian=None)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Self:
        """The same head on another device or in another dtype."""
        certificate = self.certificate
        return replace(
            self,
            parameters_CE=self.parameters_CE.to(device, dtype),
            gradient_CE=self.gradient_CE.to(device, dtype),
            data_hessian=None if self.data_hessian is None else self.data_hessian.to(device, dtype),
            certificate=certificate and replace(certificate, noise_CE=certificate.noise_CE.to(device, dtype)),
        )

    def logits(self, features_ND: Tensor) -> Tensor:
        """Outputs ``[N, C]``, in the head's dtype and on its device, computed in chunks."""
        parameters_CE = self.parameters_CE
        if not features_ND.shape[0]:
            return parameters_CE.new_empty(0, self.n_classes)
        with torch.no_grad():
            return torch.cat([self.outputs(chunk, parameters_CE) for chunk in features_ND.split(LOGIT_ROWS)])
