r"""Curvature held as matrices: one block shared by the classes, one a class, or one over all parameters.

With parameters in C rows of E, one reshape to ``[B, C E / (B K), K]`` serves the three: B = 1, K = E (Kronecker product
with the identity, :math:`I_C \otimes H`), B = C, K = E (block diagonal), and B = 1, K = C E (dense).

Shapes: B blocks of side K, C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sfu.errors import SingularHessianError
from sfu.lazy import torch
from sfu.operators.base import NOTHING_UNSEEN, CurvatureOperator, DampedInverse, LinearSolution, Unseen
from sfu.operators.spectral import SpectralInverse, without_negative

if TYPE_CHECKING:
    from torch import Tensor


class ExplicitOperator(CurvatureOperator):
    """Hessian blocks ``blocks_BKK``, the regulariser included."""

    def __init__(self, blocks: Tensor, n_classes: int, regularized_E: Tensor, unseen: Unseen = NOTHING_UNSEEN) -> None:
        """Take blocks ``[B, K, K]``, or a single one ``[K, K]``."""
        self.unseen = unseen
        self.blocks_BKK = blocks if blocks.ndim == 3 else blocks[None]
        self.n_classes, self.regularized_E = n_classes, regularized_E
        count, side = self.blocks_BKK.shape[:2]
        self._repeats = n_classes * regularized_E.shape[0] // (count * side)
        self._factored: tuple[float, Tensor | None] | None = None

    @property
    def structure(self) -> str:
        count, side = self.blocks_BKK.shape[:2]
        if side != self.regularized_E.shape[0]:
            return "dense"
        return "shared" if count == 1 else "blocks"

    @property
    def regularized_K(self) -> Tensor:
        """1 for each regularised parameter of a block, 0 for biases."""
        return self.regularized_E.repeat(self.blocks_BKK.shape[1] // self.regularized_E.shape[0])

    def matmul(self, vectors: Tensor) -> Tensor:
        product = torch.einsum("...bnk,bkj->...bnj", self._split(vectors), self.blocks_BKK)  # @ may copy the blocks
        return product.reshape(vectors.shape)

    def _split(self, vectors: Tensor) -> Tensor:
        count, side = self.blocks_BKK.shape[:2]
        return vectors.reshape(*vectors.shape[:-2], count, -1, side)

    def trace(self) -> float:
        seen = float(self.blocks_BKK.diagonal(dim1=1, dim2=2).sum()) * self._repeats
        return seen + self.n_classes * self.unseen.directions * self.unseen.curvature

    def damped(self) -> DampedInverse:
        classes = self.blocks_BKK.shape[1] // self.regularized_E.shape[0]  # of a block
        return SpectralInverse(
            self.blocks_BKK, self.regularized_K, self.unseen._replace(directions=classes * self.unseen.directions)
        )

    def solve(self, right_CE: Tensor, rho: float = 0.0) -> LinearSolution:
        """Solve by Cholesky, or by eigenvalues (Moore-Penrose) if a block is singular to working precision."""
        factor = self._factor(rho)
        if factor is None:
            solver, value_CE = "eigenvalues", self.damped().solve(right_CE, rho)
        else:
            solver = "cholesky"
            value_CE = torch.cholesky_solve(self._split(right_CE).mT, factor).mT.reshape(right_CE.shape)
        return LinearSolution(value_CE, solver, self.residual(value_CE, right_CE, rho))

    def _factor(self, rho: float) -> Tensor | None:
        """Return the Cholesky factors, kept for the last rho; ``None`` if a block is singular to working precision."""
        if self._factored is None or self._factored[0] != rho:
            damped_BKK = self.blocks_BKK + torch.diag(rho * self.regularized_K)
            factor, info = torch.linalg.cholesky_ex(damped_BKK)
            pivots_BK = factor.diagonal(dim1=1, dim2=2)
            smallest = pivots_BK.amin(1).square() / pivots_BK.amax(1).square()
            sound = bool((info == 0).all()) and bool(
                (smallest > len(damped_BKK[0]) * torch.finfo(factor.dtype).eps).all()
            )
            self._factored = rho, factor if sound else None
        return self._factored[1]

    def raised(self, ridge_E: Tensor) -> ExplicitOperator:
        """Return it with the negative eigenvalues of its data term raised to 0; ``ridge_E`` is the regulariser."""
        ridge_KK = torch.diag(ridge_E.repeat(self.blocks_BKK.shape[1] // ridge_E.shape[0]))
        blocks = [without_negative(block_KK - ridge_KK) + ridge_KK for block_KK in self.blocks_BKK]
        return ExplicitOperator(torch.stack(blocks), self.n_classes, self.regularized_E, self.unseen)

    def combine(self, others: Sequence[CurvatureOperator], coefficients: Sequence[float]) -> ExplicitOperator:
        total = coefficients[0] * self.blocks_BKK
        for other, coefficient in zip(others, coefficients[1:], strict=True):
            assert isinstance(other, ExplicitOperator)
            total = total + coefficient * other.blocks_BKK
        return ExplicitOperator(total, self.n_classes, self.regularized_E, self.unseen)


def solve_positive_definite(matrix_EE: Tensor, right_CE: Tensor, what: str, remedy: Callable[[], str]) -> Tensor:
    """Solve ``X M = B`` for symmetric positive definite M by Cholesky, ``[C, E]``.

    Raises:
        SingularHessianError: M is singular or indefinite to working precision (its smallest eigenvalue, found by
            inverse iteration, is below ``8 E eps`` times its norm); ``what`` names it in the message, which ends with
            the ``remedy``.
    """
    factor, info = torch.linalg.cholesky_ex(matrix_EE)
    threshold = 8 * matrix_EE.shape[0] * torch.finfo(matrix_EE.dtype).eps * float(matrix_EE.norm())
    if int(info) != 0 or not _smallest_eigenvalue(factor) > threshold:
        raise SingularHessianError(
            f"{what} is singular to {matrix_EE.dtype} precision, so the optimum is not unique. {remedy()}"
        )
    return torch.cholesky_solve(right_CE.T, factor).T


def _smallest_eigenvalue(factor_EE: Tensor) -> float:
    """Estimate it from the Cholesky factor, by a few inverse iterations from a fixed random vector."""
    start = torch.randn(factor_EE.shape[0], 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    vector = start.to(factor_EE)
    for _ in range(4):
        vector = torch.cholesky_solve(vector / vector.norm(), factor_EE)
    return 1.0 / float(vector.norm())
