r"""Certified removal: Newton removal whose remaining gradient is bounded and paid from a budget of training noise.

Training adds :math:`\langle b, W \rangle` with Gaussian b of standard deviation sigma to the *sum* objective
:math:`F_S = V_S J_S` (``head.objective_noise``). One batch of removals moves the head by :math:`v = H^{-1} g`, with H
the Hessian of the remaining sum objective and g the gradient of the removed examples. The gradient of the remaining
objective that is left is, by Taylor's theorem, at most (:func:`residual_bounds`)

.. math:: \beta = \gamma\, \|X\|_2\, r\, \|v\|\, \|X v\| \qquad \text{(data-dependent)}

with X the remaining rows, r their largest norm and gamma the Lipschitz constant of the loss's second derivative. Bounds
of successive batches add up, beginning with the gradient that training left, and so does a bound on rounding
(:func:`sfu.heads.optimum.rounding_bound`). While the sum is at most sigma times the largest shift that Gaussian noise
hides (:func:`sfu.unlearning.gaussian_mechanism.largest_shift`), the head is :math:`(\epsilon,
\delta)`-indistinguishable from one retrained without the removed examples, to anyone who sees its weights but not b. A
batch that would exceed the budget is refused: the head must be retrained. (Theorem 3 has :math:`\epsilon / \sqrt{2
\log(1.5 / \delta)}` in place of that shift, which is smaller for small epsilon and no bound for large: at delta 1e-4
from 8.4 on.)

``bound=measured`` pays the residual itself: its norm is measured at the new head, which includes all removals so far,
so nothing is added up. The theorems only ask that the residual of every released head is within the budget, and that
holds for each way of paying, because all other heads are refused. Both ways assume that the residual, which depends on
b through the head, shifts b as an independent one would, and that nobody chooses removals by looking at the weights.

The method needs the retained data, because H and X are theirs at every step. A summary stored with the head is only
valid for the first batch, and the forget set alone gives no bound.

Source: Guo, Goldstein, Hannun and van der Maaten, Certified data removal from machine learning models, 2019: theorems 1
to 4, corollaries 1 and 2, algorithms 1 and 2. Ours: the sum over classes, the factor r in place of rows of norm at most
1, the norms of the removed rows in the worst case, the exact Gaussian mechanism, and counting what training, the linear
solves and rounding leave.

Shapes: C classes, E = D features, R retained rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from sfu.errors import ConfigError
from sfu.heads.base import Head
from sfu.heads.optimum import rounding_bound
from sfu.lazy import torch
from sfu.losses.base import Loss, make_loss
from sfu.losses.gram import add_gram
from sfu.losses.rows import Rows
from sfu.operators.build import build_operator
from sfu.operators.plan import plan_structure
from sfu.request import Access, ForgetRequest, MethodContext, Retained
from sfu.schema import setting
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.batches import check_batches, unlearn_in_batches
from sfu.unlearning.gaussian_mechanism import largest_shift, smallest_epsilon
from sfu.unlearning.result import UnlearningResult
from sfu.unlearning.settings import RunSettings

if TYPE_CHECKING:
    from torch import Tensor

BOUNDS = ("sharp", "data_dependent", "worst_case")
PAYMENTS = (*BOUNDS, "measured")


@dataclass(frozen=True)
class CertifiedRemoval(UnlearningMethod, name="certified_removal"):
    """Remove batch by batch until the budget is spent."""

    epsilon: float = setting(1.0, "Epsilon of the guarantee.", above=0)
    delta: float = setting(1e-4, "Delta of the guarantee.", above=0, below=1)
    bound: str = setting("data_dependent", "What is paid: an accumulated bound, or the residual.", choices=PAYMENTS)
    batches: int = setting(1, "Number of parts, removed one after another.", at_least=1)
    settings_used = ("newton",)
    access = Access.RETAINED

    @classmethod
    def from_config(cls, run: RunSettings, curvature: Any, settings: dict[str, Any]) -> Self:
        """Take ``newton.batches``, and check that training was perturbed, without a bias and under a smooth loss."""
        if not run.head.objective_noise > 0:
            raise ConfigError(
                "certified_removal needs head.objective_noise above 0, because the noise that training adds is its "
                "budget."
            )
        _check_head(make_loss(run.loss.name), run.head.bias, run.head.l2)
        if run.loss.class_weights == "balanced":
            raise ConfigError(
                "certified_removal does not work with loss.class_weights=balanced: the weights are counted from the "
                "removed examples, too, so they change with every removal. Give numbers."
            )
        if run.dtype != "float64":
            raise ConfigError(
                f"certified_removal: dtype={run.dtype} would make rounding count as a residual. Set dtype=float64."
            )
        return super().from_config(run, curvature, {"batches": run.newton.batches, **settings})

    def check(self, n_forget: int) -> None:
        check_batches(self.batches, n_forget)

    def budget(self, noise_std: float) -> float:
        """Return the largest gradient residual that the noise hides."""
        return noise_std * largest_shift(self.epsilon, self.delta)

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        self.check(request.n_forget)
        certificate = request.head.certificate
        if certificate is None or certificate.residual_bound is None:
            raise ConfigError(
                "certified_removal needs a head that was trained with head.objective_noise above 0 and changed only by "
                "certified removal."
            )
        _check_head(request.head.loss, request.head.bias, request.head.l2)
        if request.head.parameters_CE.dtype != torch.float64:
            raise ConfigError(
                f"certified_removal needs a head in float64, not {request.head.parameters_CE.dtype}, because rounding "
                "would count as a residual. Train with dtype=float64."
            )
        result = unlearn_in_batches(self._remove, request, context, retained, self.batches)
        details, several = result.details, "es" if self.batches > 1 else ""
        done = details.get("batches_applied", int(result.applied))
        spent = (
            f"epsilon {details['epsilon_spent']:.2g} of {self.epsilon:g} (delta {self.delta:g}) spent, {done} of "
            f"{self.batches} batch{several}"
        )
        known = "nothing is certified to anyone who knows seed_for.objective, the seed of b"
        notes = [spent, result.note, known if certificate.seeded else None]
        return replace(result, note="; ".join(note for note in notes if note))

    def _remove(self, request: ForgetRequest, context: MethodContext, retained: Retained) -> UnlearningResult:
        """Remove one batch, if the budget allows it."""
        head = request.head
        certificate = head.certificate
        assert certificate is not None
        assert certificate.residual_bound is not None
        rows = request.retained_rows(retained, user=self.method_name)
        plan = plan_structure(head.layout, head.n_classes, rows.width, rows.count, rows.device)
        operator = build_operator(head.objective(), rows, head.parameters_CE, plan.structure)
        gradient_CE = request.forget_gradient()
        solution = operator.solve(gradient_CE)
        move_CE = request.step_ratio * solution.value_CE
        left = request.unlearned_head(head.parameters_CE + move_CE)
        bounds = residual_bounds(request, rows, move_CE, solution.residual)
        measured, rounding = gradient_norm(left, rows), rounding_bound(left, rows)
        before = certificate.residual_bound
        if self.bound == "measured":
            after = measured + rounding
        else:  # rounding: of the gradient removed, of the Hessian and its product with the move, of what is left
            rounding = rounding_bound(head, request.data()) + rounding_bound(head, rows) + 2 * rounding
            unsolved = solution.residual * request.weight * float(gradient_CE.norm())
            after = before + bounds[self.bound] + unsolved + rounding
        budget = self.budget(certificate.noise_std)
        refused = after > budget
        spent = before if refused else after
        details: dict[str, Any] = {
            "epsilon": self.epsilon, "delta": self.delta, "budget": budget, "budget_spent": spent,
            "epsilon_spent": smallest_epsilon(spent / certificate.noise_std, self.delta), "last_cost": after - before,
            **{f"bound_{name}": value for name, value in bounds.items()},
        }  # fmt: skip
        if refused:
            note = (
                f"refused: the removal would exceed the budget of {budget:.3g} for "
                f"epsilon={self.epsilon:g}, delta={self.delta:g}; retrain"
            )
            return UnlearningResult(head, applied=False, details=details, note=note)
        left = replace(left, certificate=replace(certificate, residual_bound=after))
        return UnlearningResult(left, details=details | {"residual": measured})


def residual_bounds(request: ForgetRequest, rows: Rows, move_CE: Tensor, unsolved: float = 0.0) -> dict[str, float]:
    r"""Return bounds on the gradient norm that a Newton step leaves in the sum objective of ``rows``.

    The residual is :math:`\sum_i s_i \int_0^1 (M_i(t) - M_i(0)) z_i\, dt \otimes a_i` with :math:`z_i = V a_i` the
    change of the outputs and s_i the row weights. Since :math:`\|M_i(t) - M_i(0)\| \le \gamma t \|z_i\|`:

    - ``sharp``: :math:`\tfrac\gamma2 \|X\|_2 (\sum_i s_i \|z_i\|^4)^{1/2}` (with the integral);
    - ``data_dependent``: :math:`\gamma \|X\|_2\, r\, \|V\|\, (\sum_i s_i \|z_i\|^2)^{1/2}` (corollary 2), by
      :math:`\|z_i\| \le r \|V\|`;
    - ``worst_case``: :math:`\gamma V_r r^3 \|g\|^2 / (l_2 V_r)^2` with :math:`\|g\| \le V_f (C r_f + l_2 \|W\|)`
      (theorem 4), which uses only the number of removed examples and their largest norm r_f. A step of relative
      residual ``unsolved`` is longer by at most that share.

    X are the rows scaled by the roots of their weights. If the loss is separate for each class, the slopes of all
    classes add up, so C is multiplied by the root of their number.
    """
    head, constants = request.head, request.head.loss.constants
    gamma, weight = constants.curvature_lipschitz, rows.weight
    square, fourth, largest = 0.0, 0.0, 0.0
    gram_EE = move_CE.new_zeros(rows.width, rows.width)
    for chunk in rows.linear_chunks():
        design_BE, share_B = chunk.design_BE, chunk.share_B
        change_B = chunk.push(move_CE).square().sum(1)
        square += weight * float(share_B @ change_B)
        fourth += weight * float(share_B @ change_B.square())
        largest = max(largest, float(design_BE.square().sum(1).max()))
        add_gram(gram_EE, design_BE, design_BE * share_B[:, None], alpha=weight)
    spectral, radius = float(torch.linalg.eigvalsh(gram_EE)[-1]) ** 0.5, largest**0.5
    classes = math.sqrt(head.n_classes) if head.loss.separable else 1.0
    removed = float(request.design_FE.norm(dim=1).max())
    largest_gradient = constants.gradient_bound * classes * removed + head.l2 * float(head.parameters_CE.norm())
    worst = ((1 + unsolved) * request.weight * largest_gradient / (head.l2 * weight)) ** 2
    return {
        "sharp": gamma / 2 * spectral * fourth**0.5,
        "data_dependent": gamma * spectral * radius * float(move_CE.norm()) * square**0.5,
        "worst_case": gamma * weight * radius**3 * worst if gamma > 0 else 0.0,
    }


def _check_head(loss: Loss, bias: bool, l2: float) -> None:
    """Raise ``ConfigError`` if no certificate is possible."""
    if math.isinf(loss.constants.curvature_lipschitz):
        raise ConfigError(
            f"certified_removal needs a loss with a Lipschitz second derivative, and loss={loss.name} has none. Use "
            "logistic, softmax or quadratic."
        )
    if bias:
        raise ConfigError(
            "certified_removal needs head.bias=false, because the objective must be strongly convex in every "
            "parameter. Append a constant feature instead."
        )
    if not l2 > 0:
        raise ConfigError("certified_removal needs head.l2 above 0.")


def gradient_norm(head: Head, rows: Rows) -> float:
    """Return the norm of the gradient of the rows' perturbed sum objective, which the accumulated bound bounds."""
    return rows.weight * float(head.objective_of(rows.weight).gradient(rows, head.parameters_CE).norm())
