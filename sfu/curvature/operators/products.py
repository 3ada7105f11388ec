r"""Curvature as products with the rows: memory of the outputs, never of a Hessian.

.. math:: H V = \sum_i s_i\, (M_i V a_i)\, a_i^T + l_2 R V

with the output Hessians :math:`M_i` kept (two numbers for each row and class at most) and shares :math:`s_i` that sum
to 1. A combination of several sets keeps a coefficient for each.

Shapes: N rows, B rows of a chunk, C classes, E = D (+ 1 with bias), M vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sfu.curvature.operators.base import CurvatureOperator, DampedInverse, Solution
from sfu.curvature.operators.conjugate_gradients import conjugate_gradients
from sfu.curvature.operators.krylov import KrylovInverse
from sfu.curvature.operators.preconditioner import KroneckerPreconditioner
from sfu.losses.base import OutputHessian
from sfu.losses.rows import Rows, outputs_of

_ELEMENTS = 1 << 24
TOLERANCE = 1e-10
MAX_ITERATIONS = 2000


class Part(NamedTuple):
    """One set of rows: its output Hessians, chunk by chunk, and its coefficient in the combination."""

    rows: Rows
    hessians: list[OutputHessian]
    coefficient: float


@dataclass(frozen=True)
class ProductOperator(CurvatureOperator):
    """See the module.

    Attributes:
        parts: The sets of rows.
        ridge_E: Diagonal of the regulariser, ``l2 R``.
        regularized_E: Diagonal of R.
        n_classes: C.
    """

    parts: tuple[Part, ...]
    ridge_E: Tensor
    regularized_E: Tensor
    n_classes: int

    @property
    def structure(self) -> str:
        """Nothing but products."""
        return "products"

    def matmul(self, vectors: Tensor) -> Tensor:
        """Two products with the rows, in chunks of vectors that bound memory."""
        flat_MCE = vectors.reshape(-1, *vectors.shape[-2:])
        step = max(1, _ELEMENTS // (self.n_classes * 8192))
        pieces = [self._matmul(piece) for piece in flat_MCE.split(step)]
        return torch.cat(pieces).reshape(vectors.shape)

    def _matmul(self, vectors_MCE: Tensor) -> Tensor:
        count, n_classes, width = vectors_MCE.shape
        total = self.ridge_E * vectors_MCE
        flat_QE = vectors_MCE.reshape(-1, width)
        for part in self.parts:
            for chunk, hessian in zip(part.rows.chunks(), part.hessians, strict=True):
                outputs_BMC = outputs_of(chunk.design_BE, flat_QE).unflatten(1, (count, n_classes))
                bent_BMC = _unsqueeze(hessian).apply(outputs_BMC)
                bent_BQ = bent_BMC.reshape(-1, count * n_classes) * (part.coefficient * chunk.share_B)[:, None]
                total = total + (bent_BQ.T @ chunk.design_BE).reshape_as(total)
        return total

    def trace(self) -> float:
        """``sum_i s_i tr(M_i) |a_i|^2 + C l2 tr(R)``."""
        total = self.n_classes * float(self.ridge_E.sum())
        for part in self.parts:
            for chunk, hessian in zip(part.rows.chunks(), part.hessians, strict=True):
                squares_B = chunk.design_BE.square().sum(1)
                total += part.coefficient * float((chunk.share_B * hessian.trace() * squares_B).sum())
        return total

    def output_mean(self) -> Tensor:
        """``sum_i s_i M_i``, ``[C, C]``."""
        total = self.ridge_E.new_zeros(self.n_classes, self.n_classes)
        for part in self.parts:
            for chunk, hessian in zip(part.rows.chunks(), part.hessians, strict=True):
                share_B = part.coefficient * chunk.share_B
                total += torch.diag(share_B @ hessian.diagonal)
                if hessian.rank_one is not None:
                    total -= hessian.rank_one.T @ (hessian.rank_one * share_B[:, None])
        return total

    def damped(self) -> DampedInverse:
        """By multi-shift conjugate gradients."""
        return KrylovInverse(self)

    def preconditioner(self) -> KroneckerPreconditioner:
        """Mean output Hessian times second moments of (some of) the rows."""
        return KroneckerPreconditioner.of(
            [(part.rows, part.coefficient) for part in self.parts], self.output_mean(), self.ridge_E, self.regularized_E
        )

    def solve(self, right_CE: Tensor, rho: float = 0.0) -> Solution:
        """Preconditioned conjugate gradients to a relative residual of :data:`TOLERANCE`."""
        damping_E = rho * self.regularized_E

        def product(vector_CE: Tensor) -> Tensor:
            return self.matmul(vector_CE) + damping_E * vector_CE

        found = conjugate_gradients(
            product, right_CE, self.preconditioner().at(rho), tolerance=TOLERANCE, max_iterations=MAX_ITERATIONS
        )
        size = float(right_CE.norm())
        left = float((right_CE - product(found.value_CE)).norm()) / size if size > 0 else 0.0
        return replace(found, residual=left)  # measured: that of the recurrence may drift

    def combine(self, others: Sequence[CurvatureOperator], coefficients: Sequence[float]) -> ProductOperator:
        """All parts side by side."""
        parts = []
        for operator, coefficient in zip([self, *others], coefficients, strict=True):
            assert isinstance(operator, ProductOperator)
            parts += [part._replace(coefficient=part.coefficient * coefficient) for part in operator.parts]
        return ProductOperator(tuple(parts), self.ridge_E, self.regularized_E, self.n_classes)


def _unsqueeze(hessian: OutputHessian) -> OutputHessian:
    rank_one = None if hessian.rank_one is None else hessian.rank_one[:, None]
    return OutputHessian(hessian.diagonal[:, None], rank_one)
