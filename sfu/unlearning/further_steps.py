r"""Newton steps beyond the first, for losses whose curvature changes along the way.

With the retained data it is Newton's method: their gradient and Hessian again at the new point.

From the forget set alone there is no new gradient to be had: that of the training objective at the new point is
:math:`g + \bar H \Delta`, and to put the estimated curvature there would only take back the damping that
cross-validation chose. What the forget set does show is how the curvature changes. The exact step is
:math:`\bar H_r \Delta = \frac{V_f}{V_r} (g_f - \frac{V}{V_f} g)` with the Hessian averaged along the path, so the step
is taken again from the start with the estimate moved to the middle of the path,

.. math:: H(m) = \hat H(w^*) + H_f(m) - H_f(w^*), \qquad m = \tfrac12 (w^* + w_k)

which is right to second order in the length of the step where :math:`\hat H` is.

Shapes: C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from sfu.curvature.estimators.base import CurvatureEstimator
from sfu.curvature.regularization import StepChoice
from sfu.operators.base import CurvatureOperator, LinearSolution
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.settings import Structure


@dataclass(frozen=True)
class StepResult:
    """Where steps have led, and how the last was solved."""

    parameters_CE: Tensor
    details: dict[str, Any] = field(default_factory=dict)
    note: str | None = None

    @classmethod
    def by(cls, parameters_CE: Tensor, solution: LinearSolution, **details: Any) -> StepResult:
        """With the solution's own account of itself."""
        about = {"solver": solution.solver, "solve_residual": solution.residual, **details}
        if solution.iterations:
            about["solve_iterations"] = solution.iterations
        note = None if solution.converged else f"the step was solved to a relative residual of {solution.residual:.0e}"
        return cls(parameters_CE, about, note)


def on_the_retained(
    taken: StepResult,
    steps: int,
    estimator: CurvatureEstimator[Any],
    request: ForgetRequest,
    context: MethodContext,
    retained: RetainedSet,
    rho: float,
) -> StepResult:
    """Newton steps on the retained objective."""
    head = request.head
    rows = request.retained_rows(retained)
    objective = head.objective_of(rows.weight)
    for done in range(steps):
        moved = request.at(taken.parameters_CE)
        operator = estimator.estimate(estimator.observe(moved, context, retained), moved).operator
        solution = operator.solve(-objective.gradient(rows, taken.parameters_CE), rho)
        taken = StepResult.by(taken.parameters_CE + solution.value_CE, solution, steps=done + 2)
    return taken


def along_the_path(
    taken: StepResult, steps: int, operator: CurvatureOperator, request: ForgetRequest, choice: StepChoice, floor: float
) -> StepResult:
    """The step again, with the curvature of the middle of the path."""
    if operator.structure not in {known.value for known in Structure}:
        return replace(taken, note=f"a curvature held as {operator.structure} cannot be moved along the path: one step")
    start_CE, gradient_CE = request.head.parameters_CE, request.newton_gradient()
    structure = Structure(operator.structure)
    there = request.hessian(structure)
    point_CE = taken.parameters_CE
    for _ in range(steps):
        middle = request.at((start_CE + point_CE) / 2).hessian(structure)
        moved = operator.combine([middle, there], [1.0, 1.0, -1.0])
        step_CE = moved.damped().solve(gradient_CE, choice.rho, floor=floor)
        point_CE = start_CE + choice.scale * request.step_ratio * step_CE
    return StepResult(point_CE, taken.details | {"steps": steps + 1}, taken.note)
