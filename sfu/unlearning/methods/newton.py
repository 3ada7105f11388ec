r"""Newton steps from the trained head towards the head that never saw the forget set.

.. math:: w_u = w^* + c \frac{V_f}{V_r} (H + \rho R)^{-1} \left(g_f - \frac{V}{V_f} g\right) \; (+ \sigma z)

with total weights V (numbers of rows, where there are no weights). With the retained data's Hessian
(``curvature.estimator=exact``, Unlearned(+)) and c = 1, rho = 0 one step is exact for the quadratic loss, and Newton's
method on the retained objective for any other. Otherwise H is estimated from the forget set (Unlearned(-)).

Source: "Towards Source-Free Machine Unlearning", CVPR 2025; the correction for the training gradient g and the choice
of rho and c are ours. Shapes: C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from sfu.checks import at_least
from sfu.curvature.cross_validation import cross_validate
from sfu.curvature.estimators.base import CurvatureEstimate, CurvatureEstimator
from sfu.curvature.estimators.registry import make_estimator
from sfu.curvature.regularization import Fold, StepChoice, choose_step, noise_factor, predict_gain
from sfu.curvature.sampling import DOUBTFUL, UNLIKE_A_SAMPLE, sampling_ratio
from sfu.errors import ConfigError
from sfu.heads.base import Head
from sfu.operators.base import DampedInverse
from sfu.operators.plan import check_structure
from sfu.request import Access, ForgetRequest, MethodContext, RetainedSet
from sfu.settings import Regularization
from sfu.unlearning.base import UnlearningMethod, UnlearningResult
from sfu.unlearning.batches import unlearn_in_batches
from sfu.unlearning.further_steps import StepResult, along_the_path, on_the_retained

if TYPE_CHECKING:
    from sfu.settings import CurvatureConfig, RunConfig

NO_GAIN = "the step is predicted to be no better than nothing"
_FOLDS = 5
_FEW = 20
"""Below so many rows cross-validation is a gamble (measured: distances up to 680). Damping by the mean eigenvalue takes
its place: on rows of about equal norm (digits, normalised features) no step of 100 at each of 1 to 19 rows went further
from Retrained than nothing done; on rows whose norms differ tenfold, many did."""


class _Candidate(NamedTuple):
    """A way to take the step; ``inverse`` is ``None`` where the operator's own solve will do."""

    choice: StepChoice
    estimate: CurvatureEstimate
    inverse: DampedInverse | None


