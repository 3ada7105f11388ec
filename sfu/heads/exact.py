"""Exact training of a linear head under any loss: to the optimum, with its gradient norm as certificate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sfu.errors import SingularHessianError, SolverError
from sfu.heads.newton_cg import Optimum, minimize, too_slow
from sfu.heads.normal_equations import Checkpoint, solve_normal_equations
from sfu.losses.base import Layout
from sfu.losses.objective import Objective
from sfu.losses.rows import Rows
from sfu.operators.plan import plan_structure
from sfu.settings import Structure

Remember = Callable[[Callable[[], Tensor]], Tensor]
"""Returns a tensor that is known already, or else what its argument makes."""


def solve_positive_definite(matrix_EE: Tensor, right_CE: Tensor, what: str) -> Tensor:
    """Solve ``X M = B`` for symmetric positive definite M by Cholesky, ``[C, E]``.

    Raises:
        SingularHessianError: M is singular or indefinite to working precision (its smallest eigenvalue, found by
            inverse iteration, is below ``8 E eps`` times its norm); ``what`` names it in the message.
    """
    factor, info = torch.linalg.cholesky_ex(matrix_EE)
    threshold = 8 * matrix_EE.shape[0] * torch.finfo(matrix_EE.dtype).eps * float(matrix_EE.norm())
    if int(info) != 0 or not _smallest_eigenvalue(factor) > threshold:
        raise SingularHessianError(
            f"{what} is singular to {matrix_EE.dtype} precision, so the optimum is not unique. Set head.l2 above 0 "
            "(1e-6 is small for rows of norm 1), or remove constant and duplicate feature columns."
        )
    return torch.cholesky_solve(right_CE.T, factor).T


def _smallest_eigenvalue(factor_EE: Tensor) -> float:
    """Of the matrix with this Cholesky factor, by a few inverse iterations from a fixed random vector."""
    start = torch.randn(factor_EE.shape[0], 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    vector = start.to(factor_EE)
    for _ in range(4):
        vector = torch.cholesky_solve(vector / vector.norm(), factor_EE)
    return 1.0 / float(vector.norm())


def train_exact(
    objective: Objective,
    rows: Rows,
    n_classes: int,
    *,
    tolerance: float,
    max_iterations: int,
    progress: Callable[[int, int], None] | None = None,
    checkpoint: Checkpoint | None = None,
    gram: Remember | None = None,
) -> Optimum:
    """The minimiser of the mean objective of ``rows``, from zero weights.

    ``gram`` may know the Gram matrix of the rows, which does not depend on l2, from another training.

    Where one E x E block serves all classes (quadratic loss), Newton's first step is the optimum and is solved by
    Cholesky, or by products where the classes share their parameters; elsewhere
    :func:`sfu.heads.newton_cg.minimize` takes as many as it needs.

    Raises:
        SingularHessianError: l2 is 0 (or too small) and the Gram matrix of a quadratic loss is singular.
        SolverError: ``tolerance`` was not reached.
    """
    start_CE = rows.parameters(n_classes)
    if objective.loss.layout is Layout.shared and rows.shared:
        return solve_normal_equations(
            objective, rows, start_CE, tolerance=tolerance, max_iterations=max_iterations, progress=progress,
            checkpoint=checkpoint,
        )  # fmt: skip
    if objective.loss.layout is Layout.shared:
        plan = plan_structure(Layout.shared, n_classes, rows.width, rows.count, rows.device)
        if plan.structure is Structure.shared:
            return _one_step(objective, rows, start_CE, tolerance, gram or (lambda make: make()))
    return minimize(
        objective, rows, start_CE, tolerance=tolerance, max_iterations=max_iterations, progress=progress
    )  # fmt: skip


def _one_step(objective: Objective, rows: Rows, start_CE: Tensor, tolerance: float, gram: Remember) -> Optimum:
    """Newton's step from zero, which a quadratic objective needs once."""
    gram_EE = gram(lambda: objective.data_hessian(rows, start_CE, Layout.shared)).to(start_CE)
    hessian_EE = gram_EE + torch.diag(objective.ridge_E)
    what = f"the Gram matrix of the {rows.count} training rows plus head.l2={objective.l2:g}"
    parameters_CE = -solve_positive_definite(hessian_EE, objective.gradient(rows, start_CE), what)
    gradient_CE = objective.gradient(rows, parameters_CE)
    if not float(gradient_CE.norm()) <= tolerance:  # refine: what a Cholesky factor left to rounding
        parameters_CE = parameters_CE - solve_positive_definite(hessian_EE, gradient_CE, what)
        gradient_CE = objective.gradient(rows, parameters_CE)
    if not float(gradient_CE.norm()) <= tolerance:
        raise SolverError(too_slow(float(gradient_CE.norm()), tolerance, "and a step of refinement gains nothing"))
    return Optimum(parameters_CE, gradient_CE, 1, 3)
