"""Accelerated projected gradient with adaptive restart.

FISTA on the standard form with the constant step of the true Lipschitz constant, ``1 + |A A*| / c``, and the gradient
restart of O'Donoghue & Candes (2015). It is the method for losses that outnumber the unknowns, and an independent check
of the dual Newton method. Where the data leave directions to the prior alone, its iteration count grows with the square
root of ``|A A*| / c``.

Shapes: D features.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sfu.curvature.psd_fit.standard_form import DualPoint, Minimiser, StandardForm, project

if TYPE_CHECKING:
    from torch import Tensor

CHECK_EVERY = 20


def solve_projected_gradient(form: StandardForm, tolerance: float, max_iterations: int) -> Minimiser:
    """Minimise a standard form over Y >= 0, starting from the projection of the closed form without the constraint.

    The relative duality gap is evaluated every ``CHECK_EVERY`` steps.
    """
    lipschitz = 1 + form.operator_norm / form.weight
    current_DD = project(form.base_DD + form.adjoint(form.solve_inactive(form.weight)))
    ahead_DD, momentum = current_DD, 1.0
    solution = _certified(form, current_DD, 0)
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
            solution = _certified(form, current_DD, iteration)
    if solution.relative_gap <= tolerance:
        return solution
    message = f"projected gradient used all its iterations at a relative gap of {solution.relative_gap:.1e}"
    return replace(solution, message=message)


def _certified(form: StandardForm, matrix_DD: Tensor, iteration: int) -> Minimiser:
    """Return the better of Y and Y(z), for the dual point ``z = (t - A Y) / c`` that Y implies, with its duality gap.

    The gap of the pair (Y(z), z) is ``|F(z)|^2 / (2c)``; that of (Y, z) is
    ``1/2 |Y - Y(z)|^2 + <Y, Proj(-(B + A* z))>``: terms that are not negative, so no digits cancel.
    """
    feasible_DD = project(matrix_DD)
    image = form.forward(feasible_DD)
    value = form.value(feasible_DD, image, form.weight)
    point = DualPoint.at(form, (form.target - image) / form.weight, form.weight)
    if not value < point.value:
        return point.minimiser(form, iteration)
    outside_DD = point.matrix_DD - form.base_DD - form.adjoint(point.dual)
    slack = (feasible_DD * outside_DD).sum().clamp(min=0)
    gap = float((feasible_DD - point.matrix_DD).square().sum() / 2 + slack)
    return Minimiser(feasible_DD, point.dual, iteration, value, form.relative_gap(gap, value))
