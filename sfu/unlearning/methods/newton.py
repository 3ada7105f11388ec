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

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from sfu.curvature.cross_validation import (
    StepChoice,
    Validation,
    choose_step,
    cross_validate,
    noise_factor,
    predict_gain,
)
from sfu.curvature.estimators.base import CurvatureEstimate, CurvatureEstimator, make_estimator
from sfu.curvature.sampling import sampling_ratio
from sfu.curvature.settings import CurvatureSettings, Regularization, StoredSettings
from sfu.errors import ConfigError
from sfu.heads.base import Head
from sfu.lazy import torch
from sfu.operators.base import DampedInverse
from sfu.operators.plan import check_structure
from sfu.request import Access, ForgetRequest, MethodContext, Retained
from sfu.schema import check_fields, setting
from sfu.unlearning.base import UnlearningMethod, UnlearningResult
from sfu.unlearning.batches import check_batches, sequence_note, unlearn_in_batches
from sfu.unlearning.decision import Decision, check_sample, decide, is_unlike
from sfu.unlearning.further_steps import StepResult, steps_along_path, steps_on_retained
from sfu.unlearning.settings import RunSettings

if TYPE_CHECKING:
    from torch import Tensor

_FOLDS = 5
_FEW = 20
"""Below so many rows cross-validation is unreliable (measured: distances up to 680), and sfu damps by the mean
eigenvalue instead. On rows of about equal norm (digits, normalised features) no such step, of 100 at each of 1 to 19
rows, ended further from Retrained than doing nothing; on rows whose norms differ tenfold, many did."""


class Candidate(NamedTuple):
    """A way to take the step; ``inverse`` is ``None`` if the operator's own solve will do."""

    choice: StepChoice
    estimate: CurvatureEstimate
    inverse: DampedInverse | None


