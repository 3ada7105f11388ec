r"""Newton steps from the trained head towards the head that never saw the forget set.

.. math:: w_u = w^* + c \frac{V_f}{V_r} (H + \rho R)^{-1} \left(g_f - \frac{V}{V_f} g\right) \; (+ \sigma z)

with total weights V (numbers of rows, if there are no weights). With the retained data's Hessian
(``curvature.estimator=exact``, Unlearned(+)) and c = 1, rho = 0, one step gives the retrained head for the quadratic
loss, and the steps are Newton's method on the retained objective for any other. Otherwise H is estimated from the
forget set (Unlearned(-)).

Source: "Towards Source-Free Machine Unlearning", CVPR 2025; the correction for the training gradient g and the choice
of rho and c are ours. Shapes: C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from sfu.curvature.caution import Assessment, assess
from sfu.curvature.cross_validation import Validation, cross_validate, observe_once
from sfu.curvature.estimators.base import CurvatureEstimator, make_estimator
from sfu.curvature.folds import random_folds
from sfu.curvature.settings import CurvatureSettings, Regularization, StoredSettings
from sfu.curvature.source_fit import Caution, StepChoice, choose_step, expected_gain, noise_factor, pooled_weights
from sfu.curvature.unlabelled import check_unlabelled, read_unlabelled
from sfu.errors import ConfigError
from sfu.heads.base import Head
from sfu.heads.ledger import PARTS, Ledger, Start
from sfu.heads.recipe import OPTIMUM, Reference
from sfu.heads.settings import Keep
from sfu.lazy import torch
from sfu.losses.base import Layout
from sfu.operators.explicit import ExplicitOperator
from sfu.operators.plan import check_structure
from sfu.request import Access, ForgetRequest, MethodContext, Retained
from sfu.schema import check_fields, setting
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.batches import check_batches, sequence_note, unlearn_in_batches
from sfu.unlearning.decision import Decision, decide, withheld
from sfu.unlearning.further_steps import Candidate, StepResult, steps_along_path, steps_on_retained
from sfu.unlearning.prediction import gains_apart, removed_so_far, share_of_step
from sfu.unlearning.result import Remark, UnlearningResult
from sfu.unlearning.settings import RunSettings
from sfu.unlearning.step_curvature import StepCurvature

if TYPE_CHECKING:
    from torch import Tensor

_FOLDS = 5


@dataclass(frozen=True)
class Newton(UnlearningMethod, name="newton"):
    """Newton steps whose curvature comes from ``curvature.estimator``."""

    curvature: CurvatureSettings
    noise_sigma: float = setting(0.0, "Standard deviation of Gaussian noise on every parameter.", at_least=0)
    steps: int = setting(1, "Newton steps, see sfu.unlearning.further_steps.", at_least=1)
    batches: int = setting(1, "Number of parts, forgotten one after another.", at_least=1)
    reference: Reference = setting(
        Reference.same_recipe, "Where steps from a head that was stopped early lead: same_recipe, or the optimum."
    )
    estimator: CurvatureEstimator[Any, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the settings and make the estimator."""
        object.__setattr__(self, "estimator", make_estimator(self.curvature))
        check_unlabelled(self.curvature.files())
        check_fields(self, "newton")

    @property
    def access(self) -> Access:
        return self.estimator.access

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(self.curvature.files())

    @property
    def augmentations(self) -> tuple[str, ...]:
        return tuple(self.curvature.augment) if self.estimator.needs_validation else ()

    @classmethod
    def from_config(cls, run: RunSettings, curvature: Any, settings: dict[str, Any]) -> Self:
        """Take the row's curvature and the run's ``newton`` settings."""
        if isinstance(curvature, StoredSettings) and run.head.keep is Keep.bound:
            raise ConfigError(
                "curvature.estimator=stored needs head.keep=sketch or head.keep=full when the head is trained: a bound "
                "alone is no Hessian. Set both, or choose another estimator."
            )
        check_structure(run.loss.layout, curvature.structure)
        return super().from_config(run, curvature, {"curvature": curvature, **vars(run.newton), **settings})

    def check(self, n_forget: int) -> None:
        check_batches(self.batches, n_forget)
        smallest = n_forget // self.batches
        if not self.curvature.unlabelled and self._n_folds(smallest) > smallest:
            raise ConfigError(
                f"curvature.folds={self.curvature.folds} but there are only {smallest} rows to forget. Leave "
                "curvature.folds out, or give at most that many."
            )
        if self.estimator.access is Access.STORED and self.batches > 1:
            raise ConfigError(
                "curvature.estimator=stored does not work with newton.batches above 1: what the head keeps may only "
                "fit the parameters before the first batch. Use one batch."
            )

    def _n_folds(self, n_forget: int, n_unlabelled: int = 0) -> int:
        if not self.estimator.needs_validation:
            return 0
        if self.curvature.folds is None:
            return _FOLDS if max(n_forget, n_unlabelled) >= _FOLDS else 0
        return self.curvature.folds

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        """Estimate, choose, decide and step, batch by batch if there are several.

        The less the forget set is like a random sample of the training data, the more cautious is the step, up to one
        that can do no harm (:mod:`sfu.curvature.caution`). It is skipped, and the head returned untouched and without
        noise, if the forget set is no random sample and nothing is known that bounds the step, if noise or a fixed
        damping make it no better than nothing, or if the solver failed. ``curvature.on_doubt=apply`` takes the forget
        set for a random sample and applies the step in any case.

        Raises:
            SingularHessianError: The estimate cannot be inverted.
        """
        self.check(request.n_forget)
        if self.batches == 1:
            result = self._unlearn_at_once(request, context, retained)
        else:
            result = unlearn_in_batches(self._unlearn_at_once, request, context, retained, self.batches)
        forgotten = result.head.forgotten.requests > request.head.forgotten.requests
        if not forgotten or (self.access is not Access.FORGET and request.head.forgotten.ledger is None):
            return result
        told = sequence_note(request.head.forgotten, result.head.forgotten, self.batches)
        if told is None:
            return result
        note = "; ".join(filter(None, (result.note, told)))
        return replace(result, note=note, reasons=(*result.reasons, "sequence"))

    def _unlearn_at_once(self, request: ForgetRequest, context: MethodContext, retained: Retained) -> UnlearningResult:
        from sfu.curvature.span import reduce_request  # imports PyTorch

        given, double = request.head, self._with_unlabelled(request.in_float64(), context)
        told = double.toward(self.reference).at_retained_l2()
        whole = self._without_unlabelled(told)
        pooled, assessment = whole.rewound() if self._pools(whole) else whole, None
        if self.estimator.needs_validation:
            assessment = self._cached(
                "assessment", context, partial(assess, pooled, force=self.curvature.applies_anyway)
            )
            if assessment.reasons and pooled is not whole:  # such rows are no further part of a random sample
                pooled, assessment = whole, assess(whole, force=self.curvature.applies_anyway)
            if (refused := withheld(assessment, self.curvature.applies_anyway)) is not None:
                return refused.skipped(given, {"sampling_ratio": assessment.ratio})
        reducible = pooled.earlier is None and self.estimator.is_forget_hessian(whole) and not context.keep_curvature
        reduction = reduce_request(whole) if reducible else None
        request = pooled if reduction is None else reduction.request
        validation = self._estimate(request, context, retained, assessment)
        chosen = self._choose(validation, request, assessment, context)
        right_CE = request.newton_gradient()
        first = self._first_step(chosen, request, right_CE)
        decision = self._decide(assessment, validation, chosen, first, request, dropped=whole is not told)
        details = self._details(assessment, validation, chosen, first, request)
        details |= gains_apart(decision.predicted_distance_gain, chosen, validation, request, given)
        if whole.head.unfinished_CE is not None:
            details["l2"] = whole.head.l2
        if reduction is not None:
            details["reduced_features"] = request.head.n_features
        if decision.objections:
            return decision.skipped(given, details)
        last = self._step(first, chosen, request, context, retained)
        step_CE = last.parameters_CE - request.head.parameters_CE
        step_CE = step_CE if reduction is None else reduction.lift(step_CE)
        end_CE = pooled.head.parameters_CE + step_CE
        keeps = context.keep_curvature and self.steps == self.batches == 1 and pooled.earlier is None
        parameters_CE = self._with_noise(end_CE, context)
        head = whole.unlearned_head(parameters_CE)
        if (undone_CE := whole.head.unfinished_CE) is not None:
            l2, tilted = double.at_retained_l2().head.l2, whole.head  # the end is an optimum of the tilted objective
            left_CE = undone_CE + (l2 - tilted.l2) * tilted.regularized_E * parameters_CE
            head = replace(head, l2=l2, gradient_CE=left_CE, unfinished_CE=None)
        head = head.to(parameters_CE.device, given.parameters_CE.dtype)
        if assessment is not None and not assessment.reasons and self._pools(whole):
            head = replace(head, forgotten=replace(head.forgotten, ledger=_ledger(pooled, assessment, context)))
        share = removed = None
        if assessment is not None and self._follows_law(request):
            if decision.predicted_distance_gain is not None and context.predict:
                share = share_of_step(request, right_CE, assessment, validation, chosen)
            removed = removed_so_far(share, assessment, request, given)
        head = replace(head, forgotten=replace(head.forgotten, removed=removed))
        predicted = None if share is None and not given.forgotten.requests else head.forgotten.predicted()
        return UnlearningResult(
            head,
            predicted_distance_gain=decision.predicted_distance_gain,
            predicted_share=None if predicted is None else predicted[1],
            predicted_share_interval=None if predicted is None else (predicted[0], predicted[2]),
            details=details | last.details,
            note="; ".join(one.text for one in decision.remarks) or None,
            reasons=tuple(dict.fromkeys(one.code for one in decision.remarks)),
            curvature=StepCurvature.of(chosen, end_CE, given.layout, self.noise_sigma) if keeps else None,
        )

    def _follows_law(self, request: ForgetRequest) -> bool:
        """Whether the theory of :mod:`sfu.curvature.share` tells what the step is worth."""
        chosen_by_folds = self.curvature.regularization is Regularization.cross_validated
        return chosen_by_folds and self.noise_sigma == 0 and self.estimator.is_forget_hessian(request)

    def _pools(self, request: ForgetRequest) -> bool:
        """Whether the request is served from the sums of the head's ledger, with all requests before it."""
        ledger = request.head.forgotten.ledger
        return (
            ledger is not None
            and (bool(request.unlabelled) or not ledger.unlabelled)
            and request.head.layout is Layout.shared
            and self.estimator.is_forget_hessian(request)
            and self.noise_sigma == 0
        )

    def _without_unlabelled(self, request: ForgetRequest) -> ForgetRequest:
        """Return the request without unlabelled rows, if they would do harm.

        The effect of forgetting on a head that was stopped early is more damped than its curvature says. Forget rows
        that show enough of the curvature damp the step by what they miss, and unlabelled rows would take that away.
        """
        if not request.unlabelled or request.head.recipe.trained == OPTIMUM or not self.estimator.needs_validation:
            return request
        alone = replace(request, unlabelled=())
        found = assess(alone, force=self.curvature.applies_anyway)
        return request if found.reasons or not found.enough else alone

    def _with_unlabelled(self, request: ForgetRequest, context: MethodContext) -> ForgetRequest:
        files = self.curvature.files()
        if not files or not self.estimator.needs_validation:
            return request
        read = partial(read_unlabelled, files, request.head.n_features, normalize_rows=context.normalize_rows)
        return replace(request, unlabelled=(*request.unlabelled, *self._cached("unlabelled", context, read)))

    def _estimate(
        self, request: ForgetRequest, context: MethodContext, retained: Retained, assessment: Assessment | None
    ) -> Validation:
        """Observe the forget set, fold by fold if there are enough rows."""
        estimator = self.estimator
        n_unlabelled = sum(len(rows_UD) for rows_UD in request.unlabelled)
        n_folds = self._n_folds(request.head.n_train - request.n_retain, n_unlabelled)
        if n_folds > 0:
            known = () if assessment is None else (
                assessment.trust, assessment.likeness, assessment.evidence.groups_F
            )  # fmt: skip
            return self._cached("folds", context, lambda: cross_validate(estimator, request, context, n_folds, *known))
        observe = partial(estimator.observe, request, context, retained)
        return self._cached("observation", context, lambda: observe_once(estimator, request, observe()))

    def _cached(self, what: str, context: MethodContext, make: Callable[[], Any]) -> Any:
        """Return ``make()``, cached for all settings tried on one request that differ only in the regularisation."""
        if self.batches > 1:  # every batch is another request
            return make()
        estimated_from = replace(self.curvature, regularization=Regularization.none, rho=0.0)
        return context.remember(f"newton {what} {self.reference} {estimated_from}", make)

    def _choose(
        self, validation: Validation, request: ForgetRequest, assessment: Assessment | None, context: MethodContext
    ) -> Candidate:
        """Choose the weights of the sources, rho and c."""
        folds, head, rule = validation.folds, request.head, self.curvature.regularization
        caution = Caution() if assessment is None else assessment.caution
        noise = noise_factor(len(folds), 1 - request.n_retain / head.n_train) if validation.divided else 1.0
        if assessment is not None:  # the gradient of a set that is no random sample is no noise
            noise += (1 - noise) * assessment.unlike
        if rule is Regularization.cross_validated and folds:
            choice = choose_step(
                validation, noise, caution, head.l2, math.inf if head.recipe.trained == OPTIMUM else 1.0
            )
            operator = validation.sources.mixed(choice.weights)
            alone = isinstance(operator, ExplicitOperator) and not context.predict  # then a Cholesky factor will do
            return Candidate(choice, operator, None if alone else validation.sources.damped(choice.weights))
        weights = pooled_weights(validation.sources)
        operator = validation.sources.mixed(weights)
        needs_inverse = self.estimator.needs_validation or rule not in (Regularization.none, Regularization.fixed)
        inverse = operator.damped() if needs_inverse else None
        rho = self.curvature.rho if rule is Regularization.fixed else 0.0
        if rule is Regularization.mean_eigenvalue and inverse is not None:
            rho = inverse.mean_eigenvalue
        if rule is Regularization.cross_validated:  # too few rows for folds
            largest = caution.bound + head.l2  # 0 if all rows are 0
            scale = 1 / largest if largest > 0 else 0.0
            return Candidate(StepChoice(math.inf, scale, 0.0, weights), operator, inverse)
        choice = StepChoice(rho, 1.0, 0.0, weights)
        if folds:
            choice = replace(choice, gain=expected_gain(folds, choice, noise, floor=self._floor(head)))
        return Candidate(choice, operator, inverse, self._floor(head))

    def _floor(self, head: Head) -> float:
        return head.l2 if self.curvature.regularization is Regularization.none else 0.0

    def _first_step(self, chosen: Candidate, request: ForgetRequest, right_CE: Tensor) -> StepResult:
        step = chosen.solve(right_CE)
        return replace(step, parameters_CE=request.head.parameters_CE + request.step_ratio * step.parameters_CE)

    def _decide(
        self, assessment: Assessment | None, validation: Validation, chosen: Candidate, first: StepResult,
        request: ForgetRequest, *, dropped: bool,
    ) -> Decision:  # fmt: skip
        """Predict the gain, and decide from it whether to apply the step."""
        # the trace is the expected squared distance that noise adds
        noise_cost = self.noise_sigma**2 * chosen.operator.trace() if self.noise_sigma > 0 else 0.0
        assumed = chosen.choice.gain * request.step_ratio**2 - noise_cost
        known = bool(validation.folds) or chosen.choice.is_safe
        converged = request.head.recipe.trained == OPTIMUM
        gain = assumed if validation.folds and converged and (assessment is None or assessment.predictable) else None
        if chosen.choice.scale == 0:
            gain = 0.0
        with_care = self.curvature.regularization is Regularization.cross_validated and noise_cost == 0
        if known and not with_care and assumed <= 0:
            gain = assumed
        remarks: list[Remark] = []
        if not converged:
            why = "no gain is predicted, because the head may have been stopped before its optimum"
            remarks.append(Remark("early_stopped", why))
        if dropped:
            why = "the unlabelled rows are not used, because they do harm to a head that was stopped early"
            remarks.append(Remark("unlabelled_unused", why))
        if (note := validation.estimate.note) is not None:
            remarks.append(Remark("estimate", note))
        if first.note is not None:
            remarks.append(Remark("solve", first.note))
        if validation.failed_fits:
            fits = f"{validation.failed_fits} of the fits to {len(validation.folds)} folds"
            remarks.append(Remark("estimate", f"{fits} did not converge, so the choice may be off"))
        return decide(assessment, gain, first, remarks, self.curvature.applies_anyway)

    def _details(
        self, assessment: Assessment | None, validation: Validation, chosen: Candidate, first: StepResult,
        request: ForgetRequest,
    ) -> dict[str, Any]:  # fmt: skip
        choice, estimate = chosen.choice, validation.estimate
        details = {
            "rho": None if choice.is_safe else choice.rho, "step_scale": choice.scale, "damped": choice.rho > 0,
            "structure": estimate.operator.structure, **estimate.details, **first.details,
        }  # fmt: skip
        if len(choice.weights) > 1:
            names = validation.sources.operators
            details |= {f"weight_{name}": weight for name, weight in zip(names, choice.weights, strict=True)}
        plan = self.estimator.plan(request, max(1, request.n_forget // max(1, self._n_folds(request.n_forget))))
        if plan.structure.value == estimate.operator.structure:
            details["structure_reason"] = plan.reason
        if assessment is not None:
            details |= {
                "sampling_ratio": assessment.ratio, "unseen_share": assessment.caution.share,
                "effective_rows": assessment.evidence.effective_rows,
            }  # fmt: skip
        return details

    def _step(
        self, first: StepResult, chosen: Candidate, request: ForgetRequest, context: MethodContext, retained: Retained
    ) -> StepResult:
        """Take further steps, if the curvature changes at all."""
        further = self.steps - 1
        if further > 0 and not chosen.choice.is_safe and request.head.loss.constants.curvature_lipschitz > 0:
            if retained is not None:
                rho = chosen.choice.rho
                return steps_on_retained(first, further, self.estimator, request, context, retained, rho)
            return steps_along_path(first, further, chosen, request)
        return first

    def _with_noise(self, parameters_CE: Tensor, context: MethodContext) -> Tensor:
        return parameters_CE if self.noise_sigma == 0 else parameters_CE + self.noise(parameters_CE, context)

    def noise(self, like_CE: Tensor, context: MethodContext) -> Tensor:
        """Return the noise that is added to the parameters of a request that is served at once."""
        drawn = torch.randn(like_CE.shape, generator=context.generator("noise"), dtype=torch.float64)
        return self.noise_sigma * drawn.to(like_CE)


def _ledger(request: ForgetRequest, assessment: Assessment, context: MethodContext) -> Ledger:
    """Return the ledger after a request, which begins at the head before the first."""
    head, drawn = request.head, context.generator("folds")
    ledger, count = head.forgotten.ledger or Ledger(), request.n_forget
    indices = random_folds(request, min(PARTS, count), drawn, assessment.evidence.groups_F)
    l2 = head.l2 if ledger.start is None else ledger.start.l2
    start = Start(head.parameters_CE.cpu(), head.gradient_CE.cpu(), head.n_train, head.total_weight, l2)
    sums = [request.sums(index) for index in indices]
    return ledger.after(
        start, sums, count, effective=assessment.rows, unseen=assessment.caution.share,
        unlabelled=bool(request.unlabelled),
    )  # fmt: skip
