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

from sfu.losses.base import OutputHessian
from sfu.losses.rows import Rows
from sfu.operators.base import CurvatureOperator, DampedInverse, Solution
from sfu.operators.conjugate_gradients import conjugate_gradients
from sfu.operators.krylov import KrylovInverse
from sfu.operators.preconditioner import IdentityPreconditioner, KroneckerPreconditioner

_ELEMENTS = 1 << 24
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

    @property
    def shared(self) -> bool:
        """Whether the classes share all parameters."""
        return self.parts[0].rows.shared

    @property
    def tolerance(self) -> float:
        """Relative residual to solve to: :data:`TOLERANCE`, or what the precision of the products allows."""
        return max(TOLERANCE, _UNITS * max(torch.finfo(part.rows.precision).eps for part in self.parts))

    def quadratic(self, vectors: Tensor) -> Tensor:
        """One product with the rows: ``sum_i s_i z_i^T M_i z_i`` with ``z_i = A_i v``."""
        flat_MCE = vectors.reshape(-1, *vectors.shape[-2:])
        total_M = (flat_MCE.square() @ self.ridge_E).sum(-1)
        for part in self.parts:
            for chunk, hessian in zip(part.rows.chunks(), part.hessians, strict=True):
                pushed_BMC = chunk.push(flat_MCE)
                along_BM = (_unsqueeze(hessian).apply(pushed_BMC) * pushed_BMC).sum(-1)
                total_M = total_M + (part.coefficient * chunk.share_B) @ along_BM
        return total_M.reshape(vectors.shape[:-2])

    def matmul(self, vectors: Tensor) -> Tensor:
        """Two products with the rows, in chunks of vectors that bound memory."""
        flat_MCE = vectors.reshape(-1, *vectors.shape[-2:])
        step = max(1, _ELEMENTS // (self.n_classes * 8192))
        pieces = [self._matmul(piece) for piece in flat_MCE.split(step)]
        return torch.cat(pieces).reshape(vectors.shape)

    def _matmul(self, vectors_MCE: Tensor) -> Tensor:
        total = self.ridge_E * vectors_MCE
        for part in self.parts:
            for chunk, hessian in zip(part.rows.chunks(), part.hessians, strict=True):
                bent_BMC = _unsqueeze(hessian).apply(chunk.push(vectors_MCE))
                total = total + chunk.pull(bent_BMC * (part.coefficient * chunk.share_B)[:, None, None])
        return total

    @property
    def n_bent(self) -> int:
        """Numbers of :meth:`bend`."""
        return sum(hessian.diagonal.numel() for part in self.parts for hessian in part.hessians)

    @property
    def ridge(self) -> float:
        """l2, of the regularised parameters."""
        return float(self.ridge_E[0])

    def push(self, vector_CE: Tensor) -> Tensor:
        """``A_i v`` of all rows, flat: a product's first third."""
        return torch.cat([chunk.push(vector_CE).reshape(-1) for part in self.parts for chunk in part.rows.chunks()])

    def apply_output_hessian(self, outputs_K: Tensor) -> Tensor:
        """``s_i M_i z_i`` of all rows, flat: its second."""
        bent, start = [], 0
        for part in self.parts:
            for chunk, hessian in zip(part.rows.chunks(), part.hessians, strict=True):
                stop = start + hessian.diagonal.numel()
                outputs = outputs_K[start:stop].view_as(hessian.diagonal)
                bent.append((hessian.apply(outputs) * (part.coefficient * chunk.share_B)[:, None]).reshape(-1))
                start = stop
        return torch.cat(bent)

    def pull_outputs(self, bent_K: Tensor) -> Tensor:
        """``sum_i A_i^T b_i``, ``[C, E]``: its last, the regulariser left out."""
        total, start = torch.zeros(self.n_classes, self.ridge_E.shape[0], dtype=bent_K.dtype, device=bent_K.device), 0
        for part in self.parts:
            for chunk, hessian in zip(part.rows.chunks(), part.hessians, strict=True):
                stop = start + hessian.diagonal.numel()
                total += chunk.pull(bent_K[start:stop].view_as(hessian.diagonal))
                start = stop
        return total

    def trace(self) -> float:
        """``sum_i s_i tr(M_i) |a_i|^2 + C l2 tr(R)``; where the classes share parameters, by Hutchinson's estimate."""
        if self.shared:
            return hutchinson_trace(self)
        total = self.n_classes * float(self.ridge_E.sum())
        for part in self.parts:
            for chunk, hessian in zip(part.rows.linear_chunks(), part.hessians, strict=True):
                squares_B = chunk.design_BE.square().sum(1)
                total += part.coefficient * float((chunk.share_B * hessian.trace() * squares_B).sum())
        return total

    def output_mean(self) -> Tensor:
        """``sum_i s_i M_i``, ``[C, C]``."""
        outputs = self.parts[0].hessians[0].diagonal.shape[-1]
        total = self.ridge_E.new_zeros(outputs, outputs)
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

    def preconditioner(self) -> KroneckerPreconditioner | IdentityPreconditioner:
        """Mean output Hessian times second moments of (some of) the rows; none where the classes share parameters."""
        if self.shared:
            return IdentityPreconditioner()
        return KroneckerPreconditioner.of(
            [(part.rows, part.coefficient) for part in self.parts], self.output_mean(), self.ridge_E, self.regularized_E
        )

    def solve(self, right_CE: Tensor, rho: float = 0.0) -> Solution:
        """Preconditioned conjugate gradients to a relative residual of :data:`TOLERANCE`."""
        damping_E = rho * self.regularized_E

        def product(vector_CE: Tensor) -> Tensor:
            return self.matmul(vector_CE) + damping_E * vector_CE

        found = conjugate_gradients(
            product,
            right_CE,
            self.preconditioner().at(rho),
            tolerance=self.tolerance,
            max_iterations=MAX_ITERATIONS,
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
        first, *rest = parts
        joined = first.rows.joined([part.rows for part in rest], [part.coefficient for part in parts])
        if joined is not None:
            parts = [Part(joined, _split_again([h for part in parts for h in part.hessians], joined.step), 1.0)]
        return ProductOperator(tuple(parts), self.ridge_E, self.regularized_E, self.n_classes)


def hutchinson_trace(operator: CurvatureOperator, probes: int = _PROBES) -> float:
    """``mean v^T H v`` over vectors of random signs, always the same ones."""
    like_E = operator.regularized_E
    drawn = torch.Generator().manual_seed(0)
    total = 0.0
    for _ in range(probes):
        signs = torch.randint(0, 2, (operator.n_classes, like_E.shape[0]), generator=drawn, dtype=torch.int8)
        total += float(operator.quadratic(signs.to(like_E) * 2 - 1)) / probes
    return total


def _split_again(hessians: list[OutputHessian], step: int) -> list[OutputHessian]:
    """The output Hessians of all rows in chunks of another size."""
    diagonals = torch.cat([hessian.diagonal for hessian in hessians]).split(step)
    some = [hessian.rank_one for hessian in hessians if hessian.rank_one is not None]
    rank_ones: Sequence[Tensor | None] = torch.cat(some).split(step) if some else [None] * len(diagonals)
    return [OutputHessian(diagonal, one) for diagonal, one in zip(diagonals, rank_ones, strict=True)]


def _unsqueeze(hessian: OutputHessian) -> OutputHessian:
    rank_one = None if hessian.rank_one is None else hessian.rank_one[:, None]
    return OutputHessian(hessian.diagonal[:, None], rank_one)
