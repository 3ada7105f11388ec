r"""Curvature as products with the rows: it takes the memory of the outputs, not of a Hessian.

.. math:: H V = \sum_i s_i\, (M_i V a_i)\, a_i^T + l_2 R V

with output Hessians :math:`M_i` (at most two numbers for each row and class) and shares :math:`s_i` that sum to 1. A
combination of several sets has a coefficient for each.

Shapes: B rows of a chunk, C classes, E = D (+ 1 with bias), M vectors, K numbers of all rows' outputs. Vectors are
``[..., C, E]``, or ``[..., 1, p]`` where the classes share their parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sfu.losses.base import OutputHessian
from sfu.losses.chunks import Chunk
from sfu.losses.rows import Rows
from sfu.operators.base import CurvatureOperator, DampedInverse, FactoredOperator, LinearSolution
from sfu.operators.conjugate_gradients import conjugate_gradients
from sfu.operators.krylov import KrylovInverse
from sfu.operators.preconditioner import IdentityPreconditioner, KroneckerPreconditioner

_VECTORS = 2048  # times classes, in one pass over the rows
TOLERANCE = 1e-10
MAX_ITERATIONS = 2000
_UNITS = 10.0  # of the precision of the products
_PROBES = 8


class Part(NamedTuple):
    """One set of rows: its output Hessians, chunk by chunk, and its coefficient in the combination."""

    rows: Rows
    hessians: list[OutputHessian]
    coefficient: float


@dataclass(frozen=True)
class ProductOperator(FactoredOperator):
    """Products with the rows of one or several sets.

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

    structure = "products"

    @property
    def shared(self) -> bool:
        return self.parts[0].rows.shared

    @property
    def tolerance(self) -> float:
        return max(TOLERANCE, _UNITS * max(torch.finfo(part.rows.precision).eps for part in self.parts))

    def _chunks(self) -> Iterator[tuple[Chunk, OutputHessian, Tensor]]:
        """Yield all chunks with their output Hessians and the shares of their rows in the combination."""
        for part in self.parts:
            for chunk, hessian in zip(part.rows.chunks(), part.hessians, strict=True):
                yield chunk, hessian, part.coefficient * chunk.share_B

    def quadratic(self, vectors: Tensor) -> Tensor:
        """Return ``v^T H v = sum_i s_i z_i^T M_i z_i + l2 |v|^2``, with one product ``z_i = A_i v`` a row."""
        flat_MCE = vectors.reshape(-1, *vectors.shape[-2:])
        total_M = (flat_MCE.square() @ self.ridge_E).sum(-1)
        for chunk, hessian, share_B in self._chunks():
            pushed_BMC = chunk.push(flat_MCE)
            total_M = total_M + share_B @ (hessian.unsqueeze().apply(pushed_BMC) * pushed_BMC).sum(-1)
        return total_M.reshape(vectors.shape[:-2])

    def matmul(self, vectors: Tensor) -> Tensor:
        """Return ``H v``, for as many vectors at once as memory allows."""
        flat_MCE = vectors.reshape(-1, *vectors.shape[-2:])
        pieces = [self._matmul(piece) for piece in flat_MCE.split(max(1, _VECTORS // self.n_classes))]
        return torch.cat(pieces).reshape(vectors.shape)

    def _matmul(self, vectors_MCE: Tensor) -> Tensor:
        total = self.ridge_E * vectors_MCE
        for chunk, hessian, share_B in self._chunks():
            cotangent_BMC = hessian.unsqueeze().apply(chunk.push(vectors_MCE))
            total = total + chunk.pull(cotangent_BMC * share_B[:, None, None])
        return total

    @property
    def n_outputs(self) -> int:
        return sum(hessian.diagonal.numel() for part in self.parts for hessian in part.hessians)

    def push(self, vector_CE: Tensor) -> Tensor:
        return torch.cat([chunk.push(vector_CE).reshape(-1) for chunk, _, _ in self._chunks()])

    def apply_output_hessian(self, outputs_K: Tensor) -> Tensor:
        found, start = [], 0
        for _, hessian, share_B in self._chunks():
            stop = start + hessian.diagonal.numel()
            outputs_BC = outputs_K[start:stop].view_as(hessian.diagonal)
            found.append((hessian.apply(outputs_BC) * share_B[:, None]).reshape(-1))
            start = stop
        return torch.cat(found)

    def pull(self, cotangent_K: Tensor) -> Tensor:
        total, start = cotangent_K.new_zeros(self.n_classes, self.ridge_E.shape[0]), 0
        for chunk, hessian, _ in self._chunks():
            stop = start + hessian.diagonal.numel()
            total += chunk.pull(cotangent_K[start:stop].view_as(hessian.diagonal))
            start = stop
        return total

    def trace(self) -> float:
        """Return ``sum_i s_i tr(M_i) |a_i|^2 + C l2 tr(R)``, by Hutchinson's estimate if classes share parameters."""
        if self.shared:
            return _hutchinson_trace(self)
        total = self.n_classes * float(self.ridge_E.sum())
        for part in self.parts:
            for chunk, hessian in zip(part.rows.linear_chunks(), part.hessians, strict=True):
                squares_B = chunk.design_BE.square().sum(1)
                total += part.coefficient * float((chunk.share_B * hessian.trace() * squares_B).sum())
        return total

    def output_mean(self) -> Tensor:
        outputs = self.parts[0].hessians[0].diagonal.shape[-1]
        total = self.ridge_E.new_zeros(outputs, outputs)
        for _, hessian, share_B in self._chunks():
            total += torch.diag(share_B @ hessian.diagonal)
            if hessian.rank_one is not None:
                total -= hessian.rank_one.T @ (hessian.rank_one * share_B[:, None])
        return total

    def damped(self) -> DampedInverse:
        return KrylovInverse(self)

    def preconditioner(self) -> KroneckerPreconditioner | IdentityPreconditioner:
        """Multiply the mean output Hessian by second moments of the rows; none where the classes share parameters."""
        if self.shared:
            return IdentityPreconditioner()
        return KroneckerPreconditioner.of(
            [(part.rows, part.coefficient) for part in self.parts], self.output_mean(), self.ridge_E, self.regularized_E
        )

    def solve(self, right_CE: Tensor, rho: float = 0.0) -> LinearSolution:
        """Solve by preconditioned conjugate gradients to a relative residual of :attr:`tolerance`."""
        damping_E = rho * self.regularized_E
        found = conjugate_gradients(
            lambda vector_CE: self.matmul(vector_CE) + damping_E * vector_CE,
            right_CE,
            self.preconditioner().at(rho),
            tolerance=self.tolerance,
            max_iterations=MAX_ITERATIONS,
        )
        # the residual is measured, because that of the recurrence may drift
        return replace(found, residual=self.residual(found.value_CE, right_CE, rho))

    def combine(self, others: Sequence[CurvatureOperator], coefficients: Sequence[float]) -> ProductOperator:
        parts = []
        for operator, coefficient in zip([self, *others], coefficients, strict=True):
            assert isinstance(operator, ProductOperator)
            parts += [part._replace(coefficient=part.coefficient * coefficient) for part in operator.parts]
        first, *rest = parts
        joined = first.rows.joined([part.rows for part in rest], [part.coefficient for part in parts])
        if joined is not None:
            parts = [Part(joined, _split_again([h for part in parts for h in part.hessians], joined.step), 1.0)]
        return replace(self, parts=tuple(parts))


def _hutchinson_trace(operator: CurvatureOperator) -> float:
    """Return ``mean v^T H v`` over a few vectors of random signs, always the same ones."""
    like_E = operator.regularized_E
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    for _ in range(_PROBES):
        signs = torch.randint(0, 2, (operator.n_classes, like_E.shape[0]), generator=generator, dtype=torch.int8)
        total += float(operator.quadratic(signs.to(like_E) * 2 - 1)) / _PROBES
    return total


def _split_again(hessians: list[OutputHessian], step: int) -> list[OutputHessian]:
    """Return the output Hessians of all rows in chunks of another size."""
    diagonals = torch.cat([hessian.diagonal for hessian in hessians]).split(step)
    some = [hessian.rank_one for hessian in hessians if hessian.rank_one is not None]
    rank_ones: Sequence[Tensor | None] = torch.cat(some).split(step) if some else [None] * len(diagonals)
    return [OutputHessian(diagonal, one) for diagonal, one in zip(diagonals, rank_ones, strict=True)]
