"""Semismooth Newton on the dual, for data that some X >= L meets (nearly).

The dual ``phi(z)`` is convex and once differentiable; its gradient is strongly semismooth, so Newton steps with an
element of the generalised Jacobian converge quadratically (Qi & Sun, 2006, "A quadratically convergent Newton method
for computing the nearest correlation matrix", is the case of A = the diagonal).

If the data can be met, z stays bounded as mu -> 0 and a handful of steps from the closed form without the constraint
suffices. If they cannot, z grows like 1/mu, and so does the residual from step to step: then this method stops, and
:mod:`~sfu.curvature.psd_fit.splitting_newton` goes on.

Shapes: z has the shape of the targets, (P,) or (D, D).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfu.curvature.psd_fit.newton_system import NewtonSystem
from sfu.curvature.psd_fit.standard_form import DualPoint, Minimiser, StandardForm
from sfu.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

SHORTEST_STEP = 0.02


def solve_dual_newton(
    form: StandardForm, start: DualPoint, tolerance: float, max_iterations: int, system: NewtonSystem | None = None
) -> Minimiser:
    """Minimise the dual of a standard form to a relative duality gap, as long as each step reduces its residual."""
    system, point, done = system or NewtonSystem(form, precise=False), start, 0
    while done < max_iterations and point.relative_gap(form) > tolerance:
        done += 1
        moved = _search(form, point, system.solve(point.spectrum, -point.residual))
        if moved is None or moved.gap > point.gap:
            break
        point = moved
    return point.minimiser(form, done, "" if point.relative_gap(form) <= tolerance else "Newton on the dual stopped")


def _search(form: StandardForm, point: DualPoint, direction: Tensor) -> DualPoint | None:
    """Return the first point at which phi falls enough, or the gap does where phi has no digits left.

    phi is convex along the direction, so if a step is too long, the secant of its slopes gives the next. Returns
    ``None`` if that would be shorter than ``SHORTEST_STEP``.
    """
    slope = float((point.residual * direction).sum())
    rounding = 10 * torch.finfo(direction.dtype).eps * abs(point.phi)
    step = 1.0
    while step >= SHORTEST_STEP:
        trial = DualPoint.at(form, point.dual + step * direction)
        if trial.phi <= point.phi + 1e-4 * step * slope or trial.gap < point.gap / 4:
            return trial
        if trial.phi <= point.phi + rounding and trial.gap < point.gap:
            return trial
        ahead = float((trial.residual * direction).sum())
        secant = slope / (slope - ahead) if slope < 0 < ahead else 0.5
        step *= min(max(secant, 0.05), 0.7)
    return None
