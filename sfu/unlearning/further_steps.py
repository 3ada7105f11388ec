r"""The result of a Newton step, and steps beyond the first for losses whose curvature changes along the way.

With the retained data these are Newton's method: their gradient and Hessian at each new point.

The forget set alone gives no new gradient. The training objective's gradient at the new point is
:math:`g + \bar H \Delta`, and inserting the estimated curvature there would only undo the damping that cross-validation
chose. But the forget set does show how the curvature changes. The ideal step is
:math:`\bar H_r \Delta = \frac{V_f}{V_r} (g_f - \frac{V}{V_f} g)` with the Hessian averaged along the path, so the step
is taken again from the start with the estimate moved to the middle of the path,

.. math:: H(m) = \hat H(w^*) + H_f(m) - H_f(w^*), \qquad m = \tfrac12 (w^* + w_k)

which is right to second order in the length of the step where :math:`\hat H` is.

Shapes: C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from sfu.curvature.estimators.base import CurvatureEstimator
from sfu.curvature.source_fit import StepChoice
from sfu.operators.base import CurvatureOperator, DampedInverse, LinearSolution
from sfu.operators.structure import Structure
from sfu.request import ForgetRequest, MethodContext, RetainedSet

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """The parameters after a step, scalars worth reporting, and a note if the solve was poor."""

    parameters_CE: Tensor
    details: dict[str, Any] = field(default_factory=dict)
    note: str | None = None

    @classmethod
    def solved(cls, parameters_CE: Tensor, solution: LinearSolution, **details: Any) -> StepResult:
        """Report how the step was solved."""
        about = {"solver": solution.solver, "solve_residual": solution.residual, **details}
        if solution.iterations:
            about["solve_iterations"] = solution.iterations
        note = None if solution.converged else f"the step was solved to a relative residual of {solution.residual:.0e}"
        return cls(parameters_CE, about, note)


class Candidate(NamedTuple):
    """A way to take the step.

    Attributes:
        choice: Its damping and length.
        operator: The estimated curvature.
        inverse: Its inverse for any damping; ``None`` if the operator's own solve will do.
        floor: Smallest eigenvalue that the inverse takes for one; 0 for any.
    """

    choice: StepChoice
    operator: CurvatureOperator
    inverse: DampedInverse | None
    floor: float = 0.0

    def solve(self, right_CE: Tensor) -> StepResult:
        """Return ``c (H + rho R)^-1`` times a right-hand side, in place of parameters."""
        choice = self.choice
        if choice.is_safe:
            return StepResult(choice.scale * right_CE, {"solver": "bound"})
        if self.inverse is not None:
            step_CE = self.inverse.solve(right_CE, choice.rho, floor=self.floor)
            return StepResult(choice.scale * step_CE, self.inverse.account())
        solution = self.operator.solve(right_CE, choice.rho)
        return StepResult.solved(choice.scale * solution.value_CE, solution)


def steps_on_retained(
    first: StepResult,
    steps: int,
    estimator: CurvatureEstimator[Any, Any],
    request: ForgetRequest,
    context: MethodContext,
    retained: RetainedSet,
    rho: float,
) -> StepResult:
    """Take ``steps`` further Newton steps on the retained objective."""
    result, rows = first, request.retained_rows(retained)
    objective = request.head.objective_of(rows.weight)
    for done in range(steps):
        moved = request.at(result.parameters_CE)
        operator = estimator.estimate(estimator.observe(moved, context, retained), moved).operator
        solution = operator.solve(-objective.gradient(rows, result.parameters_CE), rho)
        result = StepResult.solved(result.parameters_CE + solution.value_CE, solution, steps=done + 2)
    return result


def steps_along_path(first: StepResult, steps: int, chosen: Candidate, request: ForgetRequest) -> StepResult:
    """Take the step again, ``steps`` times, with the curvature of the middle of the path."""
    operator, choice = chosen.operator, chosen.choice
    if operator.structure not in {known.value for known in Structure}:
        return replace(first, note=f"a curvature held as {operator.structure} cannot be moved along the path: one step")
    start_CE, gradient_CE = request.head.parameters_CE, request.newton_gradient()
    structure = Structure(operator.structure)
    at_start, point_CE = request.hessian(structure), first.parameters_CE
    for _ in range(steps):
        middle = request.at((start_CE + point_CE) / 2).hessian(structure)
        moved = operator.combine([middle, at_start], [1.0, 1.0, -1.0])
        step_CE = moved.damped().solve(gradient_CE, choice.rho, floor=chosen.floor)
        point_CE = start_CE + choice.scale * request.step_ratio * step_CE
    return StepResult(point_CE, first.details | {"steps": steps + 1}, first.note)