class Newton(UnlearningMethod):
    """Newton steps whose curvature comes from ``curvature.estimator``."""

    settings_used = ("curvature", "newton")

    def __init__(self, curvature: CurvatureConfig, noise_sigma: float = 0.0, steps: int = 1, batches: int = 1) -> None:
        """Keep the settings.

        Args:
            curvature: Estimator, its settings and the regularisation.
            noise_sigma: Standard deviation of Gaussian noise added to every parameter.
            steps: Newton steps, see :mod:`sfu.unlearning.further_steps`.
            batches: Forget in so many parts, one after another.

        Raises:
            ConfigError: A number is out of range.
        """
        at_least("newton.noise_sigma", noise_sigma, 0.0)
        at_least("newton.steps", steps, 1)
        at_least("newton.batches", batches, 1)
        self.curvature = curvature
        self.noise_sigma, self.steps, self.batches = noise_sigma, steps, batches
        self.estimator: CurvatureEstimator[Any] = make_estimator(curvature)

    @property
    def access(self) -> Access:
        """That of the estimator."""
        return self.estimator.access

    @property
    def augmentations(self) -> tuple[str, ...]:
        """Those of the curvature."""
        return () if self.estimator.is_exact else tuple(self.curvature.augment)

    @classmethod
    def from_config(cls, run: RunConfig, curvature: Any, settings: dict[str, Any]) -> Self:
        """Takes the row's curvature and the run's ``newton`` settings."""
        if curvature.estimator == "stored" and not run.head.store_curvature:
            raise ConfigError(
                "curvature.estimator=stored needs head.store_curvature=true, set when the head is trained."
            )
        check_structure(run.loss.layout, curvature.structure)
        return super().from_config(run, curvature, {"curvature": curvature, **vars(run.newton), **settings})

    def check(self, n_forget: int) -> None:
        """Refuse more folds or batches than there are rows to forget.

        Raises:
            ConfigError: ``curvature.folds`` or ``newton.batches`` is too many.
        """
        if self.batches > n_forget:
            raise ConfigError(
                f"newton.batches={self.batches} but there are only {n_forget} rows to forget; give at most that many."
            )
        smallest = n_forget // self.batches
        if self._n_folds(smallest) > smallest:
            raise ConfigError(
                f"curvature.folds={self.curvature.folds} but there are only {smallest} rows to forget; leave "
                "curvature.folds out, or give at most that many."
            )
        if self.estimator.access is Access.STORED and self.batches > 1:
            raise ConfigError(
                "curvature.estimator=stored with newton.batches above 1: the stored curvature is that of the trained "
                "head, and is gone after the first batch."
            )

    def _n_folds(self, n_forget: int) -> int:
        if self.estimator.is_exact:
            return 0
        if self.curvature.folds is None:
            return _FOLDS if n_forget >= _FEW else 0
        return self.curvature.folds

    def unlearn(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None = None
    ) -> UnlearningResult:
        """Estimate, regularise, step; batch by batch, if there are several.

        The step is withheld, and the head returned untouched and without noise, if the forget set is unlike a random
        sample of the training data, the step is predicted to be no better than nothing, or the solver came to nothing,
        unless ``curvature.force``.

        Raises:
            ConfigError: More folds or batches than forget rows.
            SingularHessianError: The estimate cannot be inverted.
            SolverError: The fit failed.
        """
        self.check(request.n_forget)
        if self.batches == 1:
            return self._unlearn_at_once(request, context, retained)
        return unlearn_in_batches(self._unlearn_at_once, request, context, retained, self.batches)

    def _unlearn_at_once(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None
    ) -> UnlearningResult:
        given, request = request.head, request.in_float64()
        estimator, rule = self.estimator, self.curvature
        ratio = None if estimator.is_exact else sampling_ratio(request)
        if ratio is not None and ratio > UNLIKE_A_SAMPLE and not rule.force:
            return _withheld(given, None, {"sampling_ratio": ratio}, [_unlike_a_sample(ratio)])
        n_folds = self._n_folds(request.n_forget)
        complaints = 0
        folds: list[list[Fold]] = []
        if n_folds > 0:
            observation, folds, complaints = self._once(
                "folds", context, lambda: cross_validate(estimator, request, context, n_folds)
            )
        else:
            seen = request if estimator.is_exact else request.for_curvature()
            observation = self._once("observation", context, lambda: estimator.observe(seen, context, retained))
        found = self._best(observation, request, folds, n_folds, context)
        taken = self._step(found, request)
        estimate, choice = found.estimate, found.choice
        details = {
            "rho": choice.rho, "step_scale": choice.scale, "damped": choice.rho > 0,
            "structure": estimate.operator.structure, **estimate.details, **taken.details,
        }  # fmt: skip
        plan = estimator.plan(request)
        if plan.structure.value == estimate.operator.structure:
            details["structure_reason"] = plan.reason
        if not estimator.is_exact:
            details["sampling_ratio"] = ratio
        gain = None
        if folds and not (ratio is not None and ratio > UNLIKE_A_SAMPLE):
            noise_cost = self.noise_sigma**2 * estimate.operator.trace()  # expected squared distance that noise adds
            gain = choice.predicted_gain * request.step_ratio**2 - noise_cost
        remarks = [*self._remarks(ratio, gain, request.n_forget), *filter(None, (estimate.note, taken.note))]
        if complaints:
            remarks.append(f"{complaints} of the fits to {n_folds} folds did not converge, so the choice may be off")
        if gain is not None and gain <= 0 and not rule.force:
            return _withheld(given, gain, details, [NO_GAIN, *remarks])
        if taken.note is not None and not taken.details["solve_residual"] < 1 and not rule.force:
            return _withheld(given, gain, details, [f"{taken.note}, more than that of no step; raise head.l2"])
        taken = self._further(taken, found, request, context, retained)
        parameters = taken.parameters_CE
        if self.noise_sigma > 0:
            drawn = torch.randn(parameters.shape, generator=context.generator("noise"), dtype=torch.float64)
            parameters = parameters + self.noise_sigma * drawn.to(parameters)
        left = request.unlearned_head(parameters).to(parameters.device, given.parameters_CE.dtype)
        return UnlearningResult(
            left, predicted_gain=gain, details=details | taken.details, note="; ".join(remarks) or None
        )

    def _once(self, what: str, context: MethodContext, make: Callable[[], Any]) -> Any:
        """Made once for all settings that are tried on one request and differ in the regularisation alone."""
        if self.batches > 1:  # every batch is another request
            return make()
        alike = replace(self.curvature, regularization=Regularization.none, rho=0.0, force=False)
        return context.remember(f"newton {what} {alike}", make)

    def _best(
        self, observation: Any, request: ForgetRequest, folds: list[list[Fold]], n_folds: int, context: MethodContext
    ) -> _Candidate:
        """The estimator's setting, rho and c of the largest predicted gain."""
        estimator, head = self.estimator, request.head
        noise = noise_factor(n_folds, request.n_forget / head.n_train) if folds else 1.0
        given = self.curvature.regularization in (Regularization.none, Regularization.fixed)
        candidates = []
        for index, weight in enumerate(estimator.weights if folds else (estimator.blind_weight,)):
            estimate = self._once(
                f"estimate {weight}", context, partial(estimator.estimate, observation, request, weight)
            )
            inverse = None if estimator.is_exact and given else estimate.operator.damped()
            choice = self._choose(inverse, folds[index] if folds else [], noise, self._floor(head))
            candidates.append(_Candidate(choice, estimate, inverse))
        return max(candidates, key=lambda candidate: candidate.choice.predicted_gain)

    def _floor(self, head: Head) -> float:
        return head.l2 if self.curvature.regularization is Regularization.none else 0.0

    def _choose(self, inverse: DampedInverse | None, folds: list[Fold], noise: float, floor: float) -> StepChoice:
        rule = self.curvature.regularization
        if rule is Regularization.cross_validated and folds:
            return choose_step(folds, noise)
        rho = self.curvature.rho if rule is Regularization.fixed else 0.0
        if inverse is not None and rule in (Regularization.mean_eigenvalue, Regularization.cross_validated):
            rho = inverse.mean_eigenvalue  # cross_validated: too few rows for folds
        return predict_gain(folds, rho, noise, floor=floor) if folds else StepChoice(rho, 1.0, 0.0)

    def _step(self, found: _Candidate, request: ForgetRequest) -> StepResult:
        """The first step."""
        head, gradient_CE = request.head, request.newton_gradient()
        length = found.choice.scale * request.step_ratio
        if found.inverse is not None:
            step_CE = found.inverse.solve(gradient_CE, found.choice.rho, floor=self._floor(head))
            return StepResult(head.parameters_CE + length * step_CE, found.inverse.account())
        solution = found.estimate.operator.solve(gradient_CE, found.choice.rho)
        return StepResult.by(head.parameters_CE + length * solution.value_CE, solution)

    def _further(
        self,
        taken: StepResult,
        found: _Candidate,
        request: ForgetRequest,
        context: MethodContext,
        retained: RetainedSet | None,
    ) -> StepResult:
        """Steps beyond the first, which only a curvature that changes asks for."""
        steps = self.steps - 1
        if steps == 0 or request.head.loss.constants.curvature_lipschitz == 0:
            return taken
        if retained is not None:
            return on_the_retained(taken, steps, self.estimator, request, context, retained, found.choice.rho)
        return along_the_path(taken, steps, found.estimate.operator, request, found.choice, self._floor(request.head))

    def _remarks(self, ratio: float | None, gain: float | None, n_forget: int) -> list[str]:
        """What the reader should know of a step that is applied."""
        although = "applied because curvature.force=true, although "
        remarks = []
        if ratio is not None and ratio > UNLIKE_A_SAMPLE:
            remarks.append(although + _unlike_a_sample(ratio))
        elif gain is not None and gain <= 0 and self.curvature.force:
            remarks.append(although + NO_GAIN)
        elif ratio is not None and ratio > DOUBTFUL:
            remarks.append(
                f"the forget set is not quite like a random sample (its gradient is {ratio:.0f} times what "
                "sampling explains); take the predicted gain with caution"
            )
        few = self.curvature.regularization is Regularization.cross_validated and not self.estimator.is_exact
        if few and self._n_folds(n_forget) == 0:
            remarks.append(f"{n_forget} rows are too few to cross-validate: damped by the mean eigenvalue instead")
        return remarks


def _withheld(
    head: Head, gain: float | None, details: dict[str, float | int | str | bool | None], reasons: list[str]
) -> UnlearningResult:
    note = f"not applied: {'; '.join(reasons)} (curvature.force=true applies it)"
    return UnlearningResult(head, applied=False, predicted_gain=gain, details=details, note=note)


def _unlike_a_sample(ratio: float) -> str:
    times = "far more than" if ratio == math.inf else f"{ratio:.0f} times what"
    return (
        f"the forget set is unlike a random sample of the training data (its gradient is {times} sampling explains), "
        "so its curvature does not stand for the rest and no gain can be predicted"
    )
