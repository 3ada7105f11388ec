r"""Certified removal: Newton removal with a bound on what is left, paid from a budget that training noise provides.

Training adds :math:`\langle b, W \rangle` with Gaussian b of standard deviation sigma to the *sum* objective
:math:`F_S = V_S J_S` (``head.objective_noise``). One batch of removals moves the head by :math:`v = H^{-1} g`, with H
the Hessian of the remaining sum objective and g the gradient of the removed examples. What is left of the gradient of
the remaining objective is, by Taylor's theorem, at most (:func:`residual_bounds`)

.. math:: \beta = \gamma\, \|X\|_2\, r\, \|v\|\, \|X v\| \qquad \text{(data-dependent)}

with X the remaining rows, r their largest norm and gamma the Lipschitz constant of the loss's second derivative. Bounds
of successive batches add up, beginning with the gradient that training left, and so does a bound on rounding
(:func:`sfu.heads.optimum.rounding_bound`). While the sum is at most sigma times the largest shift that Gaussian noise
hides (:func:`sfu.unlearning.gaussian_mechanism.largest_shift`; theorem 3 has :math:`\epsilon / \sqrt{2 \log(1.5 /
\delta)}` there, which is smaller for small epsilon and no bound for large: at delta 1e-4 from 8.4 on), the head is
:math:`(\epsilon, \delta)`-indistinguishable from one retrained without the removed examples, to whoever sees its
weights and not b. A batch that would exceed the budget is refused: the data must be retrained on.

``bound=measured`` pays what the residual is: its norm is measured at the new head, with all removals so far in it, and
nothing is added up. The theorems ask no more than that the residual of every head that is let out is within the budget,
which holds for each way of paying, because the rest are refused; a bound depends on the data and on b as much as what
it bounds. What they take for granted here as there is that the residual, which depends on b through the head, shifts b
as one independent of it would, and that nobody chooses what is to be removed by looking at the weights.

It needs the retained data: H and X are theirs at every step. A summary kept with the head is exact for the first batch
alone, and no bound can be had from the forget set.

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

import torch
from torch import Tensor

from sfu.checks import above, at_least, between, one_of
from sfu.errors import ConfigError, SourceFreeError
from sfu.heads.base import Head
from sfu.heads.optimum import rounding_bound
from sfu.losses import Loss, Rows, make_loss
from sfu.operators.build import build_operator
from sfu.operators.plan import plan_structure
from sfu.request import Access, ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.base import UnlearningMethod, UnlearningResult
from sfu.unlearning.batches import unlearn_in_batches
from sfu.unlearning.gaussian_mechanism import largest_shift, smallest_epsilon

if TYPE_CHECKING:
    from sfu.settings import RunConfig

BOUNDS = ("sharp", "data_dependent", "worst_case")
PAYMENTS = (*BOUNDS, "measured")


@dataclass(frozen=True)
class CertifiedRemoval(UnlearningMethod):
    """Removes batch by batch until the budget is spent.

    Attributes:
        epsilon: Of the guarantee.
        delta: Of the guarantee.
        bound: Which of :data:`PAYMENTS` is made from the budget: an accumulated bound, or the residual itself.
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
        one_of("certified_removal: bound", self.bound, list(PAYMENTS))
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
        if run.loss.class_weights == "balanced":
            raise ConfigError(
                "certified_removal with loss.class_weights=balanced: the weights are counted from the removed examples "
                "too, and change with every removal. Give numbers."
            )
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
        """The largest gradient residual that the noise hides."""
        return noise_std * largest_shift(self.epsilon, self.delta)

    def unlearn(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None = None
    ) -> UnlearningResult:
        """Remove as many batches as the budget allows.

        Raises:
            SourceFreeError: No retained data were given.
            DataError: The retained data are not what the training set keeps.
            ConfigError: The head carries no certificate, or its loss, bias, l2 or dtype allow none.
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
        if request.head.parameters_CE.dtype != torch.float64:
            raise ConfigError(
                f"certified_removal needs a head in float64, not {request.head.parameters_CE.dtype}: rounding would "
                "count as a residual. Train with dtype=float64."
            )
        result = unlearn_in_batches(self._remove, request, context, retained, self.batches)
        details, several = result.details, "es" if self.batches > 1 else ""
        done = details.get("batches_applied", int(result.applied))
        spent = (
            f"epsilon {details['epsilon_spent']:.2g} of {self.epsilon:g} (delta {self.delta:g}) spent, {done} of "
            f"{self.batches} batch{several}"
        )
        known = "nothing is certified to whoever knows seeds.objective, which b was drawn from"
        notes = [spent, result.note, known if certificate.seeded else None]
        return replace(result, note="; ".join(note for note in notes if note))

    def _remove(self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None) -> UnlearningResult:
        """One batch, if the budget allows it."""
        head = request.head
        certificate = head.certificate
        assert retained is not None
        assert certificate is not None
        assert certificate.residual_bound is not None
        rows = request.retained_rows(retained)
        plan = plan_structure(head.layout, head.n_classes, rows.width, rows.count, rows.device)
        operator = build_operator(head.objective(), rows, head.parameters_CE, plan.structure)
        gradient_CE = request.forget_gradient()
        solution = operator.solve(gradient_CE)
        move_CE = request.step_ratio * solution.value_CE
        left = request.unlearned_head(head.parameters_CE + move_CE)
        bounds = residual_bounds(request, rows, move_CE, solution.residual)
        measured, rounding = _gradient_norm(left, rows), rounding_bound(left, rows)
        before = certificate.residual_bound
        if self.bound == "measured":
            after = measured + rounding
        else:  # rounding: of the gradient removed, of the Hessian and its product with the move, of what is left
            rounding = rounding_bound(head, request.data()) + rounding_bound(head, rows) + 2 * rounding
            unsolved = solution.residual * request.weight * float(gradient_CE.norm())
            after = before + bounds[self.bound] + unsolved + rounding
        refused = after > self.budget(certificate.noise_std)
        details = self._details(certificate.noise_std, before if refused else after)
        details |= {"last_cost": after - before, **{f"bound_{name}": value for name, value in bounds.items()}}
        if refused:
            note = (
                f"refused: the removal would exceed the budget of {details['budget']:.3g} for "
                f"epsilon={self.epsilon:g}, delta={self.delta:g}; retrain"
            )
            return UnlearningResult(head, applied=False, details=details, note=note)
        left = replace(left, certificate=replace(certificate, residual_bound=after))
        return UnlearningResult(left, details=details | {"residual": measured})

    def _details(self, noise_std: float, spent: float) -> dict[str, Any]:
        return {
            "epsilon": self.epsilon, "delta": self.delta, "budget": self.budget(noise_std), "budget_spent": spent,
            "epsilon_spent": smallest_epsilon(spent / noise_std, self.delta),
        }  # fmt: skip


def residual_bounds(request: ForgetRequest, rows: Rows, move_CE: Tensor, unsolved: float = 0.0) -> dict[str, float]:
    r"""Bounds on the gradient norm that a Newton move leaves in the sum objective of ``rows`` (weights included).

    The residual is :math:`\sum_i s_i \int_0^1 (M_i(t) - M_i(0)) z_i\, dt \otimes a_i` with :math:`z_i = V a_i` the
    change of the outputs and s_i the row weights. Since :math:`\|M_i(t) - M_i(0)\| \le \gamma t \|z_i\|`:

    - ``sharp``: :math:`\tfrac\gamma2 \|X\|_2 (\sum_i s_i \|z_i\|^4)^{1/2}`, the integral kept;
    - ``data_dependent``: :math:`\gamma \|X\|_2\, r\, \|V\|\, (\sum_i s_i \|z_i\|^2)^{1/2}` (corollary 2), by
      :math:`\|z_i\| \le r \|V\|`;
    - ``worst_case``: :math:`\gamma V_r r^3 \|g\|^2 / (l_2 V_r)^2` with :math:`\|g\| \le V_f (C r_f + l_2 \|W\|)`
      (theorem 4): nothing of the removed examples is used but how many they are and their largest norm r_f. A move of
      relative residual ``unsolved`` is at most so much longer.

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
    return _gradient_norm(head, head.rows(retained.features_RD, retained.labels_R, retained.weights_R))


def _gradient_norm(head: Head, rows: Rows) -> float:
    return rows.weight * float(head.objective_of(rows.weight).gradient(rows, head.parameters_CE).norm())
