r"""Preconditioner of products: :math:`\bar M \otimes A + (l_2 + \rho) R`, inverted exactly.

:math:`\bar M` is the mean output Hessian and A the second moments of the rows. Where output Hessians do not depend on
the rows (a quadratic loss, or any loss at zero weights) it is the Hessian itself. With
:math:`\bar M = U \beta U^T` it falls into C systems :math:`\beta_j A + (l_2 + \rho) R`, which one eigendecomposition
of A solves.

Shapes: C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sfu.losses.rows import Rows
from sfu.operators.spectral import SpectralInverse

_ROWS = 8192
_SMALLEST = 1e-4  # of the largest eigenvalue
_NOTHING = 1e-12  # for rows without any curvature


@dataclass(frozen=True)
class KroneckerPreconditioner:
    """Mean output Hessian times second moments of the rows.

    Attributes:
        moments: Second moments of the rows, decomposed.
        output_CC: Mean output Hessian.
        ridge: l2.
    """

    moments: SpectralInverse
    output_CC: Tensor
    ridge: float

    @classmethod
    def of(
        cls, sets: Sequence[tuple[Rows, float]], output_CC: Tensor, ridge_E: Tensor, regularized_E: Tensor
    ) -> KroneckerPreconditioner:
        """Build from sets of rows and their coefficients; a large set is represented by evenly spaced rows."""
        width = ridge_E.shape[0]
        second_EE = ridge_E.new_zeros(width, width)
        for rows, coefficient in sets:
            second_EE += abs(coefficient) * second_moments(rows)
        return cls(SpectralInverse(second_EE, regularized_E), output_CC, float(ridge_E[0]))

    def with_output(self, output_CC: Tensor) -> KroneckerPreconditioner:
        """Return the preconditioner of the same rows at other parameters."""
        return KroneckerPreconditioner(self.moments, output_CC, self.ridge)

    def at(self, rho: float) -> Callable[[Tensor], Tensor]:
        """Return the function ``r -> P^-1 r`` on ``[C, E]``."""
        values_C, vectors_CC = torch.linalg.eigh((self.output_CC + self.output_CC.T) / 2)
        values_C = values_C.clamp(min=max(_SMALLEST * float(values_C[-1]), self.ridge + rho, _NOTHING))
        damping_C = (self.ridge + rho) / values_C

        def apply(residual_CE: Tensor) -> Tensor:
            rotated_CE = (vectors_CC.T @ residual_CE) / values_C[:, None]
            return vectors_CC @ self.moments.solve_rows(rotated_CE, damping_C)

        return apply


class IdentityPreconditioner:
    """No preconditioning, for heads whose classes share their parameters."""

    def with_output(self, output_CC: Tensor) -> IdentityPreconditioner:
        return self

    def at(self, rho: float) -> Callable[[Tensor], Tensor]:
        return lambda residual_CE: residual_CE


def second_moments(rows: Rows) -> Tensor:
    """Return ``mean a a^T`` over about 8,192 evenly spaced rows (or four for each feature)."""
    some = rows.thinned(max(1, rows.count // max(_ROWS, 4 * rows.width)))
    total_EE = torch.zeros(rows.width, rows.width, dtype=rows.dtype, device=rows.device)
    for chunk in some.linear_chunks():
        total_EE.addmm_(chunk.design_BE.T, chunk.design_BE * chunk.share_B[:, None])
    return total_EE
