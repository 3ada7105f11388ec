"""Douglas-Rachford splitting to find the rank, then semismooth Newton on the normal map to find the minimiser.

For data that no X >= L meets, the dual solution grows like 1/mu, and a method for the dual alone takes minute steps.
Here Y and the multiplier ``S >= 0`` of the constraint have a scale of their own: both are read from one matrix Z, as
``Y = Proj(Z)`` and ``S = rho Proj(-Z)``, so they are complementary whatever Z is. What is left of the optimality
conditions, with c f for the objective, is the normal map

    G(Z) = A*(A Y - t) + c (Y - B) - S = 0.

Douglas-Rachford splitting works on the same Z. Its step is one eigendecomposition and a solve with a P x P matrix that
is factorised once, so the few large eigenvalues of ``A A*`` do not slow it, and some twenty steps find the rank of Y.
From there Newton takes three to ten steps. Let ``Omega`` be the derivative of the projection at ``Y - S / c``. With
``q = A dY``, the system is that of the dual,

    (c I + A Omega A*) q = -A Omega G,        H = G + A* q,   dY = -Omega H / c,   dS = (1 - Omega) H.

Sources: Lions & Mercier 1979 (splitting); Robinson 1992 (normal maps); Li, Wen, Yang & Yuan 2018, "A semismooth Newton
method for semidefinite programs", which starts Newton from splitting in the same way.

Shapes: D features, P measurements.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sfu.curvature.psd_fit.newton_system import NewtonSystem
from sfu.curvature.psd_fit.standard_form import Minimiser, Spectrum, StandardForm, certify, project

if TYPE_CHECKING:
    from torch import Tensor

# rho over the typical eigenvalue of A A*: splitting converges best between 0.1 (weak noise) and 1 (strong noise).
SHARE = 0.15
RELAXATION = 1.6
SPLITTING_STEPS = 20
NEWTON_STEPS = 15
# Newton from splitting gives up after this many steps in a row that do not improve the best gap.
PATIENCE = 4
# The path of weights starts at this share of the typical eigenvalue of A A*.
PATH_START = 1e-2
PATH_FACTOR = 10.0
PATH_TOLERANCE = 1e-6


def solve_splitting_newton(form: StandardForm, tolerance: float, max_iterations: int) -> Minimiser:
    """Minimise a standard form to a relative duality gap: at its own weight, and if that fails on a path of weights."""
    rho = max(SHARE * form.bulk, form.weight)
    shadow_DD = _split(form, rho, min(SPLITTING_STEPS, max_iterations))
    done = min(SPLITTING_STEPS, max_iterations)
    found, _ = _newton(form, shadow_DD, rho, tolerance, min(NEWTON_STEPS, max_iterations - done), PATIENCE)
    done += found.iterations
    if found.relative_gap > tolerance and done < max_iterations:
        on_path = _follow_path(form, rho, tolerance, max_iterations - done)
        done += on_path.iterations
        found = min(on_path, found, key=lambda each: each.relative_gap)
    message = ""
    if found.relative_gap > tolerance:
        reason = "used all its iterations" if done >= max_iterations else "cannot reduce the residual further"
        message = f"Newton {reason} at a relative gap of {found.relative_gap:.1e}"
    return replace(found, iterations=done, message=message)


def _follow_path(form: StandardForm, rho: float, tolerance: float, max_iterations: int) -> Minimiser:
    """Solve for weights that fall to the form's own, each from the line through the two minimisers before."""
    weight = max(PATH_START * form.bulk, form.weight)
    left = max_iterations - min(SPLITTING_STEPS, max_iterations)
    shadow_DD = _split(form.at_weight(weight), rho, max_iterations - left)
    before: tuple[float, Tensor] | None = None
    while True:
        last = weight == form.weight
        accuracy, limit = (tolerance, left) if last else (PATH_TOLERANCE, min(NEWTON_STEPS, left))
        found, shadow_DD = _newton(form.at_weight(weight), shadow_DD, rho, accuracy, limit, limit + 1)
        left -= found.iterations
        if last:
            return replace(found, iterations=max_iterations - left)
        following, guess_DD = max(weight / PATH_FACTOR, form.weight), shadow_DD
        if before is not None:
            guess_DD = shadow_DD + (shadow_DD - before[1]) * ((following - weight) / (weight - before[0]))
        before, weight, shadow_DD = (weight, shadow_DD), following, guess_DD


def _split(form: StandardForm, rho: float, steps: int) -> Tensor:
    """Return Z after some steps of Douglas-Rachford splitting."""
    weight, base_DD = form.weight, form.base_DD
    inverse = form.rough_inverse(weight + rho)
    shadow_DD = base_DD + form.adjoint(inverse(form.target - form.forward(base_DD)))
    for _ in range(steps):
        matrix_DD = project(shadow_DD)
        center_DD = (weight * base_DD + rho * (2 * matrix_DD - shadow_DD)) / (weight + rho)
        nearest_DD = center_DD + form.adjoint(inverse(form.target - form.forward(center_DD)))
        shadow_DD = shadow_DD + RELAXATION * (nearest_DD - matrix_DD)
    return shadow_DD


def _newton(
    form: StandardForm, shadow_DD: Tensor, rho: float, tolerance: float, limit: int, patience: int
) -> tuple[Minimiser, Tensor]:
    """Return the best minimiser of Newton's method on the normal map from Z, and the last Z."""
    system = NewtonSystem(form, precise=True)
    best: Minimiser | None = None
    worse = done = 0
    while True:
        spectrum = Spectrum.of(shadow_DD)
        matrix_DD = spectrum.projection()
        image = form.forward(matrix_DD)
        found = certify(form, matrix_DD, image, done)
        worse = 0 if best is None or found.relative_gap < best.relative_gap else worse + 1
        best = found if best is None or worse == 0 else best
        if best.relative_gap <= tolerance or worse >= patience or done >= limit:
            return replace(best, iterations=done), shadow_DD
        done += 1
        multiplier_DD = rho * (matrix_DD - shadow_DD)
        normal_DD = form.adjoint(image - form.target) + form.weight * (matrix_DD - form.base_DD) - multiplier_DD
        scaled = spectrum.with_negative_scaled(rho / form.weight)
        change = system.solve(scaled, -form.forward(scaled.derivative(normal_DD)))
        slope_DD = normal_DD + form.adjoint(change)
        along_DD = scaled.derivative(slope_DD)
        shadow_DD = shadow_DD - along_DD / form.weight - (slope_DD - along_DD) / rho
        shadow_DD = (shadow_DD + shadow_DD.T) / 2
