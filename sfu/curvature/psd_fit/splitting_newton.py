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
from sfu.operators.spectral import SMALL_SIDE
from sfu.operators.threads import one_thread

if TYPE_CHECKING:
    from torch import Tensor

# rho over the typical eigenvalue of A A*. Splitting converges best at 0.05 to 0.15, and at 0.2 to 1 if the targets are
# far from all that Y >= 0 can give.
SHARE, FAR_SHARE = 0.1, 0.2
RELAXATION = 1.6
SPLITTING_STEPS = 25
NEWTON_STEPS = 15
# Newton on the normal map gives up after this many steps in a row that do not improve the best gap.
PATIENCE = 4
# The path of weights starts at this share of the typical eigenvalue of A A*.
PATH_START = 1e-2
PATH_FACTOR = 10.0
PATH_TOLERANCE = 1e-6
SMALLEST_FACTOR = 1.1


def solve_splitting_newton(form: StandardForm, tolerance: float, max_iterations: int) -> Minimiser:
    """Minimise a standard form to a relative duality gap: at its own weight, and if that fails on a path of weights."""
    done = min(SPLITTING_STEPS, max_iterations)
    rho = max((FAR_SHARE if form.beyond_reach() else SHARE) * form.bulk, form.weight)
    shadow_DD = _split(form, rho, done)
    found, _ = _newton(form, shadow_DD, rho, tolerance, min(NEWTON_STEPS, max_iterations - done))
    done += found.iterations
    if found.relative_gap > tolerance and done < max_iterations:
        on_path = _follow_path(form, shadow_DD, tolerance, max_iterations - done)
        done += on_path.iterations
        found = min(on_path, found, key=lambda each: each.relative_gap)
    message = ""
    if found.relative_gap > tolerance:
        reason = "used all its iterations" if done >= max_iterations else "cannot reduce the residual further"
        message = f"Newton {reason} at a relative gap of {found.relative_gap:.1e}"
    return replace(found, iterations=done, message=message)


def _follow_path(form: StandardForm, shadow_DD: Tensor, tolerance: float, max_iterations: int) -> Minimiser:
    """Solve for weights c that fall to the form's own, from Z and then each from the line through the two before.

    After a weight at which Newton does not converge, the weight falls by a smaller factor. rho falls with the root of
    c: some eigenvalues of S are of the order of c, and with a large rho the errors of the line would decide on their
    sign in Z.
    """
    weight, factor = max(PATH_START * form.bulk, form.weight), PATH_FACTOR
    solved: list[tuple[float, Tensor, Tensor]] = []
    finals: list[Minimiser] = []
    done = 0
    while True:
        rho = _path_rho(form, weight)
        accuracy = tolerance if weight == form.weight else PATH_TOLERANCE
        limit = min(NEWTON_STEPS, max_iterations - done)
        found, shadow_DD = _newton(form.at_weight(weight), shadow_DD, rho, accuracy, limit)
        done += found.iterations
        converged = found.relative_gap <= accuracy
        if converged:
            matrix_DD = project(shadow_DD)
            solved = [*solved[-1:], (weight, matrix_DD, rho * (matrix_DD - shadow_DD))]
            factor = min(factor**2, PATH_FACTOR)
        elif solved:
            factor = factor**0.5
        if weight == form.weight:
            finals.append(found)
        if done >= max_iterations or factor < SMALLEST_FACTOR or (converged and weight == form.weight):
            finals.append(_newton(form, shadow_DD, rho, tolerance, 0)[0])  # a certificate at the form's own weight
            return replace(min(finals, key=lambda each: each.relative_gap), iterations=done)
        if solved:
            weight = max(solved[-1][0] / factor, form.weight)
            matrix_DD, multiplier_DD = _extrapolate(solved, weight)
            shadow_DD = matrix_DD - multiplier_DD / _path_rho(form, weight)
        else:
            weight *= PATH_FACTOR
            steps = min(SPLITTING_STEPS, max_iterations - done)
            shadow_DD = _split(form.at_weight(weight), _path_rho(form, weight), steps)
            done += steps


def _path_rho(form: StandardForm, weight: float) -> float:
    """Return rho for a weight on the path."""
    return max(SHARE * (form.bulk * weight / PATH_START) ** 0.5, weight)


def _extrapolate(solved: list[tuple[float, Tensor, Tensor]], weight: float) -> tuple[Tensor, Tensor]:
    """Return Y and S at a weight on the line through those at the last two weights."""
    last, *pair = solved[-1]
    if len(solved) == 1:
        return pair[0], pair[1]
    share = (weight - last) / (last - solved[0][0])
    return pair[0] + share * (pair[0] - solved[0][1]), pair[1] + share * (pair[1] - solved[0][2])


def _split(form: StandardForm, rho: float, steps: int) -> Tensor:
    """Return Z after some steps of Douglas-Rachford splitting."""
    weight, base_DD = form.weight, form.base_DD
    inverse = form.rough_inverse(weight + rho)
    shadow_DD = base_DD + form.adjoint(inverse(form.target - form.forward(base_DD)))
    with one_thread(base_DD.shape[0] <= SMALL_SIDE):
        for _ in range(steps):
            matrix_DD = project(shadow_DD)
            center_DD = (weight * base_DD + rho * (2 * matrix_DD - shadow_DD)) / (weight + rho)
            nearest_DD = center_DD + form.adjoint(inverse(form.target - form.forward(center_DD)))
            shadow_DD = shadow_DD + RELAXATION * (nearest_DD - matrix_DD)
    return shadow_DD


def _newton(
    form: StandardForm, shadow_DD: Tensor, rho: float, tolerance: float, limit: int
) -> tuple[Minimiser, Tensor]:
    """Return the best minimiser of Newton's method on the normal map from Z, and its Z."""
    system = NewtonSystem(form, precise=True)
    best, best_DD = None, shadow_DD
    worse = done = 0
    while True:
        spectrum = Spectrum.of(shadow_DD)
        matrix_DD = spectrum.projection()
        image = form.forward(matrix_DD)
        found = certify(form, matrix_DD, image, done)
        worse += 1
        if best is None or found.relative_gap < best.relative_gap:
            best, best_DD, worse = found, shadow_DD, 0
        if best.relative_gap <= tolerance or worse >= PATIENCE or done >= limit:
            break
        done += 1
        multiplier_DD = rho * (matrix_DD - shadow_DD)
        normal_DD = form.adjoint(image - form.target) + form.weight * (matrix_DD - form.base_DD) - multiplier_DD
        scaled = spectrum.with_negative_scaled(rho / form.weight)
        change = system.solve(scaled, -form.forward(scaled.derivative(normal_DD)))
        slope_DD = normal_DD + form.adjoint(change)
        along_DD = scaled.derivative(slope_DD)
        shadow_DD = shadow_DD - along_DD / form.weight - (slope_DD - along_DD) / rho
        shadow_DD = (shadow_DD + shadow_DD.T) / 2
    return replace(best, iterations=done), best_DD
