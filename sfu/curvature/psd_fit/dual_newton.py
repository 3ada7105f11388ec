"""Semismooth Newton on the dual, with a preconditioned conjugate-gradient inner solve and a path in the weight.

The dual ``phi(z)`` is convex and once differentiable; its gradient is strongly semismooth, so Newton steps with an
element of the generalised Jacobian converge quadratically (Qi & Sun, 2006, "A quadratically convergent Newton method
for computing the nearest correlation matrix", is the case of A = the diagonal).

If the data can be met (nearly) by some X >= L, z stays bounded as mu -> 0 and a handful of steps from the closed form
without the constraint suffices. If they cannot, z grows like 1/mu and Newton from there takes minute steps; then the
same problem is solved for a falling sequence of weights c, each start predicted from the two before by ``z = a/c + b``,
which is exact to first order in both situations.

Shapes: z has the shape of the targets, (P,) or (D, D).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfu.curvature.psd_fit.standard_form import DualPoint, LinearMap, Minimiser, StandardForm
from sfu.lazy import torch
from sfu.operators.base import LinearSolution
from sfu.operators.conjugate_gradients import conjugate_gradients

if TYPE_CHECKING:
    from torch import Tensor

INNER_TOLERANCE = 1e-2
INNER_LIMIT = 60
# A preconditioner is reused over Newton steps while conjugate gradients need at most this many steps with it.
STALE_LIMIT = 6
DIRECT_LIMIT = 30
# Newton stops stepping from the closed form when a step must be this short, or the residual has grown this much.
SHORT_STEP = 0.02
DIVERGED = 20.0
TINY_STEP = 1e-9
PATH_START = 0.1
PATH_FACTOR = 30.0
PATH_TOLERANCE = 1e-2


def solve_dual_newton(
    form: StandardForm, start: DualPoint, tolerance: float, max_iterations: int, path: bool = True
) -> Minimiser:
    """Minimise the dual of a standard form to a relative duality gap, from the solution without the constraint.

    With ``path``, follow the path of weights when a few steps at the weight wanted were not enough.
    """
    solver = _Newton(form, max_iterations)
    point = solver.run(start, tolerance, DIRECT_LIMIT, SHORT_STEP, DIVERGED * float(start.residual.norm()))
    if path and point.relative_gap(form) > tolerance:
        on_path = solver.follow_path(tolerance)
        if on_path.relative_gap(form) < point.relative_gap(form):
            point = on_path
    gap = point.relative_gap(form)
    message = ""
    if gap > tolerance:
        reason = "used all its iterations" if solver.left <= 0 else "cannot reduce the dual residual further"
        message = f"Newton {reason} at a relative gap of {gap:.1e}"
    return point.minimiser(form, max_iterations - solver.left, message)


class _Newton:
    """Newton steps on one form, with the budget and the preconditioner they share."""

    def __init__(self, form: StandardForm, max_iterations: int) -> None:
        self.form = form
        self.left = max_iterations
        self._inverse: LinearMap | None = None
        self._reuse = True

    def run(
        self, point: DualPoint, tolerance: float, limit: int, shortest: float, largest: float = float("inf")
    ) -> DualPoint:
        """Take Newton steps at the weight of ``point``.

        They end at the tolerance, at the limit, at a step below ``shortest`` or a residual above ``largest``.
        """
        form = self.form
        for _ in range(limit):
            if self.left <= 0 or point.relative_gap(form) <= tolerance:
                break
            self.left -= 1
            moved = self._search(point, self._direction(point), shortest)
            if moved is None:
                break
            point = moved
            if float(point.residual.norm()) > largest:
                break
        return point

    def _direction(self, point: DualPoint) -> Tensor:
        """Return the Newton direction, with the preconditioner of an earlier step while that works."""
        jacobian = self.form.jacobian(point.spectrum)

        def solve(inverse: LinearMap, limit: int) -> LinearSolution:
            return conjugate_gradients(
                lambda vector: jacobian(vector) + point.weight * vector, -point.residual, inverse,
                tolerance=INNER_TOLERANCE, max_iterations=limit,
            )  # fmt: skip

        if self._inverse is not None and self._reuse:
            found = solve(self._inverse, STALE_LIMIT)
            if found.converged:
                return found.value_CE
        self._inverse = self.form.preconditioner(point.spectrum, point.weight)
        found = solve(self._inverse, INNER_LIMIT)
        return found.value_CE if found.iterations > 0 else self._inverse(-point.residual)

    def _search(self, point: DualPoint, direction: Tensor, shortest: float) -> DualPoint | None:
        """Return the first point at which phi falls enough, or the gap does where phi has no digits left.

        phi is convex along the direction, so if a step is too long, the secant of its slopes gives the next. Returns
        ``None`` if that would be shorter than ``shortest``.
        """
        slope = float((point.residual * direction).sum())
        rounding = 10 * torch.finfo(direction.dtype).eps * abs(point.phi)
        step = 1.0
        while step >= shortest:
            trial = DualPoint.at(self.form, point.dual + step * direction, point.weight)
            if trial.phi <= point.phi + 1e-4 * step * slope or trial.gap < point.gap / 4:
                return trial
            if trial.phi <= point.phi + rounding and trial.gap < point.gap:
                return trial
            ahead = float((trial.residual * direction).sum())
            secant = slope / (slope - ahead) if slope < 0 < ahead else 0.5
            step *= min(max(secant, 0.05), 0.7)
        return None

    def follow_path(self, tolerance: float) -> DualPoint:
        """Solve for weights that fall to the one wanted, each started from the two before."""
        form = self.form
        self._reuse = False  # on the path the spectrum changes too much from step to step
        weight = max(PATH_START * form.operator_norm, form.weight)
        dual = form.solve_inactive(weight)
        before: tuple[float, Tensor] | None = None
        while True:
            last = weight == form.weight
            point = DualPoint.at(form, dual, weight)
            point = self.run(point, tolerance if last else PATH_TOLERANCE, self.left if last else 30, TINY_STEP)
            if last or self.left <= 0:
                return DualPoint.at(form, point.dual * (weight / form.weight), form.weight) if not last else point
            following = max(weight / PATH_FACTOR, form.weight)
            dual = point.dual
            if before is not None:
                slope = (dual - before[1]) / (1 / weight - 1 / before[0])
                dual = slope / following + dual - slope / weight
            before, weight = (weight, point.dual), following
