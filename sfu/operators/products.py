r"""Curvature as products with the rows: it takes the memory of the outputs, not of a Hessian.

.. math:: H V = \sum_i s_i\, (M_i V a_i)\, a_i^T + l_2 R V

with output Hessians :math:`M_i` (at most two numbers for each row and class) and shares :math:`s_i` that sum to 1. A
combination of several sets has a coefficient for each.

All damped inverses come from one Krylov space. Biases are never damped, so they are eliminated first: conjugate
gradients run on the Schur complement :math:`S = H_{dd} - H_{du} H_{uu}^+ H_{ud}`, in which the damping is a multiple of
the identity. :math:`H_{uu}` is the mean output Hessian, C x C.

Shapes: B rows of a chunk, C classes, E = D (+ 1 with bias), M vectors, K numbers of all rows' outputs. Vectors are
``[..., C, E]``, or ``[..., 1, p]`` where the classes share their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from sfu.lazy import torch
from sfu.losses.base import OutputHessian
from sfu.losses.chunks import Chunk
from sfu.losses.rows import Rows
from sfu.operators.base import NOTHING_UNSEEN, CurvatureOperator, DampedInverse, LinearSolution, Unseen
from sfu.operators.conjugate_gradients import (
    conjugate_gradients,
    multishift_conjugate_gradients,
    multishift_in_coordinates,
)
from sfu.operators.preconditioner import Kronecker, second_moments
from sfu.operators.spectral import SpectralInverse, bias_inverse

if TYPE_CHECKING:
    from torch import Tensor

_VECTORS = 2048  # times classes, in one pass over the rows
TOLERANCE = 1e-10
MAX_ITERATIONS = 2000
_UNITS = 10.0  # of the precision of the products
_PROBES = 8
_SHIFTED_TOLERANCE = 1e-8
_SHIFTED_ITERATIONS = 1000
_LOOSER = 100.0  # than a single solve
_AT_ONCE = 16
IN_COORDINATES = 1 << 16
"""Largest number of shared parameters for which solutions are held as they are, not in coordinates."""


class Part(NamedTuple):
    """One set of rows: its output Hessians, chunk by chunk, and its coefficient in the combination."""

    rows: Rows
    hessians: list[OutputHessian]
    coefficient: float


@dataclass(frozen=True)
class ProductOperator(CurvatureOperator):
    r"""Products with the rows of one or several sets, :math:`H = A^T M A + l_2 R`: A gives the K outputs of all rows.

    ``ridge_E`` and ``regularized_E`` are the diagonals of ``l2 R`` and of R.
    """

    parts: tuple[Part, ...]
    ridge_E: Tensor
    regularized_E: Tensor
    n_classes: int
    unseen: Unseen = NOTHING_UNSEEN

    structure = "products"

    @property
    def _rows(self) -> Rows:
        """Rows that are spread over processes as those of all parts are."""
        return self.parts[0].rows

    @property
    def shared(self) -> bool:
        """Whether the classes share all parameters."""
        return self._rows.shared

    @property
    def tolerance(self) -> float:
        """Relative residual that the precision of the products allows a solve to reach."""
        return max(TOLERANCE, _UNITS * max(torch.finfo(part.rows.precision).eps for part in self.parts))

    def to_float32(self) -> ProductOperator:
        """Return the operator with rows and products in float32."""
        parts = tuple(
            Part(part.rows.to_float32(), [hessian.to_float32() for hessian in part.hessians], part.coefficient)
            for part in self.parts
        )
        return replace(self, parts=parts, ridge_E=self.ridge_E.float(), regularized_E=self.regularized_E.float())

    def _chunks(self) -> Iterator[tuple[Chunk, OutputHessian, Tensor]]:
        """Yield all chunks with their output Hessians and the shares of their rows in the combination."""
        for part in self.parts:
            for chunk, hessian in zip(part.rows.chunks(), part.hessians, strict=True):
                yield chunk, hessian, part.coefficient * chunk.share_B

    def quadratic(self, vectors: Tensor) -> Tensor:
        """Return ``v^T H v = sum_i s_i z_i^T M_i z_i + l2 |v|^2``, with one product ``z_i = A_i v`` a row."""
        flat_MCE = vectors.reshape(-1, *vectors.shape[-2:])
        total_M = self._rows.once((flat_MCE.square() @ self.ridge_E).sum(-1))
        for chunk, hessian, share_B in self._chunks():
            pushed_BMC = chunk.push(flat_MCE)
            total_M = total_M + share_B @ (hessian.unsqueeze().apply(pushed_BMC) * pushed_BMC).sum(-1)
        return self._rows.summed(total_M).reshape(vectors.shape[:-2])

    def matmul(self, vectors: Tensor) -> Tensor:
        """Return ``H v``, for as many vectors at once as memory allows."""
        flat_MCE = vectors.reshape(-1, *vectors.shape[-2:])
        pieces = [self._matmul(piece) for piece in flat_MCE.split(max(1, _VECTORS // self.n_classes))]
        return torch.cat(pieces).reshape(vectors.shape)

    def _matmul(self, vectors_MCE: Tensor) -> Tensor:
        total = self._rows.once(self.ridge_E * vectors_MCE)
        for chunk, hessian, share_B in self._chunks():
            cotangent_BMC = hessian.unsqueeze().apply(chunk.push(vectors_MCE))
            total = total + chunk.pull(cotangent_BMC * share_B[:, None, None])
        return self._rows.summed(total)

    @property
    def n_outputs(self) -> int:
        """K."""
        return sum(hessian.diagonal.numel() for part in self.parts for hessian in part.hessians)

    def push(self, vector_CE: Tensor) -> Tensor:
        """Return ``A v`` of all rows, ``[K]``."""
        return torch.cat([chunk.push(vector_CE).reshape(-1) for chunk, _, _ in self._chunks()])

    def apply_output_hessian(self, outputs_K: Tensor) -> Tensor:
        """Return ``M z`` of all rows, ``[K]``; the rows' shares are part of M."""
        found, start = [], 0
        for _, hessian, share_B in self._chunks():
            stop = start + hessian.diagonal.numel()
            outputs_BC = outputs_K[start:stop].view_as(hessian.diagonal)
            found.append((hessian.apply(outputs_BC) * share_B[:, None]).reshape(-1))
            start = stop
        return torch.cat(found)

    def pull(self, cotangent_K: Tensor) -> Tensor:
        """Return ``A^T b``, ``[C, E]``."""
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
        ridge = float(self.ridge_E.sum()) + self.unseen.directions * self.unseen.curvature
        total = self._rows.once(self.n_classes * ridge)
        for part in self.parts:
            for chunk, hessian in zip(part.rows.linear_chunks(), part.hessians, strict=True):
                squares_B = chunk.design_BE.square().sum(1)
                total += part.coefficient * float((chunk.share_B * hessian.trace() * squares_B).sum())
        return float(self._rows.summed(torch.tensor(total, dtype=torch.float64)))

    def output_mean(self) -> Tensor:
        """Return the sum of the rows' blocks of M, ``[C, C]``."""
        outputs = self.parts[0].hessians[0].diagonal.shape[-1]
        total = self.ridge_E.new_zeros(outputs, outputs)
        for _, hessian, share_B in self._chunks():
            total += torch.diag(share_B @ hessian.diagonal)
            if hessian.rank_one is not None:
                total -= hessian.rank_one.T @ (hessian.rank_one * share_B[:, None])
        return self._rows.summed(total)

    def damped(self) -> DampedInverse:
        return KrylovInverse(self)

    @property
    def ridge(self) -> float:
        """The l2 of the regularised parameters."""
        return float(self.ridge_E[0])

    def quadratic_of(self, outputs_MK: Tensor, square_M: Tensor) -> Tensor:
        """Return ``v^T H v``, ``[M]``, of regularised vectors v from their outputs ``A v`` and ``|v|^2`` alone."""
        data = [outputs_K @ self.apply_output_hessian(outputs_K) for outputs_K in outputs_MK]
        return torch.stack(data) + self.ridge * square_M

    def moments(self) -> SpectralInverse | None:
        """Decompose the second moments of the rows; ``None`` where the classes share parameters."""
        if self.shared:
            return None
        moments_PEE = torch.stack([abs(part.coefficient) * second_moments(part.rows) for part in self.parts])
        return SpectralInverse(moments_PEE.sum(0), self.regularized_E)

    def preconditioner(self, moments: SpectralInverse | None, rho: float = 0.0) -> Callable[[Tensor], Tensor]:
        """Return the inverse of mean output Hessian times second moments; the identity without moments."""
        if moments is None:
            return lambda residual_CE: residual_CE
        return Kronecker(moments, self.output_mean()).inverse(self.ridge + rho)

    def solve(self, right_CE: Tensor, rho: float = 0.0) -> LinearSolution:
        """Solve by preconditioned conjugate gradients to a relative residual of :attr:`tolerance`."""
        damping_E = rho * self.regularized_E
        found = conjugate_gradients(
            lambda vector_CE: self.matmul(vector_CE) + damping_E * vector_CE,
            right_CE,
            self.preconditioner(self.moments(), rho),
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


class KrylovInverse(DampedInverse):
    """The damped inverses of products, by multi-shift conjugate gradients.

    Attributes:
        iterations: Products of the last solve.
        residual: Largest relative residual of the last solve. A system that is left unfinished (a tiny rho on a badly
            conditioned Hessian) is a regularised one, and cross-validation scores it as it is.
    """

    def __init__(self, operator: ProductOperator, in_coordinates: int = IN_COORDINATES) -> None:
        """Note the operator; the curvature of the biases is inverted when it is needed, and nothing else is formed."""
        self._operator, self._limit = operator, in_coordinates
        self._has_bias = bool(operator.regularized_E[-1] == 0)
        self._ridge = operator.ridge
        self._tolerance = max(_SHIFTED_TOLERANCE, _LOOSER * operator.tolerance)
        self.iterations, self.residual = 0, 0.0

    @cached_property
    def _own_CC(self) -> Tensor:
        return self._operator.output_mean()

    @cached_property
    def _bias_inverse_CC(self) -> Tensor:
        return bias_inverse(self._own_CC)

    @cached_property
    def mean_eigenvalue(self) -> float:
        """Mean eigenvalue once the biases are eliminated, from the trace: passes over the rows when first asked.

        Where the classes share parameters, it is the mean over the directions that the rows can curve.
        """
        operator = self._operator
        seen = float(operator.regularized_E.sum()) + operator.unseen.directions
        trace, count = operator.trace(), seen * operator.n_classes
        if self._has_bias:
            trace -= float(self._own_CC.trace()) + self._coupled_trace()
        if not operator.shared:
            return trace / count
        return self._ridge + (trace - self._ridge * count) / min(count, operator.n_outputs)

    def account(self) -> dict[str, float | int | str]:
        return {
            "solver": "multishift_conjugate_gradients",
            "solve_residual": self.residual,
            "solve_iterations": self.iterations,
        }

    @property
    def invertible(self) -> bool:
        return self._ridge > 0

    def solve_many(self, right_CE: Tensor, rhos: list[float], *, floor: float = 0.0) -> Tensor:
        """Solve for every rho. The eigenvalues are at least l2 already, so a floor changes nothing."""
        if self._in_coordinates(right_CE):
            return torch.cat(list(self.solutions(right_CE, rhos, floor=floor)))
        reduced_CD = right_CE
        if self._has_bias:
            from_bias_C1 = self._bias_inverse_CC @ right_CE[:, -1:]
            reduced_CD = right_CE[:, :-1] - self._from_biases(from_bias_C1)
        found = multishift_conjugate_gradients(
            self._schur, reduced_CD, rhos, tolerance=self._tolerance, max_iterations=_SHIFTED_ITERATIONS
        )
        self.iterations, self.residual = found.iterations, float(found.residuals_M.max())
        if not self._has_bias:
            return found.values
        whole_MCE = torch.nn.functional.pad(found.values, (0, 1))
        pulled_MC1 = self._operator.matmul(whole_MCE)[..., -1:]
        whole_MCE[..., -1:] = self._bias_inverse_CC @ (right_CE[:, -1:] - pulled_MC1)
        return whole_MCE

    def _in_coordinates(self, right_CE: Tensor) -> bool:
        return self._operator.shared and right_CE.numel() > self._limit

    def solutions(self, right_CE: Tensor, rhos: list[float], *, floor: float = 0.0) -> Iterator[Tensor]:
        """Yield solutions; where there are many parameters, they are held in coordinates until their turn comes."""
        if not self._in_coordinates(right_CE):
            yield from super().solutions(right_CE, rhos, floor=floor)
            return
        share_M1, b_MK = self._coordinates(right_CE, rhos)
        for share_1, b_K in zip(share_M1, b_MK, strict=True):
            yield (share_1 * right_CE + self._operator.pull(b_K))[None]

    def scores(
        self, right_CE: Tensor, rhos: list[float], held_out: CurvatureOperator, *, floor: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Score; where there are many parameters, no solution is ever formed.

        ``<u, g>``, the outputs A u and those of the held-out rows are linear in u, so they follow the recurrences as
        coordinates, and with ``u = a g + A^T b`` its square is ``a <u, g> + <b, A u>``.
        """
        if not self._in_coordinates(right_CE) or len(rhos) == 1 or not isinstance(held_out, ProductOperator):
            return super().scores(right_CE, rhos, held_out, floor=floor)
        share_M1, b_MK, outputs_MK, along_M1, held_MK = self._coordinates(right_CE, rhos, held_out)
        square_M = (share_M1 * along_M1).sum(1) + (b_MK * outputs_MK).sum(1)
        square_M = square_M.clamp(min=0)
        return along_M1[:, 0], held_out.quadratic_of(held_MK, square_M), square_M

    def _coordinates(
        self, right_CE: Tensor, rhos: list[float], held_out: ProductOperator | None = None
    ) -> tuple[Tensor, ...]:
        """Solve in coordinates: every vector of the Krylov space is u = a g + A^T b with g the right-hand side.

        Returns:
            For every rho a ``[M, 1]`` and b ``[M, K]``; with held-out rows, also A u, <u, g> and the held-out outputs.
        """
        operator, flat, ridge = self._operator, right_CE.reshape(-1), self._ridge
        sizes = [1, operator.n_outputs]
        if held_out is not None:
            sizes += [operator.n_outputs, 1, held_out.n_outputs]

        def linear_parts(vector: Tensor) -> list[Tensor]:
            if held_out is None:
                return []
            whole = vector.view_as(right_CE)
            return [operator.push(whole), (vector @ flat)[None], held_out.push(whole)]

        def product(vector: Tensor, coordinates: Tensor) -> tuple[Tensor, Tensor]:
            share_1, b_K, *known = coordinates.split(sizes)
            outputs_K = known[0] if known else operator.push(vector.view_as(right_CE))
            cotangent_K = operator.apply_output_hessian(outputs_K)
            image = operator.pull(cotangent_K).reshape(-1) + ridge * vector
            return image, torch.cat([ridge * share_1, cotangent_K + ridge * b_K, *linear_parts(image)])

        start = torch.cat([flat.new_ones(1), flat.new_zeros(operator.n_outputs), *linear_parts(flat)])
        found = multishift_in_coordinates(
            product, flat, start, rhos, tolerance=self._tolerance, max_iterations=_SHIFTED_ITERATIONS
        )
        self.iterations, self.residual = found.iterations, float(found.residuals_M.max())
        return found.values.split(sizes, 1)

    def _schur(self, vector_CD: Tensor) -> Tensor:
        if not self._has_bias:
            return self._operator.matmul(vector_CD)
        image_CE = self._operator.matmul(torch.nn.functional.pad(vector_CD, (0, 1)))
        return image_CE[:, :-1] - self._from_biases(self._bias_inverse_CC @ image_CE[:, -1:])

    def _coupled_trace(self) -> float:
        """Return ``tr(H_uu^+ H_ud H_du)``: a product with each column of a root of ``H_uu^+``."""
        values_C, vectors_CC = torch.linalg.eigh(self._bias_inverse_CC)
        root_CC = vectors_CC * values_C.clamp(min=0).sqrt()
        pieces = root_CC.T.split(_AT_ONCE)
        return sum(float(self._from_biases(piece_PC[..., None]).square().sum()) for piece_PC in pieces)

    def _from_biases(self, bias_C1: Tensor) -> Tensor:
        """Return ``H_du b``, what biases do to the regularised parameters."""
        width = self._operator.regularized_E.shape[0]
        return self._operator.matmul(torch.nn.functional.pad(bias_C1, (width - 1, 0)))[..., :-1]


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
