"""The closed form when the constraint does not bind.

Shapes: D features.
"""

from __future__ import annotations

from sfu.curvature.psd_fit.dual_newton import Solution
from sfu.curvature.psd_fit.standard_form import StandardForm

# Eigenvalues this far below zero, relative to the largest, are rounding.
ROUNDING = 1e-13


def solve_unconstrained(form: StandardForm) -> Solution | None:
    """Minimise without the constraint and check that it holds; None when it does not.

    Losses: ``(A A* + c I) z = t - A B`` and ``Y = B + A* z``; gradients: the Sylvester equation
    ``X G + G X + mu X = K + K^T + mu X0``. The certificate is the duality gap, as for the iterative methods.
    """
    dual = form.solve_inactive(form.weight)
    spectrum, image = form.evaluate(dual)
    value_D = spectrum.value_D
    if float(value_D[0]) < -ROUNDING * max(float(value_D[-1]), 0.0):
        return None
    matrix_DD = spectrum.projection()
    residual = image - form.target + form.weight * dual
    value = form.value(matrix_DD, image, form.weight)
    gap = form.relative_gap(float(residual.square().sum()) / (2 * form.weight), value)
    return Solution(matrix_DD, dual, 0, value, gap)
