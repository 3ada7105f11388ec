r"""Certified removal: Newton removal with a bound on what is left, paid from a budget that training noise provides.

Training adds :math:`\langle b, W \rangle` with Gaussian b of standard deviation sigma to the *sum* objective
:math:`F_S = V_S J_S` (``head.objective_noise``). One batch of removals moves the head by :math:`v = H^{-1} g`, with H
the Hessian of the remaining sum objective and g the gradient of the removed examples. What is left of the gradient of
the remaining objective is, by Taylor's theorem, at most (:func:`residual_bounds`)

.. math:: \beta = \gamma\, \|X\|_2\, r\, \|v\|\, \|X v\| \qquad \text{(data-dependent)}

with X the remaining rows, r their largest norm and gamma the Lipschitz constant of the loss's second derivative. Bounds
of successive batches add up, beginning with the gradient that training left. While the sum is at most

.. math:: \text{budget} = \sigma \epsilon / \sqrt{2 \log(1.5 / \delta)}

the head is :math:`(\epsilon, \delta)`-indistinguishable from one retrained without the removed examples, to whoever
sees its weights and not b. A batch that would exceed the budget is refused: the data must be retrained on.

It needs the retained data: H and X are theirs at every step. A summary kept with the head is exact for the first batch
alone, and no bound can be had from the forget set.

Source: Guo, Goldstein, Hannun and van der Maaten, Certified data removal from machine learning models, 2019: theorems 1
to 4, corollaries 1 and 2, algorithms 1 and 2. Ours: the sum over classes, the factor r in place of rows of norm at most
1, and counting what training and the linear solves leave.

Shapes: C classes, E = D features, R retained rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from sfu.checks import above, at_least, between, one_of
from sfu.curvature.operators import build_operator, plan_structure
from sfu.errors import ConfigError, SourceFreeError
from sfu.heads.base import Head
from sfu.losses import Loss, Rows, make_loss
from sfu.unlearning.method import Access, RetainedSet, Tools, Unlearned, UnlearningMethod
from sfu.unlearning.request import ForgetRequest
from sfu.unlearning.sequence import unlearn_in_batches

if TYPE_CHECKING:
    from sfu.settings import RunConfig

BOUNDS = ("sharp", "data_dependent", "worst_case")


@dataclass(frozen=True)
class CertifiedRemoval(UnlearningMethod):
    """Removes batch by batch until the budget is spent.

    Attributes:
        epsilon: Of the guarantee.
        delta: Of the guarantee.
        bound: Which of :data:`BOUNDS` is paid from the budget.
        batches: Remove in so many parts, one after another.
    """

    epsilon: float = 1.0
    delta: float = 1e-4
    bound: str = "data_dependent"
    batches: int = 1

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: Naming the key, the value and what is accepted.
        """
        above("certified_removal: epsilon", self.epsilon, 0.0)
        between("certified_removal: delta", self.delta, 0.0, 1.0)
        one_of("certified_removal: bound", self.bound, list(BOUNDS))
        at_least("certified_removal: batches", self.batches, 1)

    @property
    def access(self) -> Access:
        """Hessian and bound are those of the retained data."""
        return Access.RETAINED

    @classmethod
    def from_config(cls, run: RunConfig, curvature: Any, settings: dict[str, Any]) -> Self:
        """Takes ``newton.batches``; training must have been perturbed, without a bias, under a smooth enough loss."""
        if not run.head.objective_noise > 0:
            raise ConfigError(
                "certified_removal needs head.objective_noise above 0: the budget is noise that training added."
            )
        _check_head(make_loss(run.loss.name), run.head.bias, run.head.l2)
        one_of("certified_removal: dtype", run.dtype, ["float64"])  # rounding would count as a residual
        return super().from_config(run, curvature, {"batches": run.newton.batches, **settings})

    def check(self, n_forget: int) -> None:
        """Refuse more batches than rows.

        Raises:
            ConfigError: ``newton.batches`` is above ``n_forget``.
        """
        if self.batches > n_forget:
            raise ConfigError(f"newton.batches={self.batches} but there are only {n_forget} rows to forget.")

    def budget(self, noise_std: float) -> float:
        """The largest gradient residual that the noise hides: theorem 3 solved for it."""
        return noise_std * self.epsilon / math.sqrt(2 * math.log(1.5 / self.delta))

    def unlearn(self, request: ForgetRequest, tools: Tools, retained: RetainedSet | None = None) -> Unlearned:
        """Remove as many batches as the budget allows.

        Raises:
            SourceFreeError: No retained data were given.
            ConfigError: The head carries no certificate, or its loss, bias or l2 allow none.
        """
        if retained is None:
            raise SourceFreeError("certified_removal needs the retained data.")
        self.check(request.n_forget)
        certificate = request.head.certificate
        if certificate is None or certificate.residual_bound is None:
            raise ConfigError(
                "certified_removal needs a head trained with head.objective_noise above 0 and moved by certified "
                "removal alone."
            )
        _check_head(request.head.loss, request.head.bias, request.head.l2)
        return unlearn_in_batches(self._remove, request, tools, retained, self.batches)

    def _remove(self, request: ForgetRequest, tools: Tools, retained: RetainedSet | None) -> Unlearned:
        """One batch, if the budget allows it."""
        given, request = request.head, request.in_float64()
        head = request.head
        certificate = head.certificate
        assert retained is not None
        assert certificate is not None
        assert certificate.residual_bound is not None
        rows = head.rows(retained.features_RD, retained.labels_R, retained.weights_R, keep=True)
        plan = plan_structure(head.layout, head.n_classes, rows.width, rows.count, rows.device)
        operator = build_operator(head.objective(), rows, head.parameters_CE, plan.structure)
        solution = operator.solve(request.forget_gradient())
        move_CE = request.step_ratio * solution.value_CE
        bounds = residual_bounds(request, rows, move_CE)
        unsolved = solution.residual * request.weight * float(request.forget_gradient().norm())
        cost = bounds[self.bound] + unsolved
        spent, budget = certificate.residual_bound, self.budget(certificate.noise_std)
        details = self._details(spent, cost, budget) | {f"bound_{name}": value for name, value in bounds.items()}
        if spent + cost > budget:
            note = (
                f"refused: the removal would exceed the budget of {budget:.3g} for epsilon={self.epsilon:g}, "
                f"delta={self.delta:g}; retrain"
            )
            return Unlearned(given, applied=False, details=details, note=note)
        left = request.unlearned_head(head.parameters_CE + move_CE)
        certified = replace(left, certificate=replace(certificate, residual_bound=spent + cost))
        details |= self._details(spent + cost, cost, budget)
        return Unlearned(certified.to(rows.device, given.parameters_CE.dtype), details=details)

    def _details(self, spent: float, cost: float, budget: float) -> dict[str, Any]:
        return {
            "epsilon": self.epsilon, "delta": self.delta, "budget": budget, "budget_spent": spent,
            "epsilon_spent": self.epsilon * spent / budget, "last_cost": cost,
        }  # fmt: skip


