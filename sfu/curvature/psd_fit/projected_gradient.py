"""Accelerated projected gradient with adaptive restart.

FISTA on the standard form with the constant step of the true Lipschitz constant, ``1 + |A A*| / c``, and the gradient
restart of O'Donoghue & Candes (2015). It is the method for losses that outnumber the unknowns of D > 32 features, and
an independent check of the Newton methods. Where the data leave directions to the prior alone, its iteration count
grows with the square root of ``|A A*| / c``.

Shapes: D features.
"""

from __future__ import annotations

from dataclasses import replace

from sfu.curvature.psd_fit.standard_form import Minimiser, StandardForm, certify, project

CHECK_EVERY = 20


def solve_projected_gradient(form: StandardForm, tolerance: float, max_iterations: int) -> Minimiser:
    """Minimise a standard form over Y >= 0, starting from the projection of the closed form without the constraint.

    The relative duality gap is evaluated every ``CHECK_EVERY`` steps.
    """
    lipschitz = 1 + form.operator_norm / form.weight
    current_DD = project(form.base_DD + form.adjoint(form.solve_inactive()))
    ahead_DD, momentum = current_DD, 1.0
    solution = certify(form, current_DD, form.forward(current_DD), 0)
    for iteration in range(1, max_iterations + 1):
        if solution.relative_gap <= tolerance:
            return solution
        miss = form.forward(ahead_DD) - form.target
        gradient_DD = ahead_DD - form.base_DD + form.adjoint(miss) / form.weight
        following_DD = project(ahead_DD - gradient_DD / lipschitz)
        move_DD = following_DD - current_DD
        if float(((ahead_DD - following_DD) * move_DD).sum()) > 0:
            momentum, ahead_DD = 1.0, following_DD
        else:
            heavier = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
            ahead_DD = following_DD + (momentum - 1) / heavier * move_DD
            momentum = heavier
        current_DD = following_DD
        if iteration % CHECK_EVERY == 0 or iteration == max_iterations:
            solution = certify(form, current_DD, form.forward(current_DD), iteration)
    if solution.relative_gap <= tolerance:
        return solution
    message = f"projected gradient used all its iterations at a relative gap of {solution.relative_gap:.1e}"
    return replace(solution, message=message)
