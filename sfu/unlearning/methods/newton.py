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

from sfu.curvature.cross_validation import cross_validate
from sfu.curvature.estimators.base import CurvatureEstimator
from sfu.curvature.estimators.registry import make_estimator
from sfu.curvature.regularization import Fold, StepChoice, choose_step, predict_gain
from sfu.curvature.spectral import SpectralInverse
from sfu.errors import ConfigError
from sfu.experiment.schema import Regularization
from sfu.unlearning.method import Access, RetainedSet, Tools, Unlearned, UnlearningMethod
from sfu.unlearning.request import ForgetRequest

if TYPE_CHECKING:
    from sfu.experiment.schema import CurvatureConfig, RunConfig


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
        if noise_sigma < 0:
            raise ConfigError(f"newton.noise_sigma={noise_sigma}; it must not be negative.")
        self.curvature = curvature
        self.noise_sigma = noise_sigma
        self.estimator: CurvatureEstimator[Any] = make_estimator(curvature)

    @property
    def access(self) -> Access:
        """That of the estimator."""
        return self.estimator.access

    @property
    def _cross_validates(self) -> bool:
        return self.curvature.folds > 0 and not self.estimator.is_exact

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
        if self._cross_validates and self.curvature.folds > n_forget:
            raise ConfigError(
                f"curvature.folds={self.curvature.folds} but there are only {n_forget} rows to forget; use at most "
                "that many folds, or curvature.folds=0 with curvature.regularization=none or fixed."
            )

    def unlearn(self, request: ForgetRequest, tools: Tools, retained: RetainedSet | None = None) -> Unlearned:
        """Estimate, regularise, step.

        Raises:
            ConfigError: More folds than forget rows.
            SingularHessianError: The estimate cannot be inverted.
            SolverError: The fit failed.
        """
        self.check(request.n_forget)
        head, estimator, rule = request.head, self.estimator, self.curvature
        if self._cross_validates:
            observation, folds = cross_validate(estimator, request, tools, rule.folds)
        else:
            observation, folds = estimator.observe(request, tools, retained), []
        floor = head.l2 if rule.regularization is Regularization.none else 0.0
        candidates = []
        for index, weight in enumerate(estimator.weights):
            estimate = estimator.estimate(observation, request, weight)
            inverse = SpectralInverse(estimate.hessian_EE, head.regularized_E)
            choice = self._choose(inverse, folds[index] if folds else [], floor)
            candidates.append((choice, estimate, inverse))
        choice, estimate, inverse = max(candidates, key=lambda candidate: candidate[0].predicted_gain)
        step = choice.scale * inverse.solve(request.newton_gradient(), choice.rho, floor=floor)
        gain = choice.predicted_gain * request.step_ratio**2 if folds else None
        details = {"rho": choice.rho, "step_scale": choice.scale, "damped": choice.rho > 0, **estimate.details}
        if gain is not None and gain <= 0 and not rule.force:
            note = "not applied: the step is predicted to be worse than nothing (curvature.force=true applies it)"
            return Unlearned(head, applied=False, predicted_gain=gain, details=details, note=note)
        remark = estimate.note
        if gain is not None and gain <= 0:
            remark = "predicted to be worse than nothing, and applied because curvature.force=true"
        parameters = head.parameters_CE + request.step_ratio * step
        if self.noise_sigma > 0:
            noise = torch.randn(parameters.shape, generator=tools.generator("noise"), dtype=torch.float64)
            parameters = parameters + self.noise_sigma * noise.to(parameters)
        return Unlearned(
            head.after_unlearning(parameters, request.n_retain), predicted_gain=gain, details=details, note=remark
        )

    def _choose(self, inverse: SpectralInverse, folds: list[Fold], floor: float) -> StepChoice:
        rule = self.curvature.regularization
        if rule is Regularization.cross_validated and folds:
            return choose_step(folds)
        rho = {
            Regularization.fixed: self.curvature.rho,
            Regularization.mean_eigenvalue: inverse.mean_eigenvalue,
        }.get(rule, 0.0)
        return predict_gain(folds, rho, floor=floor) if folds else StepChoice(rho, 1.0, 0.0)
