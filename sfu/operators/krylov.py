r"""The family :math:`(H + \rho R)^{-1}` by products alone: all rho from one Krylov space.

Biases are never damped, so they are eliminated first: conjugate gradients run on the Schur complement
:math:`S = H_{dd} - H_{du} H_{uu}^+ H_{ud}`, in which the damping is a multiple of the identity. :math:`H_{uu}` is the
mean output Hessian, C x C.

Shapes: C classes, D regularised parameters and one bias (or none) a class, E = D (+ 1), M values of rho.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfu.operators.base import CurvatureOperator, DampedInverse
from sfu.operators.conjugate_gradients import multishift_conjugate_gradients, multishift_in_coordinates
from sfu.operators.spectral import bias_inverse

if TYPE_CHECKING:
    from sfu.operators.products import ProductOperator

TOLERANCE = 1e-8
MAX_ITERATIONS = 1000
_AT_ONCE = 16
_LOOSER = 100.0  # than a single solve
_SMALL = 1 << 16  # parameters up to which solutions are held as they are


class KrylovInverse(DampedInverse):
    """See the module.

    Attributes:
        iterations: Products of the last solve.
        residual: Largest relative residual of the last solve. A system that is left unfinished (a tiny rho on a badly
            conditioned Hessian) is a regularised one, and cross-validation scores it as it is.
    """

    def __init__(self, operator: ProductOperator) -> None:
        """Invert the biases' own curvature; nothing else is formed."""
        self._operator = operator
        self._has_bias = bool(operator.regularized_E[-1] == 0)
        self._ridge = operator.ridge
        self._tolerance = max(TOLERANCE, _LOOSER * operator.tolerance)
        self.iterations, self.residual = 0, 0.0
        if self._has_bias:
            self._own_CC = operator.output_mean()
            self._bias_inverse_CC = bias_inverse(self._own_CC)

    @cached_property
    def mean_eigenvalue(self) -> float:
        """From the trace of what is left when the biases are eliminated; passes over the rows, when it is asked for.

        Where the classes share parameters, it is of the directions that the rows can curve, above the ridge.
        """
        operator = self._operator
        trace, count = operator.trace(), float(operator.regularized_E.sum()) * operator.n_classes
        if self._has_bias:
            trace -= float(self._own_CC.trace()) + self._coupled_trace()
        if not operator.shared:
            return trace / count
        return self._ridge + (trace - self._ridge * count) / min(count, operator.n_bent)

    def account(self) -> dict[str, float | int | str]:
        """Iterations and the largest residual of the last solve."""
        return {
            "solver": "multishift_conjugate_gradients",
            "solve_residual": self.residual,
            "solve_iterations": self.iterations,
        }

    @property
    def invertible(self) -> bool:
        """Every eigenvalue is at least l2."""
        return self._ridge > 0

    def solve_many(self, right_CE: Tensor, rhos: list[float], *, floor: float = 0.0) -> Tensor:
        """See the base; the eigenvalues of a Hessian of rows are at least l2, so a floor changes nothing."""
        if self._in_coordinates(right_CE):
            return torch.cat(list(self.solutions(right_CE, rhos, floor=floor)))
        reduced_CD = right_CE
        if self._has_bias:
            from_bias_C1 = self._bias_inverse_CC @ right_CE[:, -1:]
            reduced_CD = right_CE[:, :-1] - self._pull(from_bias_C1)
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
        return self._operator.shared and right_CE.numel() > _SMALL

    def solutions(self, right_CE: Tensor, rhos: list[float], *, floor: float = 0.0) -> Iterator[Tensor]:
        """See the base; where there are many parameters, solutions are kept in coordinates.

        With v = a g + A^T b, A the rows' Jacobian and g the right-hand side, all of the Krylov space is a number and
        an output-sized b for each vector, and a solution becomes p numbers only when its turn comes.
        """
        if not self._in_coordinates(right_CE):
            yield from super().solutions(right_CE, rhos, floor=floor)
            return
        flat, ridge = right_CE.reshape(-1), self._ridge

        def product(vector: Tensor, vector_K: Tensor) -> tuple[Tensor, Tensor]:
            bent_K = self._operator.apply_output_hessian(self._operator.push(vector.view_as(right_CE)))
            image = self._operator.pull_outputs(bent_K).reshape(-1) + ridge * vector
            return image, torch.cat([bent_K.new_zeros(1), bent_K]) + ridge * vector_K

        right_K = flat.new_zeros(1 + self._operator.n_bent)
        right_K[0] = 1.0
        found = multishift_in_coordinates(
            product, flat, right_K, rhos, tolerance=self._tolerance, max_iterations=MAX_ITERATIONS
        )
        self.iterations, self.residual = found.iterations, float(found.residuals_M.max())
        for value_K in found.values:
            yield (value_K[0] * right_CE + self._operator.pull_outputs(value_K[1:]))[None]

    def scores(
        self, right_CE: Tensor, rhos: list[float], held_out: CurvatureOperator, *, floor: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """See the base; where there are many parameters, no solution is ever formed.

        All that is asked of u is linear in it, but for its norm: ``<u, g>``, the outputs A u and those of the held-out
        rows follow the recurrences as coordinates, and with ``u = a g + A^T b`` its square is ``a <u, g> + <b, A u>``.
        """
        from sfu.operators.products import ProductOperator

        operator = self._operator
        if not self._in_coordinates(right_CE) or len(rhos) == 1 or not isinstance(held_out, ProductOperator):
            return super().scores(right_CE, rhos, held_out, floor=floor)
        flat, ridge = right_CE.reshape(-1), self._ridge
        sizes = [1, operator.n_bent, 1, operator.n_bent, held_out.n_bent]

        def seen(vector: Tensor) -> list[Tensor]:
            whole = vector.view_as(right_CE)
            return [(vector @ flat)[None], operator.push(whole), held_out.push(whole)]

        def product(vector: Tensor, vector_K: Tensor) -> tuple[Tensor, Tensor]:
            share, b_K, _, outputs, _ = vector_K.split(sizes)
            bent_K = operator.apply_output_hessian(outputs)
            image = operator.pull_outputs(bent_K).reshape(-1) + ridge * vector
            return image, torch.cat([ridge * share, bent_K + ridge * b_K, *seen(image)])

        start = [flat.new_ones(1), flat.new_zeros(operator.n_bent), *seen(flat)]
        found = multishift_in_coordinates(
            product, flat, torch.cat(start), rhos, tolerance=self._tolerance, max_iterations=MAX_ITERATIONS
        )
        share_M1, b_MK, along_M1, outputs_MK, held_MK = found.values.split(sizes, 1)
        square_M = (share_M1 * along_M1).sum(1) + (b_MK * outputs_MK).sum(1)
        data_M = torch.stack([held @ held_out.apply_output_hessian(held) for held in held_MK])
        return along_M1[:, 0], data_M + held_out.ridge * square_M.clamp(min=0)

    def _schur(self, vector_CD: Tensor) -> Tensor:
        if not self._has_bias:
            return self._operator.matmul(vector_CD)
        image_CE = self._operator.matmul(torch.nn.functional.pad(vector_CD, (0, 1)))
        return image_CE[:, :-1] - self._pull(self._bias_inverse_CC @ image_CE[:, -1:])

    def _coupled_trace(self) -> float:
        """``tr(H_uu^+ H_ud H_du)``: a product with each column of a root of ``H_uu^+``."""
        values_C, vectors_CC = torch.linalg.eigh(self._bias_inverse_CC)
        root_CC = vectors_CC * values_C.clamp(min=0).sqrt()
        return sum(float(self._pull(piece_PC[..., None]).square().sum()) for piece_PC in root_CC.T.split(_AT_ONCE))

    def _pull(self, bias_C1: Tensor) -> Tensor:
        """What biases do to the regularised parameters: ``H_du b``."""
        width = self._operator.regularized_E.shape[0]
        return self._operator.matmul(torch.nn.functional.pad(bias_C1, (width - 1, 0)))[..., :-1]
