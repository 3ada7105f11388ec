r"""One Newton step from the trained head towards the head that never saw the forget set.

.. math:: w_u = w^* + c \frac{N_f}{N_r} (H + \rho R)^{-1} \left(g_f - \frac{N}{N_f} g\right) \; (+ \sigma z)

With the retained data's Hessian (``curvature.estimator=exact``, Unlearned(+)) and c = 1, rho = 0 this is exact for the
quadratic loss. Otherwise H is estimated from the forget set (Unlearned(-)).

Source: "Towards Source-Free Machine Unlearning", CVPR 2025; the correction for the training gradient g and the choice
of rho and c are ours. Shapes: C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

import torch

from sfu.checks import at_least
from sfu.curvature.cross_validation import cross_validate
from sfu.curvature.estimators.base import CurvatureEstimate, CurvatureEstimator
from sfu.curvature.estimators.registry import make_estimator
from sfu.curvature.regularization import Fold, StepChoice, choose_step, noise_factor, predict_gain
from sfu.curvature.sampling import DOUBTFUL, UNLIKE_A_SAMPLE, sampling_ratio
from sfu.curvature.spectral import SpectralInverse
from sfu.errors import ConfigError
from sfu.heads.linear import LinearHead
from sfu.settings import Estimator, Regularization
from sfu.unlearning.method import Access, RetainedSet, Tools, Unlearned, UnlearningMethod
from sfu.unlearning.request import ForgetRequest

if TYPE_CHECKING:
    from sfu.settings import CurvatureConfig, RunConfig

NO_GAIN = "the step is predicted to be no better than nothing"
_FOLDS = 5
_FEW = 20
"""Below so many rows cross-validation is a gamble (measured: distances up to 680). Damping by the mean eigenvalue takes
its place: on rows of about equal norm (digits, normalised features) no step of 100 at each of 1 to 19 rows went further
from Retrained than nothing done; on rows whose norms differ tenfold, many did."""


class Newton(UnlearningMethod):
    """A Newton step whose curvature comes from ``curvature.estimator``."""

    def __init__(self, curvature: CurvatureConfig, noise_sigma: float = 0.0) -> None:
        """Keep the settings.

        Args:
            curvature: Estimator, its settings and the regularisation.
            noise_sigma: Standard deviation of Gaussian noise added to every parameter.

        Raises:
            ConfigError: The noise is negative.
        """
        at_least("newton.noise_sigma", noise_sigma, 0.0)
        self.curvature = curvature
        self.noise_sigma = noise_sigma
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
        if curvature.estimator is Estimator.stored and not run.head.store_curvature:
            raise ConfigError(
                "curvature.estimator=stored needs head.store_curvature=true, set when the head is trained."
            )
        merged = {"curvature": curvature, "noise_sigma": run.newton.noise_sigma, **settings}
        return super().from_config(run, curvature, merged)

    def check(self, n_forget: int) -> None:
        """Refuse more folds than there are rows to forget.

        Raises:
            ConfigError: ``curvature.folds`` is above ``n_forget``.
        """
        if self._n_folds(n_forget) > n_forget:
            raise ConfigError(
                f"curvature.folds={self.curvature.folds} but there are only {n_forget} rows to forget; leave "
                "curvature.folds out, or give at most that many."
            )

    def _n_folds(self, n_forget: int) -> int:
        if self.estimator.is_exact:
            return 0
        if self.curvature.folds is None:
            return _FOLDS if n_forget >= _FEW else 0
        return self.curvature.folds

    def unlearn(self, request: ForgetRequest, tools: Tools, retained: RetainedSet | None = None) -> Unlearned:
        """Estimate, regularise, step.

        The step is withheld, and the head returned untouched and without noise, if the forget set is unlike a random
        sample of the training data or the step is predicted to be no better than nothing, unless ``curvature.force``.

        Raises:
            ConfigError: More folds than forget rows.
            SingularHessianError: The estimate cannot be inverted.
            SolverError: The fit failed.
        """
        self.check(request.n_forget)
        given, request = request.head, request.in_float64()
        head, estimator, rule = request.head, self.estimator, self.curvature
        ratio = None if estimator.is_exact else sampling_ratio(request)
        if ratio is not None and ratio > UNLIKE_A_SAMPLE and not rule.force:
            return _withheld(given, None, {"sampling_ratio": ratio}, [_unlike_a_sample(ratio)])
        n_folds = self._n_folds(request.n_forget)
        complaints = 0
        folds: list[list[Fold]] = []
        if n_folds > 0:
            observation, folds, complaints = cross_validate(estimator, request, tools, n_folds)
        else:
            observation = estimator.observe(request.for_curvature(), tools, retained)
        floor = head.l2 if rule.regularization is Regularization.none else 0.0
        noise = noise_factor(n_folds, request.n_forget / head.n_train) if folds else 1.0
        candidates = []
        for index, weight in enumerate(estimator.weights if folds else (estimator.blind_weight,)):
            estimate = estimator.estimate(observation, request, weight)
            inverse = SpectralInverse(estimate.hessian_EE, head.regularized_E)
            choice = self._choose(inverse, folds[index] if folds else [], noise, floor)
            candidates.append((choice, estimate, inverse))
        choice, estimate, inverse = max(candidates, key=lambda candidate: candidate[0].predicted_gain)
        step = choice.scale * inverse.solve(request.newton_gradient(), choice.rho, floor=floor)
        details = {"rho": choice.rho, "step_scale": choice.scale, "damped": choice.rho > 0, **estimate.details}
        if not estimator.is_exact:
            details["sampling_ratio"] = ratio
        gain = None
        if folds and not (ratio is not None and ratio > UNLIKE_A_SAMPLE):
            gain = choice.predicted_gain * request.step_ratio**2 - self._noise_cost(estimate, head.n_classes)
        remarks = self._remarks(ratio, gain, request.n_forget)
        if estimate.note:
            remarks.append(estimate.note)
        if complaints:
            remarks.append(f"{complaints} of the fits to {n_folds} folds did not converge, so the choice may be off")
        if gain is not None and gain <= 0 and not rule.force:
            return _withheld(given, gain, details, [NO_GAIN, *remarks])
        parameters = head.parameters_CE + request.step_ratio * step
        if self.noise_sigma > 0:
            drawn = torch.randn(parameters.shape, generator=tools.generator("noise"), dtype=torch.float64)
            parameters = parameters + self.noise_sigma * drawn.to(parameters)
        return Unlearned(
            given.after_unlearning(parameters.to(given.parameters_CE.dtype), request.n_retain),
            predicted_gain=gain,
            details=details,
            note="; ".join(remarks) or None,
        )

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

    def _choose(self, inverse: SpectralInverse, folds: list[Fold], noise: float, floor: float) -> StepChoice:
        rule = self.curvature.regularization
        if rule is Regularization.cross_validated and folds:
            return choose_step(folds, noise)
        rho = {
            Regularization.fixed: self.curvature.rho,
            Regularization.mean_eigenvalue: inverse.mean_eigenvalue,
            Regularization.cross_validated: inverse.mean_eigenvalue,  # too few rows for folds
        }.get(rule, 0.0)
        return predict_gain(folds, rho, noise, floor=floor) if folds else StepChoice(rho, 1.0, 0.0)

    def _noise_cost(self, estimate: CurvatureEstimate, n_classes: int) -> float:
        """Expected squared distance that the Gaussian noise adds: ``sigma^2 C tr(H)``."""
        return self.noise_sigma**2 * n_classes * float(estimate.hessian_EE.trace())


def _withheld(
    head: LinearHead, gain: float | None, details: dict[str, float | int | str | bool | None], reasons: list[str]
) -> Unlearned:
    note = f"not applied: {'; '.join(reasons)} (curvature.force=true applies it)"
    return Unlearned(head, applied=False, predicted_gain=gain, details=details, note=note)


def _unlike_a_sample(ratio: float) -> str:
    times = "far more than" if ratio == math.inf else f"{ratio:.0f} times what"
    return (
        f"the forget set is unlike a random sample of the training data (its gradient is {times} sampling explains), "
        "so its curvature does not stand for the rest and no gain can be predicted"
    )
