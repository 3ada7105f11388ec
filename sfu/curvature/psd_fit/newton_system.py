"""The linear system of a Newton step, ``(A Proj' A* + c I) q = b``, by preconditioned conjugate gradients.

Shapes: q and b have the shape of the targets, (P,) or (D, D).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfu.curvature.psd_fit.standard_form import LinearMap, Spectrum, StandardForm
from sfu.operators.base import LinearSolution
from sfu.operators.conjugate_gradients import conjugate_gradients

if TYPE_CHECKING:
    from torch import Tensor

ROUGH_TOLERANCE = 1e-2
# A precise solution has a residual below this share of c over the largest eigenvalue, as far as float64 can.
PRECISE_SHARE, SMALLEST_TOLERANCE = 0.1, 1e-14
LIMIT = 60
# A rough preconditioner is reused over Newton steps while conjugate gradients need at most this many steps with it.
STALE_LIMIT = 6


class NewtonSystem:
    """Solve the systems of successive Newton steps on one form.

    A rough solution is right in the directions of large eigenvalues. A precise one is right in those of the smallest,
    too, where the residual says little.
    """

    def __init__(self, form: StandardForm, precise: bool) -> None:
        self._form = form
        exact = max(PRECISE_SHARE * form.weight / max(form.operator_norm, form.weight), SMALLEST_TOLERANCE)
        self._tolerance = min(ROUGH_TOLERANCE, exact) if precise else ROUGH_TOLERANCE
        self._precise = precise
        self._inverse: LinearMap | None = None

    def solve(self, spectrum: Spectrum, right: Tensor) -> Tensor:
        """Return q for the projection's derivative at a spectrum."""
        if self._inverse is not None and not self._precise:
            found = self._iterate(spectrum, right, self._inverse, STALE_LIMIT)
            if found.converged:
                return found.value_CE
        self._inverse = self._form.preconditioner(spectrum, self._precise)
        found = self._iterate(spectrum, right, self._inverse, LIMIT)
        return found.value_CE if found.iterations > 0 else self._inverse(right)

    def _iterate(self, spectrum: Spectrum, right: Tensor, inverse: LinearMap, limit: int) -> LinearSolution:
        jacobian, weight = self._form.jacobian(spectrum), self._form.weight
        return conjugate_gradients(
            lambda vector: jacobian(vector) + weight * vector, right, inverse,
            tolerance=self._tolerance, max_iterations=limit,
        )  # fmt: skip
