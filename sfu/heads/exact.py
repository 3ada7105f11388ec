"""Exact training: to the optimum of any loss, with the gradient norm as certificate.

Shapes: C classes, E = D (+ 1 with bias), or ``[1, p]`` parameters that the classes share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sfu.heads.newton_cg import minimize
from sfu.heads.normal_equations import Checkpoint, solve_normal_equations
from sfu.heads.optimum import Optimum, advice_to_centre, not_reached
from sfu.lazy import torch
from sfu.losses.base import Layout
from sfu.losses.objective import Objective
from sfu.losses.rows import Rows
from sfu.operators.explicit import solve_positive_definite
from sfu.operators.plan import plan_structure
from sfu.operators.structure import Structure

if TYPE_CHECKING:
    from torch import Tensor


def train_exact(
    objective: Objective,
    rows: Rows,
    start_CE: Tensor,
    *,
    tolerance: float,
    max_iterations: int,
    warm: bool = False,
    progress: Callable[[int, int], None] | None = None,
    checkpoint: Checkpoint | None = None,
) -> Optimum:
    """Return the minimiser of the mean objective of ``rows``.

    Where one E x E block serves all classes (quadratic loss), one Newton step from zero reaches the optimum; it is
    solved by Cholesky, or by products if the classes share their parameters. For other losses,
    :func:`sfu.heads.newton_cg.minimize` takes as many steps as it needs.

    ``warm`` says that the start is near the optimum (of such losses). Training by products saves its progress in
    ``checkpoint``.

    Raises:
        SingularHessianError: l2 is 0 (or too small) and the Gram matrix of a quadratic loss is singular.
        SolverError: ``tolerance`` was not reached.
    """
    limits: dict[str, Any] = {"tolerance": tolerance, "max_iterations": max_iterations, "progress": progress}
    if objective.loss.layout is Layout.shared and rows.shared:
        return solve_normal_equations(objective, rows, start_CE, checkpoint=checkpoint, **limits)
    if objective.loss.layout is Layout.shared:
        plan = plan_structure(Layout.shared, start_CE.shape[0], rows.width, rows.count, rows.device)
        if rows.everywhere(plan.structure is Structure.shared):
            return _one_step(objective, rows, start_CE, tolerance)
    return minimize(objective, rows, start_CE, warm=warm, **limits)


def _one_step(objective: Objective, rows: Rows, start_CE: Tensor, tolerance: float) -> Optimum:
    """Take the one Newton step from zero that a quadratic objective needs."""
    hessian_EE = objective.data_hessian(rows, start_CE, Layout.shared).to(start_CE) + torch.diag(objective.ridge_E)
    what = f"the Gram matrix of the {rows.count} training rows plus head.l2={objective.l2:g}"

    def remedy() -> str:
        raised = "Set head.l2 above 0" if objective.l2 == 0 else "Raise head.l2"
        small = "(1e-6 is small for rows of norm 1), or remove constant and duplicate feature columns."
        return advice_to_centre(rows) or f"{raised} {small}"

    parameters_CE = -solve_positive_definite(hessian_EE, objective.gradient(rows, start_CE), what, remedy)
    gradient_CE = objective.gradient(rows, parameters_CE)
    if not float(gradient_CE.norm()) <= tolerance:  # remove the rounding of the Cholesky factor
        parameters_CE = parameters_CE - solve_positive_definite(hessian_EE, gradient_CE, what, remedy)
        gradient_CE = objective.gradient(rows, parameters_CE)
    if not float(gradient_CE.norm()) <= tolerance:
        raise not_reached(float(gradient_CE.norm()), tolerance, "and a step of refinement gains nothing", rows=rows)
    return Optimum(parameters_CE, gradient_CE)
