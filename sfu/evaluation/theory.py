r"""The paper's bounds on a Newton step with every constant, beside what the retained data show of it.

With H the estimated Hessian, :math:`M = (H + \rho R) / c` what the step inverted, q = V_f / V_r and the right-hand side
:math:`b = g_f - (V / V_f) g`, the step is :math:`v = q M^{-1} b`.

**Lemma 1** says :math:`\|H - H_r\|_F \le 2 \epsilon \sqrt D / (2 + D)` if the changes of forget and retained objective
under perturbations :math:`d \sim N(0, I)` differ by at most epsilon beyond their gradients. With d = sigma z, epsilon
is divided by sigma^2. Here it is the largest :math:`|\tfrac12 z^T (H_f - H_r) z|` of a thousand drawn z: what the
lemma needs for small sigma, and for the quadratic loss exactly. The lemma is the fit to the envelopes +epsilon and
-epsilon, one at a time, and nothing says that the fit to a difference between them lies between the two. What follows
is weaker: :math:`E[(\tfrac12 z^T A z)^2] = \tfrac14 (2 \|A\|_F^2 + tr(A)^2) \le \epsilon^2`, so
:math:`\|H_f - H_r\|_F \le \sqrt2\, \epsilon`.

**Theorem 1** bounds the retained gradient after the step by the change of curvature along it,
:math:`\gamma r^3 (q G / \|H\|)^2`, with r the largest norm of a retained row and G a bound on the forget gradient. It
has :math:`1 / \|H\|` where :math:`\|H^{-1}\| = 1 / \lambda_{min}` is needed, and leaves out that H is not
:math:`H_r`.

**The residual identity** has both. By Taylor's theorem the retained gradient after the step is

.. math:: \nabla J_r(w^* + v) = q\, (H_r M^{-1} - I)\, b + e, \qquad
          |e| \le \tfrac\gamma2 \sum_i s_i |V a_i|^2 |a_i|

with e = 0 for the quadratic loss (gamma = 0).

**Noise.** Gaussian noise of standard deviation sigma on the parameters hides a shift s from whoever knows everything
but the noise with the (epsilon, delta) of :mod:`sfu.unlearning.gaussian_mechanism`, x = s / sigma. The shift is that
from Retrained, measured, or at most the retained gradient over l2. It holds for this request and these data, and is no
guarantee for others.

Shapes: B blocks of side K, C classes, E = D (+ 1 with bias), P perturbations.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sfu.heads.base import Head
from sfu.heads.linear import LinearHead
from sfu.heads.recipe import OPTIMUM
from sfu.losses.rows import Rows
from sfu.operators.build import build_operator
from sfu.operators.explicit import ExplicitOperator
from sfu.operators.structure import Structure
from sfu.request import ForgetRequest, RetainedSet
from sfu.unlearning.gaussian_mechanism import largest_shift, smallest_epsilon
from sfu.unlearning.step_curvature import StepCurvature

PERTURBATIONS = 1000
DELTA = 1e-4
_ROUNDING = 1e-8


def theory_of(
    curvature: StepCurvature, request: ForgetRequest, retained: RetainedSet, retrained: Head | None, *, seed: int
) -> dict[str, Any] | None:
    """Return bounds and measurements of a Newton step from ``request``; ``None`` where the theory has no such head.

    It is for linear heads at their optimum.

    Args:
        curvature: What the step inverted, and where it ended.
        request: The request that the step served.
        retained: The retained rows.
        retrained: The head trained on them, if it is known.
        seed: Of the perturbations.
    """
    request = request.in_float64().at_retained_l2()
    if not isinstance(request.head, LinearHead) or request.head.recipe.trained != OPTIMUM:
        return None
    rows = request.head.rows(retained.features_RD, retained.labels_R, retained.weights_R, cache=True)
    blocks_BKK, forget_BKK = (
        _blocks(request, part, curvature.estimate_BKK) for part in (rows, request.data(cache=True))
    )
    return {
        "lemma_1": _lemma_1(curvature.estimate_BKK, blocks_BKK, forget_BKK, request.head, seed),
        "theorem_1": _theorem_1(curvature, request, rows),
        "residual": _residual(curvature, request, rows),
        "noise": _noise(curvature, request, rows, retrained),
    }


def _blocks(request: ForgetRequest, rows: Rows, like_BKK: Tensor) -> Tensor:
    """Return the Hessian of some rows at the head, held as the estimate is."""
    head = request.head
    structure = Structure(ExplicitOperator(like_BKK, head.n_classes, head.regularized_E).structure)
    operator = build_operator(head.objective(), rows, head.parameters_CE, structure)
    assert isinstance(operator, ExplicitOperator)
    return operator.blocks_BKK


def _flags(bound: float, measured: float, trivial: float, *, applies: bool = True) -> dict[str, bool | None]:
    """Say whether a bound is above what is known without it, and whether the measurement exceeds it."""
    return {
        "not_applicable": not applies,
        "vacuous": bound > trivial if applies else None,
        "violated": measured > bound * (1 + _ROUNDING) if applies else None,
    }


def _lemma_1(
    estimate_BKK: Tensor, retained_BKK: Tensor, forget_BKK: Tensor, head: LinearHead, seed: int
) -> dict[str, Any]:
    """Return the lemma's figures for one block of the Hessian: those of the block with the largest error."""
    side = estimate_BKK.shape[-1]
    error_B = (estimate_BKK - retained_BKK).norm(dim=(1, 2))
    block = int(error_B.argmax())
    difference_KK = forget_BKK[block] - retained_BKK[block]
    drawn_PK = torch.randn(PERTURBATIONS, side, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    drawn_PK = drawn_PK.to(difference_KK)
    epsilon = float((0.5 * ((drawn_PK @ difference_KK) * drawn_PK).sum(1)).abs().max())
    bound, measured = 2 * epsilon * math.sqrt(side) / (2 + side), float(error_B[block])
    data_KK = retained_BKK[block] - torch.diag(head.objective().ridge_E.repeat(side // head.regularized_E.shape[0]))
    trivial = float(data_KK.norm())  # the error of l2 R, which is known without any data
    return {
        "bound": bound, "measured": measured, "epsilon": epsilon, "perturbations": PERTURBATIONS, "dimension": side,
        "forget_hessian_error": float(difference_KK.norm()), "bound_corrected": math.sqrt(2) * epsilon,
        "retained_hessian_norm": float(retained_BKK[block].norm()), "trivial": trivial,
        **_flags(bound, measured, trivial),
    }  # fmt: skip


def _theorem_1(curvature: StepCurvature, request: ForgetRequest, rows: Rows) -> dict[str, Any]:
    head, constants, ratio = request.head, request.head.loss.constants, request.step_ratio
    gamma, slopes = constants.curvature_lipschitz, math.sqrt(head.n_classes) if head.loss.separable else 1.0
    row_norm = max(float(chunk.squares_of_rows().max()) for chunk in rows.chunks()) ** 0.5
    forget_norm = float(request.design_FE.norm(dim=1).max())
    gradient_bound = constants.gradient_bound * slopes * forget_norm + head.l2 * float(head.parameters_CE.norm())
    eigenvalues = curvature.eigenvalues(head.regularized_E)
    largest, smallest = float(eigenvalues.abs().max()), float(eigenvalues.min())
    applies = 0 < gamma < math.inf and math.isfinite(gradient_bound)
    bound, sharper = (
        (gamma * row_norm**3 * (ratio * gradient_bound / one) ** 2 if one > 0 else math.inf) if applies else 0.0
        for one in (largest, smallest)
    )
    objective = head.objective_of(rows.weight)
    measured = float(objective.gradient(rows, curvature.end_CE.to(head.parameters_CE)).norm())
    trivial = float(objective.gradient(rows, head.parameters_CE).norm())
    return {
        "bound": bound, "bound_smallest_eigenvalue": sharper, "measured": measured, "trivial": trivial,
        "gamma": gamma, "gradient_bound": gradient_bound, "row_norm": row_norm, "step_ratio": ratio,
        "hessian_norm": largest, "smallest_eigenvalue": smallest,
        **_flags(bound, measured, trivial, applies=applies),
    }  # fmt: skip


def _residual(curvature: StepCurvature, request: ForgetRequest, rows: Rows) -> dict[str, Any]:
    head, ratio, right_CE = request.head, request.step_ratio, request.newton_gradient()
    objective = head.objective_of(rows.weight)
    hessian = build_operator(objective, rows, head.parameters_CE, Structure.products)
    step_CE = curvature.inverse(right_CE, head.regularized_E)
    predicted_CE = ratio * (hessian.matmul(step_CE) - right_CE)
    end_CE = curvature.end_CE.to(head.parameters_CE)
    measured_CE = objective.gradient(rows, end_CE)
    move_CE, gamma = end_CE - head.parameters_CE, head.loss.constants.curvature_lipschitz
    change = 0.0
    for chunk in rows.chunks():
        squares_B = chunk.push(move_CE).square().sum(1)
        change += float(chunk.share_B @ (squares_B * chunk.squares_of_rows().to(squares_B).sqrt()))
    remainder = 0.5 * gamma * change if gamma > 0 else 0.0
    difference, trivial = float((measured_CE - predicted_CE).norm()), ratio * float(right_CE.norm())
    bound = float(predicted_CE.norm()) + remainder
    return {
        "predicted": float(predicted_CE.norm()), "measured": float(measured_CE.norm()), "difference": difference,
        "remainder_bound": remainder, "bound": bound, "trivial": trivial, "not_applicable": math.isinf(gamma),
        "vacuous": bound > trivial, "violated": difference > remainder + _ROUNDING * (1 + trivial),
    }  # fmt: skip


def _noise(curvature: StepCurvature, request: ForgetRequest, rows: Rows, retrained: Head | None) -> dict[str, Any]:
    """Return what noise of the row's sigma hides, and the sigma that would give an epsilon of 1."""
    head, sigma, largest = request.head, curvature.noise_sigma, largest_shift(1.0, DELTA)
    end_CE = curvature.end_CE.to(head.parameters_CE)
    left = float(head.objective_of(rows.weight).gradient(rows, end_CE).norm())
    convex = head.l2 > 0 and bool((head.regularized_E > 0).all())
    shifts = {
        "": None if retrained is None else float((end_CE - retrained.parameters_CE.to(end_CE)).norm()),
        "_bound": left / head.l2 if convex else None,
    }
    found: dict[str, Any] = {"sigma": sigma, "delta": DELTA}
    for suffix, shift in shifts.items():
        found |= {
            f"shift{suffix}": shift,
            f"epsilon{suffix}": smallest_epsilon(shift / sigma, DELTA) if shift is not None and sigma > 0 else None,
            f"sigma_for_epsilon_1{suffix}": None if shift is None else shift / largest,
        }
    return found
