"""Projections onto the cone of positive-semidefinite matrices, and the derivative of the projection.

Shapes: D features, R positive eigenvalues, K = D - R others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sfu.operators.spectral import eigh


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The eigendecomposition of a symmetric B, split by sign: all that the projection and its derivative need.

    The derivative of the projection in a direction S is ``U (Omega o (U^T S U)) U^T`` with Omega = 1 between positive
    eigenvalues, 0 between the others and ``a / (a + b)`` between a positive a and a non-positive -b
    (Sun & Sun, 2002, "Semismooth matrix-valued functions").

    Attributes:
        value_D: eigenvalues, ascending.
        vector_DD: eigenvectors, by column.
        split: K, how many eigenvalues are not positive.
        omega_RK: the mixed block of Omega.
    """

    value_D: Tensor
    vector_DD: Tensor
    split: int
    omega_RK: Tensor

    @classmethod
    def of(cls, matrix_DD: Tensor) -> Spectrum:
        """Decompose a symmetric matrix."""
        value_D, vector_DD = eigh(matrix_DD)
        split = int((value_D <= 0).sum())
        positive_R1, other_1K = value_D[split:, None], -value_D[None, :split]
        return cls(value_D, vector_DD, split, positive_R1 / (positive_R1 + other_1K))

    @property
    def clipped_D(self) -> Tensor:
        """The eigenvalues of the projection."""
        return self.value_D.clamp(min=0)

    def projection(self) -> Tensor:
        """The nearest positive-semidefinite matrix."""
        vector_DR = self.vector_DD[:, self.split :]
        return (vector_DR * self.value_D[self.split :]) @ vector_DR.T

    def derivative(self, direction_DD: Tensor) -> Tensor:
        """Directional derivative of the projection; ``direction_DD`` is symmetric. Four D x D x D products."""
        rotated_DD = self.vector_DD.T @ direction_DD @ self.vector_DD
        rotated_DD[: self.split, : self.split] = 0
        rotated_DD[self.split :, : self.split] *= self.omega_RK
        rotated_DD[: self.split, self.split :] *= self.omega_RK.T
        return self.vector_DD @ rotated_DD @ self.vector_DD.T


def project_eigh(matrix_DD: Tensor) -> Tensor:
    """Nearest positive-semidefinite matrix by clipping eigenvalues."""
    return Spectrum.of(matrix_DD).projection()


def project_newton_schulz(matrix_DD: Tensor, iterations: int = 60) -> Tensor:
    """Nearest positive-semidefinite matrix by matrix products only: ``(B + B sign(B)) / 2``.

    The matrix sign comes from the Newton-Schulz iteration ``S <- S (3 I - S^2) / 2`` (Higham, "Functions of Matrices",
    ch. 5), started at B over its Frobenius norm. It stops when S stops moving against B; an eigenvalue that has not
    reached +-1 by then is so near zero that the projection hardly depends on it.

    Args:
        matrix_DD: a symmetric matrix.
        iterations: at most this many; each is two D x D x D products.
    """
    norm = torch.linalg.matrix_norm(matrix_DD)
    if norm == 0:
        return matrix_DD.clone()
    sign_DD = matrix_DD / norm
    absolute_DD = matrix_DD @ sign_DD
    tolerance = 4 * torch.finfo(matrix_DD.dtype).eps * norm
    for _ in range(iterations):
        sign_DD = 1.5 * sign_DD - 0.5 * sign_DD @ (sign_DD @ sign_DD)
        sign_DD = (sign_DD + sign_DD.T) / 2
        previous_DD, absolute_DD = absolute_DD, matrix_DD @ sign_DD
        if torch.linalg.matrix_norm(absolute_DD - previous_DD) <= tolerance:
            break
    projected_DD = (matrix_DD + absolute_DD) / 2
    return (projected_DD + projected_DD.T) / 2
