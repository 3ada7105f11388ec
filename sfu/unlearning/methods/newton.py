r"""One Newton step from the trained head towards the head that never saw the forget set.

.. math:: w_u = w^* + c \frac{N_f}{N_r} (H + \rho R)^{-1} \left(g_f - \frac{N}{N_f} g\right) \; (+ \sigma z)

With the retained data's Hessian (``curvature.estimator=exact``, Unlearned(+)) and c = 1, rho = 0 this is exact for the
quadratic loss. Otherwise H is estimated from the forget set (Unlearned(-)).

Source: "Towards Source-Free Machine Unlearning", CVPR 2025; the correction for the training gradient g and the choice
of rho and c are ours. Shapes: C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

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
from sfu.settings import Regularization
from sfu.unlearning.method import Access, RetainedSet, Tools, Unlearned, UnlearningMethod
from sfu.unlearning.request import ForgetRequest

if TYPE_CHECKING:
    from sfu.settings import CurvatureConfig, RunConfig

_FOLDS = 5
_FEW = 20
"""Below so many rows cross-validation is a gamble (measured: distances up to 680) and damping by the mean eigenvalue,
with which no step of 30 went further from Retrained than nothing done, takes its place unless folds are asked for."""


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

    @classmethod
    def from_config(cls, run: RunConfig, curvature: Any, settings: dict[str, Any]) -> Self:
        """Takes the row's curvature and the run's ``newton`` settings."""
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
        head, estimator, rule = request.head, self.estimator, self.curvature
        n_folds = self._n_folds(request.n_forget)
        if n_folds > 0:
            observation, folds = cross_validate(estimator, request, tools, n_folds)
        else:
            observation, folds = estimator.observe(request, tools, retained), []
        floor = head.l2 if rule.regularization is Regularization.none else 0.0
        noise = noise_factor(n_folds, request.n_forget / head.n_train) if folds else 1.0
        candidates = []
        for index, weight in enumerate(estimator.weights):
            estimate = estimator.estimate(observation, request, weight)
            inverse = SpectralInverse(estimate.hessian_EE, head.regularized_E)
            choice = self._choose(inverse, folds[index] if folds else [], noise, floor)
            candidates.append((choice, estimate, inverse))
        choice, estimate, inverse = max(candidates, key=lambda candidate: candidate[0].predicted_gain)
        step = choice.scale * inverse.solve(request.newton_gradient(), choice.rho, floor=floor)
        details = {"rho": choice.rho, "step_scale": choice.scale, "damped": choice.rho > 0, **estimate.details}
        gain, remarks = None, [estimate.note] if estimate.note else []
        if not estimator.is_exact:
            details["sampling_ratio"] = ratio = sampling_ratio(request)
            if folds:
                gain = choice.predicted_gain * request.step_ratio**2 - self._noise_cost(estimate, head.n_classes)
            doubt = _doubt(ratio, gain)
            if ratio is not None and ratio > UNLIKE_A_SAMPLE:
                gain = None
            if doubt and not rule.force:
                note = f"not applied: {doubt} (curvature.force=true applies it)"
                return Unlearned(head, applied=False, predicted_gain=gain, details=details, note=note)
            if doubt:
                remarks.append(f"applied because curvature.force=true, although {doubt}")
            elif ratio is not None and ratio > DOUBTFUL:
                remarks.append(
                    f"the forget set is not quite like a random sample (its gradient is {ratio:.0f} times what "
                    "sampling explains); take the predicted gain with caution"
                )
            elif gain is None and rule.regularization is Regularization.cross_validated:
                remarks.append(
                    f"{request.n_forget} rows are too few to cross-validate: damped by the mean eigenvalue instead"
                )
        parameters = head.parameters_CE + request.step_ratio * step
        if self.noise_sigma > 0:
            drawn = torch.randn(parameters.shape, generator=tools.generator("noise"), dtype=torch.float64)
            parameters = parameters + self.noise_sigma * drawn.to(parameters)
        return Unlearned(
            head.after_unlearning(parameters, request.n_retain),
            predicted_gain=gain,
            details=details,
            note="; ".join(remarks) or None,
        )

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


def _doubt(ratio: float | None, gain: float | None) -> str | None:
    """Why the step should not be trusted, if so."""
    if ratio is not None and ratio > UNLIKE_A_SAMPLE:
        return (
            f"the forget set is unlike a random sample of the training data (its gradient is {ratio:.0f} times what "
            "sampling explains), so its curvature does not stand for the rest and no gain can be predicted"
        )
    if gain is not None and gain <= 0:
        return "the step is predicted to be no better than nothing"
    return None