def residual_bounds(request: ForgetRequest, rows: Rows, move_CE: Tensor) -> dict[str, float]:
    r"""Bounds on the gradient norm that a Newton move leaves in the sum objective of ``rows`` (weights included).

    The residual is :math:`\sum_i s_i \int_0^1 (M_i(t) - M_i(0)) z_i\, dt \otimes a_i` with :math:`z_i = V a_i` the
    change of the outputs and s_i the row weights. Since :math:`\|M_i(t) - M_i(0)\| \le \gamma t \|z_i\|`:

    - ``sharp``: :math:`\tfrac\gamma2 \|X\|_2 (\sum_i s_i \|z_i\|^4)^{1/2}`, the integral kept;
    - ``data_dependent``: :math:`\gamma \|X\|_2\, r\, \|V\|\, (\sum_i s_i \|z_i\|^2)^{1/2}` (corollary 2), by
      :math:`\|z_i\| \le r \|V\|`;
    - ``worst_case``: :math:`\gamma V_r r^3 \|g\|^2 / (l_2 V_r)^2` with :math:`\|g\| \le V_f (C r + l_2 \|W\|)`
      (theorem 4): nothing of the removed examples is used but how many they are.

    X are the rows scaled by the roots of their weights. For classes that are separate the slopes of all add up, so C is
    taken times the root of their number.
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
        gram_EE.addmm_(design_BE.T, design_BE * share_B[:, None], alpha=weight)
    spectral, radius = float(torch.linalg.eigvalsh(gram_EE)[-1]) ** 0.5, largest**0.5
    classes = math.sqrt(head.n_classes) if head.loss.separable else 1.0
    largest_gradient = constants.gradient_bound * classes * radius + head.l2 * float(head.parameters_CE.norm())
    worst = (request.weight * largest_gradient / (head.l2 * weight)) ** 2
    return {
        "sharp": gamma / 2 * spectral * fourth**0.5,
        "data_dependent": gamma * spectral * radius * float(move_CE.norm()) * square**0.5,
        "worst_case": gamma * weight * radius**3 * worst if gamma > 0 else 0.0,
    }


def _check_head(loss: Loss, bias: bool, l2: float) -> None:
    """Raise ``ConfigError`` if no certificate is possible."""
    if math.isinf(loss.constants.curvature_lipschitz):
        raise ConfigError(
            f"certified_removal needs a Lipschitz second derivative, which loss={loss.name} has not; use logistic, "
            "softmax or quadratic."
        )
    if bias:
        raise ConfigError(
            "certified_removal needs head.bias=false: the objective must be strongly convex in every parameter. "
            "Append a constant feature instead."
        )
    if not l2 > 0:
        raise ConfigError("certified_removal needs head.l2 above 0.")


def residual(head: Head, retained: RetainedSet) -> float:
    """The gradient norm of the perturbed sum objective of the retained rows: what the accumulated bound bounds."""
    rows = head.rows(retained.features_RD, retained.labels_R, retained.weights_R)
    return rows.weight * float(head.objective_of(rows.weight).gradient(rows, head.parameters_CE).norm())
