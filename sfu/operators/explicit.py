r"""Curvature held as matrices: one block shared by the classes, one a class, or one over all parameters.

With parameters in C rows of E, one reshape to ``[B, C E / (B K), K]`` serves the three: B = 1, K = E (Kronecker product
with the identity, :math:`I_C \otimes H`), B = C, K = E (block diagonal), and B = 1, K = C E (dense).

Shapes: B blocks of side K, C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sfu.operators.base import CurvatureOperator, DampedInverse, Solution
from sfu.operators.spectral import SpectralInverse


class ExplicitOperator(CurvatureOperator):
    """See the module.

    Attributes:
        blocks_BKK: The blocks, the regulariser included.
    """

    def __init__(self, blocks: Tensor, n_classes: int, regularized_E: Tensor) -> None:
        """Take blocks ``[B, K, K]``, or a single one ``[K, K]``."""
        self.blocks_BKK = blocks if blocks.ndim == 3 else blocks[None]
        self.n_classes, self.regularized_E = n_classes, regularized_E
        count, side = self.blocks_BKK.shape[:2]
        self._repeats = n_classes * regularized_E.shape[0] // (count * side)

    @property
    def structure(self) -> str:
        """By the number and the side of the blocks."""
        count, side = self.blocks_BKK.shape[:2]
        if side != self.regularized_E.shape[0]:
            return "dense"
        return "shared" if count == 1 else "blocks"

    @property
    def regularized_K(self) -> Tensor:
        """1 for each regularised parameter of a block."""
        return self.regularized_E.repeat(self.blocks_BKK.shape[1] // self.regularized_E.shape[0])

    def matmul(self, vectors: Tensor) -> Tensor:
        """Batched product with the blocks."""
        product = torch.einsum("...bnk,bkj->...bnj", self._split(vectors), self.blocks_BKK)  # @ may copy the blocks
        return product.reshape(vectors.shape)

    def _split(self, vectors: Tensor) -> Tensor:
        count, side = self.blocks_BKK.shape[:2]
        return vectors.reshape(*vectors.shape[:-2], count, -1, side)

    def trace(self) -> float:
        """A shared block counts once for every class."""
        return float(self.blocks_BKK.diagonal(dim1=1, dim2=2).sum()) * self._repeats

    def damped(self) -> DampedInverse:
        """By eigenvalues."""
        return SpectralInverse(self.blocks_BKK, self.regularized_K)

    def solve(self, right_CE: Tensor, rho: float = 0.0) -> Solution:
        """Batched Cholesky; by eigenvalues (Moore-Penrose) where a block is singular to working precision."""
        damped_BKK = self.blocks_BKK + torch.diag(rho * self.regularized_K)
        factor, info = torch.linalg.cholesky_ex(damped_BKK)
        pivots_BK = factor.diagonal(dim1=1, dim2=2)
        smallest = pivots_BK.amin(1).square() / pivots_BK.amax(1).square()
        solver = "cholesky"
        if bool((info == 0).all()) and bool((smallest > damped_BKK.shape[1] * torch.finfo(factor.dtype).eps).all()):
            right_BMK = self._split(right_CE)
            value_CE = torch.cholesky_solve(right_BMK.mT, factor).mT.reshape(right_CE.shape)
        else:
            solver, value_CE = "eigenvalues", self.damped().solve(right_CE, rho)
        return Solution(value_CE, solver, self._residual(value_CE, right_CE, rho))

    def _residual(self, value_CE: Tensor, right_CE: Tensor, rho: float) -> float:
        size = float(right_CE.norm())
        left_CE = self.matmul(value_CE) + rho * self.regularized_E * value_CE
        return float((right_CE - left_CE).norm()) / size if size > 0 else 0.0

    def combine(self, others: Sequence[CurvatureOperator], coefficients: Sequence[float]) -> ExplicitOperator:
        """The blocks combined."""
        total = coefficients[0] * self.blocks_BKK
        for other, coefficient in zip(others, coefficients[1:], strict=True):
            assert isinstance(other, ExplicitOperator)
            total = total + coefficient * other.blocks_BKK
        return ExplicitOperator(total, self.n_classes, self.regularized_E)
