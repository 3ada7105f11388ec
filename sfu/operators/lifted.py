r"""A curvature known in a subspace, and a multiple of the identity elsewhere.

.. math:: H = Q^T X Q + \tau (I - Q^T Q)

with the K orthonormal rows of Q. Its inverse only needs that of the K x K matrix X.

Shapes: K dimensions, P = C E parameters (``[1, p]`` where the classes share them), M values of rho.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sfu.lazy import torch
from sfu.operators.base import CurvatureOperator, DampedInverse, LinearSolution
from sfu.operators.explicit import ExplicitOperator
from sfu.operators.products import ProductOperator

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LiftedOperator(CurvatureOperator):
    """Curvature in a subspace, on all parameters, each of them regularised: Q, X on ``[1, K]``, and tau as ``rest``."""

    basis_KP: Tensor
    inner: ExplicitOperator
    rest: float
    n_classes: int
    regularized_E: Tensor

    structure = "subspace"

    def project(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``Q v``, ``[M, 1, K]``, and the part of v outside the subspace, ``[M, P]``."""
        flat_MP = vectors.reshape(-1, self.basis_KP.shape[1])
        inside_MK = (flat_MP.to(self.basis_KP) @ self.basis_KP.T).to(flat_MP)
        return inside_MK[:, None], flat_MP - self.lift(inside_MK)

    def lift(self, inside_MK: Tensor) -> Tensor:
        """Return ``Q^T c``, ``[M, P]``."""
        return (inside_MK.to(self.basis_KP) @ self.basis_KP).to(inside_MK)

    def matmul(self, vectors: Tensor) -> Tensor:
        inside_M1K, outside_MP = self.project(vectors)
        found = self.lift(self.inner.matmul(inside_M1K)[:, 0]) + self.rest * outside_MP
        return found.reshape(vectors.shape)

    def trace(self) -> float:
        return self.inner.trace() + self.rest * (self.basis_KP.shape[1] - self.basis_KP.shape[0])

    def damped(self) -> DampedInverse:
        return LiftedInverse(self)

    def solve(self, right_CE: Tensor, rho: float = 0.0) -> LinearSolution:
        value_CE = self.damped().solve(right_CE, rho)
        return LinearSolution(value_CE, "eigenvalues", self.residual(value_CE, right_CE, rho))

    def combine(self, others: Sequence[CurvatureOperator], coefficients: Sequence[float]) -> CurvatureOperator:
        raise TypeError("curvatures known in different subspaces cannot be combined. This is a defect in sfu.")


class LiftedInverse(DampedInverse):
    """The damped inverses of a curvature in a subspace, by the eigenvalues of X."""

    def __init__(self, operator: LiftedOperator) -> None:
        self._operator, self._inner = operator, operator.inner.damped()

    @property
    def mean_eigenvalue(self) -> float:
        return self._inner.mean_eigenvalue

    @property
    def invertible(self) -> bool:
        return self._inner.invertible and self._operator.rest > 0

    def solve_many(self, right_CE: Tensor, rhos: list[float], *, floor: float = 0.0) -> Tensor:
        inside_11K, outside_1P = self._operator.project(right_CE)
        solved_MK = self._inner.solve_many(inside_11K[0], rhos, floor=floor)[:, 0]
        solved_MP = self._operator.lift(solved_MK) + outside_1P / self._outside(right_CE, rhos, floor)
        return solved_MP.reshape(len(rhos), *right_CE.shape)

    def scores(
        self, right_CE: Tensor, rhos: list[float], held_out: CurvatureOperator, *, floor: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Score without forming any solution.

        All solutions are combinations of the K rows of Q and of the part of b outside: K + 1 products give every score.
        """
        if not isinstance(held_out, ProductOperator):
            return super().scores(right_CE, rhos, held_out, floor=floor)
        basis_KP = self._operator.basis_KP
        inside_11K, outside_1P = self._operator.project(right_CE)
        solved_MK = self._inner.solve_many(inside_11K[0], rhos, floor=floor)[:, 0]
        mixed_MV = torch.cat([solved_MK, 1 / self._outside(right_CE, rhos, floor)], 1)
        vectors = (row_P.to(right_CE).view_as(right_CE) for row_P in (*basis_KP, outside_1P[0]))
        outputs_VB = torch.stack([held_out.push(vector) for vector in vectors])
        outside = float(outside_1P.square().sum())
        along_M = solved_MK @ inside_11K[0, 0] + mixed_MV[:, -1] * outside
        square_M = solved_MK.square().sum(1) + mixed_MV[:, -1].square() * outside
        return along_M, held_out.quadratic_of(mixed_MV @ outputs_VB, square_M), square_M

    def _outside(self, right_CE: Tensor, rhos: list[float], floor: float) -> Tensor:
        """Return ``tau + rho``, ``[M, 1]``."""
        rhos_M1 = torch.tensor(rhos, dtype=right_CE.dtype, device=right_CE.device)[:, None]
        return rhos_M1 + max(self._operator.rest, floor)
