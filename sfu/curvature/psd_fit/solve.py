"""Fit a curvature matrix to measurements, and certify the result.

Shapes: P perturbations, D features.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Literal

from sfu.curvature.psd_fit.compressed_loss_form import COMPRESSED_DIMENSION, CompressedLossForm
from sfu.curvature.psd_fit.dual_newton import solve_dual_newton
from sfu.curvature.psd_fit.gradient_form import GradientForm
from sfu.curvature.psd_fit.loss_form import LossForm
from sfu.curvature.psd_fit.problem import (
    GradientMeasurements,
    MatrixLike,
    Measurements,
    symmetric_term,
)
from sfu.curvature.psd_fit.projected_gradient import solve_projected_gradient
from sfu.curvature.psd_fit.splitting_newton import solve_splitting_newton
from sfu.curvature.psd_fit.standard_form import DualPoint, Minimiser, StandardForm
from sfu.errors import ConfigError
from sfu.lazy import torch
from sfu.operators.threads import one_thread

if TYPE_CHECKING:
    from torch import Tensor

Algorithm = Literal["auto", "dual_newton", "projected_gradient"]

DEFAULT_ITERATIONS = {"auto": 200, "dual_newton": 200, "projected_gradient": 5000}
SMALL_SIZE = 512
"""With no more features and losses than this, one thread is quickest."""
ROUNDING = 1e-13
"""Eigenvalues this far below zero, relative to the largest, count as zero."""


class Status(Enum):
    """How a PSD fit ended; all but ``CONVERGED`` and ``FAILED`` still have a matrix, with a gap above the tolerance."""

    CONVERGED = "converged"
    MAX_ITERATIONS = "max_iterations"
    STALLED = "stalled"
    FAILED = "failed"


@dataclass(frozen=True, eq=False)
class PsdFitResult:
    """A fitted curvature and its certificate.

    Attributes:
        value_DD: The minimiser X in float64, ``X >= L``; ``None`` only when ``status`` is FAILED.
        status: CONVERGED when ``gap <= tolerance``. The caller must handle anything else.
        iterations: Newton and splitting steps, or projected-gradient steps.
        objective: ``1/P |A(X) - t|^2 + mu/2 |X - X0|_F^2`` at ``value_DD``.
        gap: Objective minus a lower bound on its minimum (the dual value), over the objective.
        min_eigenvalue: Smallest eigenvalue of ``X - L``.
        mu: The weight of the prior that was used.
        seconds: Wall-clock time.
        algorithm: ``unconstrained``, ``dual_newton``, ``projected_gradient`` or ``cvxpylayers``.
        message: What happened and, unless it converged, what to change.
    """

    value_DD: Tensor | None
    status: Status
    iterations: int
    objective: float
    gap: float
    min_eigenvalue: float
    mu: float
    seconds: float
    algorithm: str
    message: str

    @classmethod
    def failed(cls, message: str, algorithm: str) -> PsdFitResult:
        """Return the result of a problem that could not be solved at all."""
        nan = float("nan")
        return cls(None, Status.FAILED, 0, nan, nan, nan, nan, 0.0, algorithm, message)


def fit_psd(
    measurements: Measurements,
    *,
    lower_bound: MatrixLike = 0.0,
    prior: MatrixLike = 0.0,
    mu: float | None = None,
    prior_strength: float = 1e-8,
    tolerance: float = 1e-8,
    max_iterations: int | None = None,
    algorithm: Algorithm = "auto",
) -> PsdFitResult:
    """Solve ``min over X >= L of 1/P |A(X) - t|^2 + mu/2 |X - X0|_F^2``, with a certificate.

    Args:
        measurements: Losses (``A(X)_i = 1/2 d_i^T X d_i``) or gradients (``A(X)_i = X d_i``).
        lower_bound: L, a number (times the identity), a diagonal (D,) or a symmetric (D, D).
        prior: X0, likewise.
        mu: Weight of the prior. ``None`` means ``prior_strength`` times the largest eigenvalue of the Hessian of the
            data term, ``2/P lambda_max(A A*)``. If the perturbations of gradient measurements span the space, a
            ``prior_strength`` of at most 1e-8 has no tie to break, and mu is 0.
        prior_strength: See ``mu``.
        tolerance: Relative duality gap to reach.
        max_iterations: Newton and splitting steps (200 by default) or projected-gradient steps (5000 by default).
        algorithm: ``auto`` tries the closed form first. It goes on with ``dual_newton`` when the constraint binds, and
            with ``projected_gradient`` if more losses than unknowns are given and D > 32, or Newton fails.
            ``dual_newton`` starts from the closed form; for losses that no X >= L meets, from Douglas-Rachford
            splitting. Each algorithm finds the same minimiser, to the tolerance.

    Returns:
        The result, in float64. A fit that does not converge, or overflows, is a status and not an exception.

    Raises:
        ConfigError: mu is 0 and the measurements do not determine the curvature.
        DataError: The bound or the prior is not finite or of the wrong shape.
    """
    started = time.perf_counter()
    limit = DEFAULT_ITERATIONS[algorithm] if max_iterations is None else max_iterations
    lower = symmetric_term("lower_bound", lower_bound, measurements.dimension)
    anchor = symmetric_term("prior", prior, measurements.dimension)
    with torch.no_grad(), _no_tf32(), one_thread(measurements.size <= SMALL_SIZE):
        try:
            form = _standard_form(measurements, lower, anchor, mu, prior_strength)
            if not all(map(math.isfinite, (form.weight, form.floor, form.offset))):
                raise torch.linalg.LinAlgError("products of the measurements overflow")
            solution, used = _run(form, algorithm, tolerance, limit)
            shifted_DD, value_DD = form.lift(solution.matrix_DD)
            smallest = float(torch.linalg.eigvalsh(shifted_DD)[0])
        except torch.linalg.LinAlgError as error:
            return PsdFitResult.failed(f"{error}: rescale the perturbations and their observations.", algorithm)
    status, message = _verdict(solution, tolerance, limit)
    return PsdFitResult(
        value_DD=value_DD,
        status=status,
        iterations=solution.iterations,
        objective=form.objective(solution.value),
        gap=solution.relative_gap,
        min_eigenvalue=smallest,
        mu=form.mu,
        seconds=time.perf_counter() - started,
        algorithm=used,
        message=message,
    )


def _standard_form(
    measurements: Measurements, lower: Tensor, prior: Tensor, mu: float | None, prior_strength: float
) -> StandardForm:
    if isinstance(measurements, GradientMeasurements):
        return GradientForm(measurements, lower, prior, mu, prior_strength)
    if mu == 0:
        raise ConfigError(
            "mu=0: scalar losses alone do not determine the curvature. Give mu > 0, or mu=None (prior_strength times "
            "the largest curvature of the data term)."
        )
    count, size = measurements.delta_PD.shape
    form = CompressedLossForm if size <= COMPRESSED_DIMENSION and count > size * (size + 1) // 2 else LossForm
    return form(measurements, lower, prior, mu, prior_strength)


def _run(form: StandardForm, algorithm: str, tolerance: float, limit: int) -> tuple[Minimiser, str]:
    """Return the solution and the algorithm that found it."""
    if algorithm == "projected_gradient":
        return solve_projected_gradient(form, tolerance, limit), algorithm
    start = DualPoint.at(form, form.solve_inactive())  # the minimiser without the constraint
    if algorithm == "auto":
        value_D = start.spectrum.value_D
        feasible = float(value_D[0]) >= -ROUNDING * max(float(value_D[-1]), 0.0)
        if feasible and start.relative_gap(form) <= tolerance:
            return start.minimiser(form, 0), "unconstrained"
    if algorithm == "dual_newton":
        return _newton(form, start, tolerance, limit), algorithm
    steps = DEFAULT_ITERATIONS["projected_gradient"] if limit == DEFAULT_ITERATIONS["auto"] else limit
    attempts: dict[str, Callable[[], Minimiser]] = {
        "dual_newton": lambda: _newton(form, start, tolerance, limit),
        "projected_gradient": lambda: solve_projected_gradient(form, tolerance, steps),
    }
    found: dict[str, Minimiser] = {}
    for name in sorted(attempts, reverse=form.prefers_first_order()):
        found[name] = attempts[name]()
        if found[name].relative_gap <= tolerance:
            break
    best = min(found, key=lambda name: found[name].relative_gap)
    return found[best], best


def _newton(form: StandardForm, start: DualPoint, tolerance: float, limit: int) -> Minimiser:
    """Return the solution of Newton's method on the dual, and after splitting where the dual leads nowhere."""
    found = start.minimiser(form, 0)
    if not form.beyond_reach():
        found = solve_dual_newton(form, start, tolerance, limit)
    if found.relative_gap <= tolerance or found.iterations >= limit:
        return found
    after = solve_splitting_newton(form, tolerance, limit - found.iterations)
    best = min(after, found, key=lambda each: each.relative_gap)
    return replace(best, iterations=found.iterations + after.iterations, message=after.message)


def _verdict(solution: Minimiser, tolerance: float, limit: int) -> tuple[Status, str]:
    if solution.relative_gap <= tolerance:
        return Status.CONVERGED, f"relative duality gap {solution.relative_gap:.1e}"
    remedy = "raise prior_strength (or mu), or loosen tolerance"
    if solution.iterations >= limit:
        return Status.MAX_ITERATIONS, f"{solution.message}: raise max_iterations (now {limit}), {remedy}."
    return Status.STALLED, f"{solution.message}: rounding prevents more; {remedy}."


@contextmanager
def _no_tf32() -> Iterator[None]:
    """Use full float32 products on CUDA for the time of a fit."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
