"""The same fit by cvxpylayers and a conic solver: slow, differentiable, and independent of sfu's own solvers.

cvxpylayers is imported on first use and solves by SCS: its MOREAU backend drops the positive-semidefinite cone, and
gradients through its Clarabel backend disagree with finite differences on this problem. The gradient mode is ``dense``:
the default (``lsqr``) disagrees with finite differences too when the fit is under-determined.

Shapes: P perturbations, D features.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from sfu.curvature.psd_fit.problem import LossMeasurements, MatrixLike, Measurements, dense, symmetric_term
from sfu.curvature.psd_fit.solve import PsdFitResult, Status, fit_psd
from sfu.errors import ConfigError
from sfu.operators.spectral import eigh

LARGEST_DIMENSION = 64
ACCEPTED_GAP = 1e-3


def fit_psd_conic(
    measurements: Measurements,
    *,
    mu: float,
    lower_bound: MatrixLike = 0.0,
    prior: MatrixLike = 0.0,
    tolerance: float = 1e-9,
    iterations: int = 100_000,
) -> PsdFitResult:
    """Solve the problem of :func:`~sfu.curvature.psd_fit.fit_psd` with cvxpylayers.

    The value is differentiable with respect to ``target_P`` (losses) or ``cross_DD`` (gradients) when these require
    it. The gap is that to the certified minimum of ``fit_psd``: conic solvers stop by criteria of their own, which
    are absolute and mean little for small numbers. ``tolerance`` and ``iterations`` are those of SCS, and the
    measurements are on the CPU.

    Raises:
        ConfigError: D > 64, mu not positive, or cvxpylayers is not installed.
    """
    dimension = measurements.dimension
    if dimension > LARGEST_DIMENSION:
        raise ConfigError(
            f"D is {dimension}, and cvxpylayers is for D <= {LARGEST_DIMENSION}: a solve with gradients takes half a "
            "minute there and did not return in nine minutes at 128. Use fit_psd."
        )
    if not 0 < mu < float("inf"):
        raise ConfigError(f"mu is {mu}. cvxpylayers needs a finite mu > 0.")
    started = time.perf_counter()
    like = torch.empty(dimension, dtype=torch.float64)
    lower_DD = dense(symmetric_term("lower_bound", lower_bound, dimension), like)
    prior_DD = dense(symmetric_term("prior", prior, dimension), like)
    shifted_DD = _solve(measurements, lower_DD, prior_DD, mu, tolerance, iterations)
    value_DD = shifted_DD + lower_DD
    found_DD = value_DD.detach()
    objective = measurements.mean_square(found_DD).detach() + mu / 2 * (found_DD - prior_DD).square().sum()
    with torch.no_grad():
        least = fit_psd(measurements, lower_bound=lower_bound, prior=prior, mu=mu, tolerance=1e-10).objective
    gap = max(0.0, float(objective) - least) / max(abs(least), torch.finfo(torch.float64).tiny)
    return PsdFitResult(
        value_DD=value_DD,
        status=Status.CONVERGED if gap <= ACCEPTED_GAP else Status.STALLED,
        iterations=0,
        objective=float(objective),
        gap=gap,
        min_eigenvalue=float(torch.linalg.eigvalsh(shifted_DD.detach())[0]),
        mu=mu,
        seconds=time.perf_counter() - started,
        algorithm="cvxpylayers",
        message=f"the conic solver's objective is {gap:.1e} (relative) above the certified minimum",
    )


def _solve(
    measurements: Measurements, lower_DD: Tensor, prior_DD: Tensor, mu: float, tolerance: float, iterations: int
) -> Tensor:
    """Return X - L, differentiable with respect to the observations."""
    try:
        import cvxpy
        from cvxpylayers.torch import CvxpyLayer
    except ImportError as error:
        raise ConfigError(
            f"curvature.solver=cvxpylayers needs the package cvxpylayers ({error}), which sfu installs for Python 3.13 "
            "and older: its solver diffcp has no wheel for later ones. Use curvature.solver=auto, or `pip install "
            "cvxpylayers` with a compiler at hand."
        ) from error
    size = measurements.dimension
    shifted = cvxpy.Variable((size, size), PSD=True)
    value = shifted + lower_DD.numpy()
    anchor = mu / 2 * cvxpy.sum_squares(value - prior_DD.numpy())
    if isinstance(measurements, LossMeasurements):
        observed = measurements.target_P.double()
        delta_PD = measurements.delta_PD.detach().double()
        rows = (delta_PD[:, :, None] * delta_PD[:, None, :]).flatten(1) / 2
        parameter = cvxpy.Parameter(observed.shape[0])
        fitted = rows.numpy() @ cvxpy.vec(value, order="C")
        data = cvxpy.sum_squares(fitted - parameter) / observed.shape[0]
    else:
        observed = measurements.cross_DD.double()
        square_D, vector_DD = eigh(measurements.gram_DD.detach().double())
        root_DD = (vector_DD * square_D.clamp(min=0).sqrt()) @ vector_DD.T
        parameter = cvxpy.Parameter((size, size))
        data = cvxpy.sum_squares(root_DD.numpy() @ value) - 2 * cvxpy.sum(cvxpy.multiply(parameter, value))
    problem = cvxpy.Problem(cvxpy.Minimize(data + anchor))
    solver_args: dict[str, Any] = {"solve_method": "SCS", "eps": tolerance, "max_iters": iterations}
    if observed.requires_grad:
        solver_args["mode"] = "dense"
    layer = CvxpyLayer(problem, parameters=[parameter], variables=[shifted], solver_args=solver_args)
    (solution_DD,) = layer(observed)
    return (solution_DD + solution_DD.T) / 2
