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

from dataclasses import dataclass

import torch
from torch import Tensor

from sfu.curvature.psd_fit.standard_form import LinearMap, Minimiser, Spectrum, StandardForm

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


@dataclass(frozen=True, eq=False)
class _Point:
    """Everything that is known at one z for one weight."""

    dual: Tensor
    weight: float
    spectrum: Spectrum
    matrix_DD: Tensor
    residual: Tensor
    phi: float
    value: float

    @classmethod
    def at(cls, form: StandardForm, dual: Tensor, weight: float) -> _Point:
        spectrum, image = form.evaluate(dual)
        matrix_DD = spectrum.projection()
        residual = image - form.target + weight * dual
        phi = spectrum.clipped_D.square().sum() / 2 - (form.target * dual).sum() + weight / 2 * dual.square().sum()
        return cls(dual, weight, spectrum, matrix_DD, residual, float(phi), form.value(matrix_DD, image, weight))

    @property
    def gap(self) -> float:
        return float(self.residual.square().sum()) / (2 * self.weight)

    def relative_gap(self, form: StandardForm) -> float:
        """Return the gap relative to the original objective at the wanted weight, and to f on the way there."""
        if self.weight == form.weight:
            return form.relative_gap(self.gap, self.value)
        return self.gap / self.value if self.value > 0 else 0.0


def solve_dual_newton(
    form: StandardForm,
    tolerance: float,
    max_iterations: int,
    path: bool = True,
) -> Minimiser:
    """Minimise the dual of a standard form.

    Args:
        form: The problem.
        tolerance: Relative duality gap at which to stop.
        max_iterations: At most this many Newton steps in all.
        path: Follow the path of weights when a few steps at the weight wanted were not enough.
    """
    solver = _Newton(form, max_iterations)
    point = _Point.at(form, form.solve_inactive(form.weight), form.weight)
    point = solver.run(point, tolerance, DIRECT_LIMIT, SHORT_STEP, DIVERGED * float(point.residual.norm()))
    if path and point.relative_gap(form) > tolerance:
        on_path = solver.follow_path(tolerance)
        if on_path.relative_gap(form) < point.relative_gap(form):
            point = on_path
    gap = point.relative_gap(form)
    message = ""
    if gap > tolerance:
        reason = "used all its iterations" if solver.left <= 0 else "cannot reduce the dual residual further"
        message = f"Newton {reason} at a relative gap of {gap:.1e}"
    return Minimiser(point.matrix_DD, point.dual, max_iterations - solver.left, point.value, gap, message)


class _Newton:
    """Newton steps on one form, with the budget and the preconditioner they share."""

    def __init__(self, form: StandardForm, max_iterations: int) -> None:
        self.form = form
        self.left = max_iterations
        self._inverse: LinearMap | None = None
        self._reuse = True

    def run(
        self, point: _Point, tolerance: float, limit: int, shortest: float, largest: float = float("inf")
    ) -> _Point:
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

    def _direction(self, point: _Point) -> Tensor:
        """Return the Newton direction, with the preconditioner of an earlier step while that works."""
        jacobian = self.form.jacobian(point.spectrum)
        if self._inverse is not None and self._reuse:
            direction, solved = conjugate_gradients(jacobian, self._inverse, -point.residual, point.weight, STALE_LIMIT)
            if solved:
                return direction
        self._inverse = self.form.preconditioner(point.spectrum, point.weight)
        return conjugate_gradients(jacobian, self._inverse, -point.residual, point.weight, INNER_LIMIT)[0]

    def _search(self, point: _Point, direction: Tensor, shortest: float) -> _Point | None:
        """Return the first point at which phi falls enough, or the gap does where phi has no digits left.

        phi is convex along the direction, so if a step is too long, the secant of its slopes gives the next. Returns
        ``None`` if that would be shorter than ``shortest``.
        """
        slope = float((point.residual * direction).sum())
        rounding = 10 * torch.finfo(direction.dtype).eps * abs(point.phi)
        step = 1.0
        while step >= shortest:
            trial = _Point.at(self.form, point.dual + step * direction, point.weight)
            if trial.phi <= point.phi + 1e-4 * step * slope or trial.gap < point.gap / 4:
                return trial
            if trial.phi <= point.phi + rounding and trial.gap < point.gap:
                return trial
            ahead = float((trial.residual * direction).sum())
            secant = slope / (slope - ahead) if slope < 0 < ahead else 0.5
            step *= min(max(secant, 0.05), 0.7)
        return None

    def follow_path(self, tolerance: float) -> _Point:
        """Solve for weights that fall to the one wanted, each started from the two before."""
        form = self.form
        self._reuse = False  # on the path the spectrum changes too much from step to step
        weight = max(PATH_START * form.operator_norm(), form.weight)
        dual = form.solve_inactive(weight)
        before: tuple[float, Tensor] | None = None
        while True:
            last = weight == form.weight
            point = _Point.at(form, dual, weight)
            point = self.run(point, tolerance if last else PATH_TOLERANCE, self.left if last else 30, TINY_STEP)
            if last or self.left <= 0:
                return _Point.at(form, point.dual * (weight / form.weight), form.weight) if not last else point
            following = max(weight / PATH_FACTOR, form.weight)
            dual = point.dual
            if before is not None:
                slope = (dual - before[1]) / (1 / weight - 1 / before[0])
                dual = slope / following + dual - slope / weight
            before, weight = (weight, point.dual), following


def conjugate_gradients(
    jacobian: LinearMap, inverse: LinearMap, rhs: Tensor, weight: float, limit: int
) -> tuple[Tensor, bool]:
    """Solve ``(jacobian + weight I) x = rhs`` to ``INNER_TOLERANCE``; return x and whether that was reached."""
    solution, residual = torch.zeros_like(rhs), rhs
    goal = INNER_TOLERANCE * float(rhs.norm())
    conditioned = inverse(residual)
    direction = conditioned
    energy = float((residual * conditioned).sum())
    for count in range(limit):
        image = jacobian(direction) + weight * direction
        curvature = float((direction * image).sum())
        if curvature <= 0 or energy <= 0:
            return (solution if count else conditioned), False
        solution = solution + (energy / curvature) * direction
        residual = residual - (energy / curvature) * image
        if float(residual.norm()) <= goal:
            return solution, True
        conditioned = inverse(residual)
        previous, energy = energy, float((residual * conditioned).sum())
        direction = conditioned + (energy / previous) * direction
    return solution, False
