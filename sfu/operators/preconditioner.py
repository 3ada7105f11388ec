r"""Preconditioner of products: :math:`\bar M \otimes A + (l_2 + \rho) R`, inverted exactly.

:math:`\bar M` is the mean output Hessian and A the second moments of the rows. Where output Hessians do not depend on
the rows (a quadratic loss, or any loss at zero weights) it is the Hessian itself. With
:math:`\bar M = U \beta U^T` it falls into C systems :math:`\beta_j A + (l_2 + \rho) R`, which one eigendecomposition
of A solves.

Shapes: C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sfu.lazy import torch
from sfu.losses.rows import Rows
from sfu.operators.spectral import SpectralInverse

if TYPE_CHECKING:
    from torch import Tensor

_MANY_CLASSES = 256
"""Beyond, the diagonal of the mean output Hessian takes its place: with 100 classes it needs as many iterations."""
_ROWS = 8192
_SMALLEST = 1e-4  # of the largest eigenvalue
_NOTHING = 1e-12  # for rows without any curvature


class Kronecker:
    """Decomposed mean output Hessian and second moments, from which any damping's inverse follows."""

    _vectors_CC: Tensor | None

    def __init__(self, moments: SpectralInverse, output_CC: Tensor) -> None:
        """Decompose the mean output Hessian, or take its diagonal if there are many classes."""
        self._moments, self._vectors_CC = moments, None
        if output_CC.shape[0] > _MANY_CLASSES:
            self._values_C = output_CC.diagonal().clone()
        else:
            self._values_C, self._vectors_CC = torch.linalg.eigh((output_CC + output_CC.T) / 2)

    @property
    def eigenvalues(self) -> Tensor:
        """The products of the eigenvalues of the two, without l2."""
        return torch.outer(self._values_C.clamp(min=0), self._moments.eigenvalues.clamp(min=0)).flatten()

    def inverse(self, damping: float) -> Callable[[Tensor], Tensor]:
        """Return the function ``r -> P^-1 r`` on ``[C, E]``; the damping is ``l2 + rho``."""
        values_C = self._values_C.clamp(min=max(_SMALLEST * float(self._values_C.max()), damping, _NOTHING))
        damping_C = damping / values_C

        def apply(residual_CE: Tensor) -> Tensor:
            vectors_CC = self._vectors_CC
            if vectors_CC is None:
                return self._moments.solve_rows(residual_CE / values_C[:, None], damping_C)
            return vectors_CC @ self._moments.solve_rows(vectors_CC.T @ residual_CE / values_C[:, None], damping_C)

        return apply


def second_moments(rows: Rows) -> Tensor:
    """Return ``mean a a^T`` over about 8,192 evenly spaced rows (or four for each feature)."""
    return rows.thinned(max(1, rows.count // max(_ROWS, 4 * rows.width))).moments()
