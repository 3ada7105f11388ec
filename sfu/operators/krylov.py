r"""The family :math:`(H + \rho R)^{-1}` by products alone: all rho from one Krylov space.

Biases are never damped, so they are eliminated first: conjugate gradients run on the Schur complement
:math:`S = H_{dd} - H_{du} H_{uu}^+ H_{ud}`, in which the damping is a multiple of the identity. :math:`H_{uu}` is the
mean output Hessian, C x C.

Shapes: C classes, D regularised parameters and one bias (or none) a class, E = D (+ 1), M values of rho, K numbers of
all rows' outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from sfu.operators.base import CurvatureOperator, DampedInverse, FactoredOperator
from sfu.operators.conjugate_gradients import multishift_conjugate_gradients, multishift_in_coordinates
from sfu.operators.spectral import bias_inverse

TOLERANCE = 1e-8
MAX_ITERATIONS = 1000
IN_COORDINATES = 1 << 16
"""Largest number of shared parameters for which solutions are held as they are, not in coordinates."""
_AT_ONCE = 16
_LOOSER = 100.0  # than a single solve


class KrylovInverse(DampedInverse):
    """The damped inverses of a factored operator, by multi-shift conjugate gradients.

    Attributes:
        iterations: Products of the last solve.
        residual: Largest relative residual of the last solve. A system that is left unfinished (a tiny rho on a badly
            conditioned Hessian) is a regularised one, and cross-validation scores it as it is.
    """

    def __init__(self, operator: FactoredOperator, in_coordinates: int = IN_COORDINATES) -> None:
        """Invert the curvature of the biases alone; nothing else is formed."""
        self._operator, self._limit = operator, in_coordinates
        self._has_bias = bool(operator.regularized_E[-1] == 0)
        self._ridge = operator.ridge
        self._tolerance = max(TOLERANCE, _LOOSER * operator.tolerance)
        self.iterations, self.residual = 0, 0.0
        if self._has_bias:
            self._own_CC = operator.output_mean()
            self._bias_inverse_CC = bias_inverse(self._own_CC)

    @cached_property
    def mean_eigenvalue(self) -> float:
        """Mean eigenvalue once the biases are eliminated, from the trace: passes over the rows when first asked.

        Where the classes share parameters, it is the mean over the directions that the rows can curve.
        """
        operator = self._operator
        trace, count = operator.trace(), float(operator.regularized_E.sum()) * operator.n_classes
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
            self._schur, reduced_CD, rhos, tolerance=self._tolerance, max_iterations=MAX_ITERATIONS
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
    ) -> tuple[Tensor, Tensor]:
        """Score; where there are many parameters, no solution is ever formed.

        ``<u, g>``, the outputs A u and those of the held-out rows are linear in u, so they follow the recurrences as
        coordinates, and with ``u = a g + A^T b`` its square is ``a <u, g> + <b, A u>``.
        """
        if not self._in_coordinates(right_CE) or len(rhos) == 1 or not isinstance(held_out, FactoredOperator):
            return super().scores(right_CE, rhos, held_out, floor=floor)
        share_M1, b_MK, outputs_MK, along_M1, held_MK = self._coordinates(right_CE, rhos, held_out)
        square_M = (share_M1 * along_M1).sum(1) + (b_MK * outputs_MK).sum(1)
        return along_M1[:, 0], held_out.quadratic_of(held_MK, square_M.clamp(min=0))

    def _coordinates(
        self, right_CE: Tensor, rhos: list[float], held_out: FactoredOperator | None = None
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
            product, flat, start, rhos, tolerance=self._tolerance, max_iterations=MAX_ITERATIONS
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