@dataclass(frozen=True)
class Newton(UnlearningMethod, name="newton"):
    """Newton steps whose curvature comes from ``curvature.estimator``."""

    curvature: CurvatureSettings
    noise_sigma: float = setting(0.0, "Standard deviation of Gaussian noise on every parameter.", at_least=0)
    steps: int = setting(1, "Newton steps, see sfu.unlearning.further_steps.", at_least=1)
    batches: int = setting(1, "Number of parts, forgotten one after another.", at_least=1)
    estimator: CurvatureEstimator[Any, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the settings and make the estimator."""
        object.__setattr__(self, "estimator", make_estimator(self.curvature))
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
        if isinstance(curvature, StoredSettings) and not run.head.store_curvature:
            raise ConfigError(
                "curvature.estimator=stored needs head.store_curvature=true when the head is trained. Set both, or "
                "choose another estimator."
            )
        check_structure(run.loss.layout, curvature.structure)
        return super().from_config(run, curvature, {"curvature": curvature, **vars(run.newton), **settings})

    def check(self, n_forget: int) -> None:
        check_batches(self.batches, n_forget)
        smallest = n_forget // self.batches
        if self._n_folds(smallest) > smallest:
            raise ConfigError(
                f"curvature.folds={self.curvature.folds} but there are only {smallest} rows to forget. Leave "
                "curvature.folds out, or give at most that many."
            )
        if self.estimator.access is Access.STORED and self.batches > 1:
            raise ConfigError(
                "curvature.estimator=stored does not work with newton.batches above 1: the stored curvature is that of "
                "the trained head, and is gone after the first batch. Use one batch."
            )

    def _n_folds(self, n_forget: int) -> int:
        if not self.estimator.needs_validation:
            return 0
        if self.curvature.folds is None:
            return _FOLDS if n_forget >= _FEW else 0
        return self.curvature.folds

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        """Estimate, choose, decide and step, batch by batch if there are several.

        The step is skipped, and the head returned untouched and without noise, if the forget set is unlike a random
        sample of the training data, the step is predicted to be no better than nothing, or the solver failed.
        ``curvature.force`` applies it all the same.

        Raises:
            SingularHessianError: The estimate cannot be inverted.
        """
        self.check(request.n_forget)
        if self.batches == 1:
            result = self._unlearn_at_once(request, context, retained)
        else:
            result = unlearn_in_batches(self._unlearn_at_once, request, context, retained, self.batches)
        forgotten = result.head.forgotten.requests > request.head.forgotten.requests
        if not forgotten or self.access is not Access.FORGET:
            return result
        notes = result.note, sequence_note(request.head.forgotten, self.batches)
        return replace(result, note="; ".join(filter(None, notes)) or None)

    def _unlearn_at_once(self, request: ForgetRequest, context: MethodContext, retained: Retained) -> UnlearningResult:
        from sfu.curvature.span import reduce_request  # imports PyTorch

        given, request = request.head, request.in_float64()
        reduction = reduce_request(request) if self.estimator.is_forget_hessian(request) else None
        whole, request = request, request if reduction is None else reduction.request
        ratio = sampling_ratio(request) if self.estimator.needs_validation else None
        hopeless = check_sample(ratio, self.curvature.force)
        if hopeless is not None:
            return hopeless.skipped(given, {"sampling_ratio": ratio})
        validation = self._estimate(request, context, retained)
        chosen = self._choose(validation, request, context)
        first = self._first_step(chosen, request)
        decision = self._decide(ratio, validation, chosen, first, request)
        details = self._details(ratio, chosen, first, request)
        if reduction is not None:
            details["reduced_features"] = request.head.n_features
        if decision.objections:
            return decision.skipped(given, details)
        last = self._step(first, chosen, request, context, retained)
        step_CE = last.parameters_CE - request.head.parameters_CE
        step_CE = step_CE if reduction is None else reduction.lift(step_CE)
        parameters_CE = self._with_noise(whole.head.parameters_CE + step_CE, context)
        head = whole.unlearned_head(parameters_CE).to(parameters_CE.device, given.parameters_CE.dtype)
        return UnlearningResult(
            head,
            predicted_distance_gain=decision.predicted_distance_gain,
            details=details | last.details,
            note="; ".join(decision.remarks) or None,
        )

    def _estimate(self, request: ForgetRequest, context: MethodContext, retained: Retained) -> Validation:
        """Observe the forget set, fold by fold if there are enough rows."""
        estimator, n_folds = self.estimator, self._n_folds(request.n_forget)
        if n_folds > 0:
            return self._cached("folds", context, lambda: cross_validate(estimator, request, context, n_folds))
        rows = request.for_curvature() if estimator.needs_validation else request
        observation = self._cached("observation", context, lambda: estimator.observe(rows, context, retained))
        return Validation(observation, [], 0)

    def _cached(self, what: str, context: MethodContext, make: Callable[[], Any]) -> Any:
        """Return ``make()``, cached for all settings tried on one request that differ only in the regularisation."""
        if self.batches > 1:  # every batch is another request
            return make()
        estimated_from = replace(self.curvature, regularization=Regularization.none, rho=0.0, force=False)
        return context.remember(f"newton {what} {estimated_from}", make)

    def _choose(self, validation: Validation, request: ForgetRequest, context: MethodContext) -> Candidate:
        """Choose the estimator's weight, rho and c of the largest predicted gain."""
        estimator, folds = self.estimator, validation.folds
        noise = noise_factor(len(folds[0]), request.n_forget / request.head.n_train) if folds else 1.0
        needs_inverse = estimator.needs_validation or self.curvature.regularization not in (
            Regularization.none, Regularization.fixed,
        )  # fmt: skip
        candidates = []
        for index, weight in enumerate(estimator.weights if folds else (estimator.default_weight,)):
            make = partial(estimator.estimate, validation.observation, request, weight)
            estimate = self._cached(f"estimate {weight}", context, make)
            inverse = estimate.operator.damped() if needs_inverse else None
            choice = self._damping(inverse, folds[index] if folds else [], noise, self._floor(request.head))
            candidates.append(Candidate(choice, estimate, inverse))
        return max(candidates, key=lambda candidate: candidate.choice.gain)

    def _floor(self, head: Head) -> float:
        return head.l2 if self.curvature.regularization is Regularization.none else 0.0

    def _damping(self, inverse: DampedInverse | None, folds: list[Any], noise: float, floor: float) -> StepChoice:
        rule = self.curvature.regularization
        if rule is Regularization.cross_validated and folds:
            return choose_step(folds, noise)
        rho = self.curvature.rho if rule is Regularization.fixed else 0.0
        if inverse is not None and rule in (Regularization.mean_eigenvalue, Regularization.cross_validated):
            rho = inverse.mean_eigenvalue  # cross_validated: too few rows for folds
        return predict_gain(folds, rho, noise, floor=floor) if folds else StepChoice(rho, 1.0, 0.0)

    def _first_step(self, chosen: Candidate, request: ForgetRequest) -> StepResult:
        head, gradient_CE = request.head, request.newton_gradient()
        length = chosen.choice.scale * request.step_ratio
        if chosen.inverse is not None:
            step_CE = chosen.inverse.solve(gradient_CE, chosen.choice.rho, floor=self._floor(head))
            return StepResult(head.parameters_CE + length * step_CE, chosen.inverse.account())
        solution = chosen.estimate.operator.solve(gradient_CE, chosen.choice.rho)
        return StepResult.solved(head.parameters_CE + length * solution.value_CE, solution)

    def _decide(
        self, ratio: float | None, validation: Validation, chosen: Candidate, first: StepResult, request: ForgetRequest
    ) -> Decision:
        """Predict the gain, and decide from it whether to apply the step."""
        gain, remarks = None, []
        if validation.folds and not is_unlike(ratio):
            # the trace is the expected squared distance that noise adds
            noise_cost = self.noise_sigma**2 * chosen.estimate.operator.trace()
            gain = chosen.choice.gain * request.step_ratio**2 - noise_cost
        cross_validated = self.curvature.regularization is Regularization.cross_validated
        if cross_validated and self.estimator.needs_validation and not validation.folds:
            few = f"{request.n_forget} rows are too few to cross-validate"
            remarks.append(f"{few}: damped by the mean eigenvalue instead")
        remarks += [note for note in (chosen.estimate.note, first.note) if note]
        if validation.failed_fits:
            fits = f"{validation.failed_fits} of the fits to {len(validation.folds[0])} folds"
            remarks.append(f"{fits} did not converge, so the choice may be off")
        return decide(ratio, gain, first, remarks, self.curvature.force)

    def _details(
        self, ratio: float | None, chosen: Candidate, first: StepResult, request: ForgetRequest
    ) -> dict[str, Any]:
        choice, estimate = chosen.choice, chosen.estimate
        details = {
            "rho": choice.rho, "step_scale": choice.scale, "damped": choice.rho > 0,
            "structure": estimate.operator.structure, **estimate.details, **first.details,
        }  # fmt: skip
        plan = self.estimator.plan(request, max(1, request.n_forget // max(1, self._n_folds(request.n_forget))))
        if plan.structure.value == estimate.operator.structure:
            details["structure_reason"] = plan.reason
        return details | ({"sampling_ratio": ratio} if self.estimator.needs_validation else {})

    def _step(
        self, first: StepResult, chosen: Candidate, request: ForgetRequest, context: MethodContext, retained: Retained
    ) -> StepResult:
        """Take further steps, if the curvature changes at all."""
        further = self.steps - 1
        if further > 0 and request.head.loss.constants.curvature_lipschitz > 0:
            if retained is not None:
                rho = chosen.choice.rho
                return steps_on_retained(first, further, self.estimator, request, context, retained, rho)
            floor, operator = self._floor(request.head), chosen.estimate.operator
            return steps_along_path(first, further, operator, request, chosen.choice, floor)
        return first

    def _with_noise(self, parameters_CE: Tensor, context: MethodContext) -> Tensor:
        if self.noise_sigma == 0:
            return parameters_CE
        drawn = torch.randn(parameters_CE.shape, generator=context.generator("noise"), dtype=torch.float64)
        return parameters_CE + self.noise_sigma * drawn.to(parameters_CE)
