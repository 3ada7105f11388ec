"""The problem as given: losses or gradients observed at perturbed weights, a lower bound and a prior.

Shapes: P perturbations, D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from sfu.errors import DataError
from sfu.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class LossMeasurements:
    """Quadratic forms of the unknown X: ``target_i ~ 1/2 d_i^T X d_i`` (paper, eq. of the perturbed forget loss).

    The data term of the fit is the mean square ``1/P sum_i (1/2 d_i^T X d_i - target_i)^2``.

    Raises:
        DataError: There is no perturbation, shapes do not match, or values are not finite.
    """

    delta_PD: Tensor
    target_P: Tensor

    def __post_init__(self) -> None:
        _require_matrix("delta_PD", self.delta_PD, "one perturbation per row")
        if self.target_P.shape != self.delta_PD.shape[:1]:
            raise DataError(
                f"target_P has shape {tuple(self.target_P.shape)} but delta_PD has {self.delta_PD.shape[0]} rows: "
                "give one scalar target per perturbation."
            )
        _require_finite("delta_PD", self.delta_PD, "lower the perturbation scale")
        _require_finite("target_P", self.target_P, "drop the perturbations whose loss overflowed, or lower their scale")

    def mean_square(self, value_DD: Tensor) -> Tensor:
        """Return the data term at X."""
        delta_PD = self.delta_PD.to(value_DD)
        fitted_P = ((delta_PD @ value_DD) * delta_PD).sum(1) / 2
        return (fitted_P - self.target_P.to(value_DD)).square().mean()

    @property
    def dimension(self) -> int:
        """D, the side of the unknown matrix."""
        return self.delta_PD.shape[1]

    @property
    def size(self) -> int:
        """The side of the largest matrix of a fit."""
        return max(self.delta_PD.shape)


@dataclass(frozen=True, eq=False)
class GradientMeasurements:
    """Products with the unknown X: ``response_i ~ X d_i`` (a positive-semidefinite Procrustes problem).

    The data term ``1/P sum_i |X d_i - response_i|^2`` depends on the P observations only through three moments, which
    :meth:`from_pairs` computes.
    """

    gram_DD: Tensor  # 1/P sum_i d_i d_i^T
    cross_DD: Tensor  # the symmetric part of 1/P sum_i response_i d_i^T
    response_square: float  # 1/P sum_i |response_i|^2

    @classmethod
    def from_pairs(cls, delta_PD: Tensor, response_PD: Tensor) -> GradientMeasurements:
        """Compute the moments, in float64, of perturbations ``d_i`` and responses ``X d_i``, one pair per row.

        Raises:
            DataError: There is no perturbation, shapes differ, or values are not finite.
        """
        _require_matrix("delta_PD", delta_PD, "one perturbation per row")
        if response_PD.shape != delta_PD.shape:
            raise DataError(
                f"response_PD has shape {tuple(response_PD.shape)} and delta_PD {tuple(delta_PD.shape)}. Give one "
                "gradient difference per perturbation."
            )
        _require_finite("delta_PD", delta_PD, "lower the perturbation scale")
        _require_finite("response_PD", response_PD, "drop the perturbations whose gradient overflowed")
        delta_PD, response_PD = delta_PD.double(), response_PD.double()
        count = delta_PD.shape[0]
        cross_DD = response_PD.T @ delta_PD / count
        square = float(response_PD.square().sum() / count)
        return cls(delta_PD.T @ delta_PD / count, (cross_DD + cross_DD.T) / 2, square)

    def mean_square(self, value_DD: Tensor) -> Tensor:
        """Return the data term at X."""
        fitted = ((value_DD @ self.gram_DD.to(value_DD)) * value_DD).sum()
        return fitted - 2 * (self.cross_DD.to(value_DD) * value_DD).sum() + self.response_square

    @property
    def dimension(self) -> int:
        """D, the side of the unknown matrix."""
        return self.gram_DD.shape[0]

    @property
    def size(self) -> int:
        """The side of the largest matrix of a fit."""
        return self.dimension


Measurements = LossMeasurements | GradientMeasurements
MatrixLike = Union[float, "Tensor"]


def dense(term: Tensor, like: Tensor) -> Tensor:
    """Return a term ``[D, D]`` in the dtype and on the device of ``like``, whose last axis is D."""
    if term.ndim == 2:
        return term.to(like)
    return float(term) * torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def symmetric_term(name: str, value: MatrixLike, dimension: int) -> Tensor:
    """Read a lower bound or prior: a number (times the identity), a vector (a diagonal) or a symmetric matrix.

    A number stays one, so that the fit can use that; see :func:`dense`.

    Raises:
        DataError: The value is not finite, has the wrong shape, or is not symmetric.
    """
    given = torch.as_tensor(value, dtype=torch.float64)
    if not torch.isfinite(given).all():
        raise DataError(f"{name} is not finite. Give a finite number, a diagonal of length D={dimension} or a matrix.")
    if given.ndim == 0:
        return given
    if given.shape == (dimension,):
        return torch.diag(given)
    if given.shape != (dimension, dimension):
        raise DataError(
            f"{name} has shape {tuple(given.shape)}. Give a number, a diagonal of shape ({dimension},) or a matrix of "
            f"shape ({dimension}, {dimension})."
        )
    if (given - given.T).abs().max() > 1e-8 * given.abs().max():
        raise DataError(f"{name} is not symmetric. Give (M + M.T) / 2.")
    return (given + given.T) / 2


def _require_matrix(name: str, value: Tensor, meaning: str) -> None:
    if value.ndim != 2 or value.shape[0] < 1 or value.shape[1] < 1:
        raise DataError(f"{name} has shape {tuple(value.shape)}: give at least one row and one column ({meaning}).")


def _require_finite(name: str, value: Tensor, remedy: str) -> None:
    bad = int((~torch.isfinite(value)).sum())
    if bad:
        raise DataError(f"{name} holds {bad} values that are not finite: {remedy}.")
