"""Fit a curvature to measurements: ``fit_psd`` for one problem, ``fit_psd_batch`` for several.

Shapes: P perturbations, D features.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from sfu.curvature.psd_fit.bounds import MatrixLike, symmetric_term
from sfu.curvature.psd_fit.dual_newton import Solution, solve_dual_newton
from sfu.curvature.psd_fit.gradient_form import GradientForm
from sfu.curvature.psd_fit.loss_form import LossForm
from sfu.curvature.psd_fit.measurements import GradientMeasurements, LossMeasurements, Measurements
from sfu.curvature.psd_fit.projected_gradient import solve_projected_gradient
from sfu.curvature.psd_fit.projection import project_eigh, project_newton_schulz
from sfu.curvature.psd_fit.result import PsdFitResult, Status
from sfu.curvature.psd_fit.standard_form import StandardForm
from sfu.curvature.psd_fit.unconstrained import solve_unconstrained
from sfu.errors import ConfigError
from sfu.operators.spectral import eigh

Algorithm = Literal["auto", "unconstrained", "dual_newton", "projected_gradient"]
Projection = Literal["eigh", "newton_schulz"]

ALGORITHMS = ("auto", "unconstrained", "dual_newton", "projected_gradient")
PROJECTIONS = {"eigh": project_eigh, "newton_schulz": project_newton_schulz}
DEFAULT_ITERATIONS = {"unconstrained": 0, "auto": 200, "dual_newton": 200, "projected_gradient": 5000}


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
    dtype: torch.dtype = torch.float64,
    projection: Projection = "eigh",
) -> PsdFitResult:
    """Solve ``min over X >= L of 1/P |A(X) - t|^2 + mu/2 |X - X0|_F^2``, with a certificate.

    Args:
        measurements: losses (``A(X)_i = 1/2 d_i^T X d_i``) or gradients (``A(X)_i = X d_i``).
        lower_bound: L, a number (times the identity), a diagonal (D,) or a symmetric (D, D).
        prior: X0, likewise.
        mu: weight of the prior; None means ``prior_strength`` times the largest eigenvalue of the Hessian of the data
            term, ``2/P lambda_max(A A*)``. For gradients whose perturbations span the space, a ``prior_strength`` of at
            most 1e-8 is a tie-breaker with no tie to break, and mu is 0.
        prior_strength: see ``mu``.
        tolerance: relative duality gap to reach.
        max_iterations: Newton steps (200 when None) or projected-gradient steps (5000 when None).
        algorithm: "auto" tries the closed form, goes on with "dual_newton" when the constraint binds, and takes
            "projected_gradient" for loss data that no X >= L meets when P is large against D.
        dtype: float64, or float32 for the search with a float64 refinement. The answer is float64 either way.
        projection: "eigh", or "newton_schulz" (matrix products only) for "projected_gradient".

    Returns:
        The result. Not converged is a status, not an exception, and so is an overflow: call ``.require()`` or look.

    Raises:
        ConfigError: a setting is out of range or contradicts another.
        DataError: the bound or the prior is not finite or of the wrong shape.
    """
    started = time.perf_counter()
    _check_settings(mu, prior_strength, tolerance, max_iterations, algorithm, dtype, projection)
    limit = DEFAULT_ITERATIONS[algorithm] if max_iterations is None else max_iterations
    lower = symmetric_term("lower_bound", lower_bound, measurements.dimension)
    anchor = symmetric_term("prior", prior, measurements.dimension)

    def build(precision: torch.dtype) -> StandardForm:
        if isinstance(measurements, LossMeasurements):
            if mu == 0:
                raise ConfigError(
                    "mu=0: scalar losses alone do not determine the curvature; give mu > 0 or mu=None "
                    "(prior_strength times the largest curvature of the data term)."
                )
            return LossForm(measurements, lower, anchor, mu, prior_strength, precision)
        if isinstance(measurements, GradientMeasurements):
            return GradientForm(measurements, lower, anchor, mu, prior_strength, precision)
        raise ConfigError(
            f"measurements is a {type(measurements).__name__}; accepted are LossMeasurements and GradientMeasurements."
        )

    with torch.no_grad(), _no_tf32(measurements):
        try:
            form = build(torch.float64)
            if not all(map(math.isfinite, (form.weight, form.floor, form.offset))):
                raise torch.linalg.LinAlgError("products of the measurements overflow")
            solution, used, spent = _run(form, build, algorithm, tolerance, limit, dtype, PROJECTIONS[projection])
            if solution is None:
                return PsdFitResult.failed("the constraint X >= L binds: use algorithm=auto or dual_newton.", used)
            shifted_DD, value_DD = form.lift(solution.matrix_DD)
            smallest = float(eigh(shifted_DD)[0][0])
        except torch.linalg.LinAlgError as error:
            return PsdFitResult.failed(f"{error}: rescale the perturbations and their observations.", algorithm)
    status, message = _verdict(solution, tolerance, spent, limit)
    return PsdFitResult(
        value_DD=value_DD,
        status=status,
        iterations=spent,
        objective=form.objective(solution.value),
        gap=solution.relative_gap,
        min_eigenvalue=smallest,
        mu=form.mu,
        seconds=time.perf_counter() - started,
        algorithm=used,
        message=message,
    )


def fit_psd_batch(
    measurements: Sequence[Measurements | Callable[[], Measurements]], **settings: Any
) -> list[PsdFitResult]:
    """Fit several problems, for example one per class; a problem that fails does not take the others with it.

    Args:
        measurements: one entry per problem. An entry may be a function that builds the measurements, so that an
            observation that cannot be used (not finite) becomes the failure of its own problem.
        settings: as for :func:`fit_psd`; a list gives one value per problem, anything else is shared.

    Returns:
        One result per problem, in order; status FAILED, with the message of the error, where one could not be solved.

    Raises:
        ConfigError: a list of settings whose length is not the number of problems.
    """
    for name, value in settings.items():
        if isinstance(value, list) and len(value) != len(measurements):
            raise ConfigError(
                f"{name} lists {len(value)} values for {len(measurements)} problems: give one per problem."
            )
    results = []
    for index, entry in enumerate(measurements):
        own = {name: value[index] if isinstance(value, list) else value for name, value in settings.items()}
        try:
            results.append(fit_psd(entry() if callable(entry) else entry, **own))
        except Exception as error:
            results.append(PsdFitResult.failed(f"problem {index}: {error}", str(own.get("algorithm", "auto"))))
    return results


def _run(
    form: StandardForm,
    build: Callable[[torch.dtype], StandardForm],
    algorithm: str,
    tolerance: float,
    limit: int,
    dtype: torch.dtype,
    project: Callable[[Tensor], Tensor],
) -> tuple[Solution | None, str, int]:
    """The solution, the algorithm that found it, and the iterations spent."""
    if algorithm == "projected_gradient":
        solution = solve_projected_gradient(form, tolerance, limit, project)
        return solution, algorithm, solution.iterations
    if algorithm != "dual_newton":
        closed = solve_unconstrained(form)
        if algorithm == "unconstrained" or (closed is not None and closed.relative_gap <= tolerance):
            return closed, "unconstrained", 0
    if algorithm == "dual_newton":
        return _newton(form, build, tolerance, limit, dtype)
    if not form.prefers_first_order():
        return _newton(form, build, tolerance, limit, dtype)
    if not form.overdetermined():
        direct = _newton(form, build, tolerance, limit, dtype, path=False)
        if direct[0].relative_gap <= tolerance:
            return direct
    steps = DEFAULT_ITERATIONS["projected_gradient"] if limit == DEFAULT_ITERATIONS["auto"] else limit
    first_order = solve_projected_gradient(form, tolerance, steps, project)
    if first_order.relative_gap > tolerance:
        on_path = _newton(form, build, tolerance, limit, dtype)
        if on_path[0].relative_gap < first_order.relative_gap:
            return on_path
    return first_order, "projected_gradient", first_order.iterations


def _newton(
    form: StandardForm,
    build: Callable[[torch.dtype], StandardForm],
    tolerance: float,
    limit: int,
    dtype: torch.dtype,
    path: bool = True,
) -> tuple[Solution, str, int]:
    start, spent = None, 0
    if dtype is torch.float32:
        rough = solve_dual_newton(build(torch.float32), max(tolerance, 1e-4), limit, path=path)
        start, spent = rough.dual.double(), rough.iterations
    solution = solve_dual_newton(form, tolerance, limit - spent, start, path=path)
    return solution, "dual_newton", spent + solution.iterations


def _verdict(solution: Solution, tolerance: float, spent: int, limit: int) -> tuple[Status, str]:
    if solution.relative_gap <= tolerance:
        return Status.CONVERGED, f"relative duality gap {solution.relative_gap:.1e}"
    remedy = "raise prior_strength (or mu), or loosen tolerance"
    if spent >= limit:
        return Status.MAX_ITERATIONS, f"{solution.message}: raise max_iterations (now {limit}), {remedy}."
    return Status.STALLED, f"{solution.message}: rounding prevents more; {remedy}."


def _check_settings(
    mu: float | None,
    prior_strength: float,
    tolerance: float,
    max_iterations: int | None,
    algorithm: str,
    dtype: torch.dtype,
    projection: str,
) -> None:
    if mu is not None and not 0 <= mu < float("inf"):
        raise ConfigError(f"mu is {mu}: give a finite number >= 0, or None.")
    if not 0 < prior_strength < float("inf"):
        raise ConfigError(f"prior_strength is {prior_strength}: give a finite number > 0 (default 1e-8).")
    if not 0 < tolerance < 1:
        raise ConfigError(f"tolerance is {tolerance}: give a number between 0 and 1 (default 1e-8).")
    if max_iterations is not None and max_iterations < 1:
        raise ConfigError(f"max_iterations is {max_iterations}: give at least 1, or None.")
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"algorithm is '{algorithm}': accepted are {', '.join(ALGORITHMS)}.")
    if dtype not in (torch.float64, torch.float32):
        raise ConfigError(f"dtype is {dtype}: accepted are torch.float64 and torch.float32.")
    if projection not in PROJECTIONS:
        raise ConfigError(f"projection is '{projection}': accepted are {', '.join(PROJECTIONS)}.")
    if projection != "eigh" and algorithm != "projected_gradient":
        raise ConfigError(
            f"projection='{projection}' needs algorithm='projected_gradient' (got '{algorithm}'): the Newton method "
            "uses the eigenvectors."
        )
    if dtype is torch.float32 and algorithm == "projected_gradient":
        raise ConfigError("dtype=torch.float32 is for algorithm 'auto' or 'dual_newton', whose answer is then refined.")


@contextmanager
def _no_tf32(measurements: Measurements) -> Iterator[None]:
    """Full float32 products on CUDA for the time of a fit."""
    if getattr(measurements, "device", torch.device("cpu")).type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
