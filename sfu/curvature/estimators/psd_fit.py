r"""The paper's estimator: a PSD-constrained least-squares fit to what perturbed heads show of the forget set.

.. math:: \min_{X \succeq L} \frac1Q \sum_i (\tfrac12 d_i^T X d_i - t_i)^2 + \tfrac\mu2 \|X - X_0\|_F^2
          \quad\text{or}\quad \frac1Q \sum_i \|X d_i - h_i\|^2 + \tfrac\mu2 \|X - X_0\|_F^2

for loss and gradient measurements. The targets of loss measurements are :math:`t_i = \Delta J_i \pm g_f^T d_i`: plus as
published (``gradient_term=paper``, which keeps an odd term :math:`2 g_f^T d`), minus as the expansion of J_f has it
(``exact``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfu.curvature.estimators.base import CurvatureEstimate, CurvatureEstimator
from sfu.curvature.measurements import Observations, draw_perturbations, observe
from sfu.curvature.psd_fit import GradientMeasurements, LossMeasurements, PsdFitResult, Status, fit_psd
from sfu.errors import SolverError
from sfu.settings import GradientTerm, LowerBound, Measurement, Pairs, Prior, Solver
from sfu.unlearning.method import RetainedSet, Tools
from sfu.unlearning.request import ForgetRequest

if TYPE_CHECKING:
    from sfu.settings import CurvatureConfig

_SLOPE_SIGN = {GradientTerm.paper: 1.0, GradientTerm.exact: -1.0, GradientTerm.none: 0.0}


class PsdFit(CurvatureEstimator[Observations]):
    """Fits ``X >= L`` to loss or gradient measurements of the forget set, near a prior X0."""

    def __init__(self, config: CurvatureConfig) -> None:
        super().__init__(config)
        self._drawn: tuple[tuple[object, ...], Tensor] | None = None

    def observe(self, request: ForgetRequest, tools: Tools, retained: RetainedSet | None = None) -> Observations:
        """Perturb the head and observe the forget rows."""
        return observe(self.config, request, self._perturbations(request, tools))

    def _perturbations(self, request: ForgetRequest, tools: Tools) -> Tensor:
        """Drawn once for all folds of a request: ``[P, C, E]`` on the head's device, in its dtype."""
        like = request.head.parameters_CE
        key = (tools.seeds.get("perturbation"), like.shape, like.device, like.dtype)
        if self._drawn is None or self._drawn[0] != key:
            n_classes, width = like.shape
            delta = draw_perturbations(self.config, n_classes, width, tools.generator("perturbation"))
            self._drawn = (key, delta.to(like))
        return self._drawn[1]

    def merge(self, observations: Sequence[Observations]) -> Observations:
        """Observations of the union."""
        return Observations.merge(observations)

    def estimate(
        self, observation: Observations, request: ForgetRequest, weight: float | None = None
    ) -> CurvatureEstimate:
        """Fit.

        Raises:
            SolverError: The fit failed outright (no finite X).
        """
        config = self.config
        bound = self._lower_bound(observation, request)
        if config.measurement is Measurement.gradient:
            measurements: LossMeasurements | GradientMeasurements = GradientMeasurements.from_pairs(
                observation.delta_QE, observation.response
            )
        else:
            measurements = LossMeasurements(observation.delta_QE, self._targets(observation))
        result = self._solve(measurements, bound, self._prior(observation, request))
        hessian = result.value_DD
        if hessian is None:
            raise SolverError(result.message)
        if config.subtract_lower_bound:
            hessian = hessian - _as_matrix(bound, hessian)
        converged = result.status is Status.CONVERGED
        details = {
            "measurements": observation.delta_QE.shape[0],
            "fit_status": result.status.value,
            "fit_iterations": result.iterations,
            "fit_objective": result.objective,
            "fit_gap": result.gap,
            "fit_seconds": result.seconds,
            "fit_algorithm": result.algorithm,
        }
        return CurvatureEstimate(hessian, details, None if converged else f"the fit did not converge: {result.message}")

    def _solve(
        self, measurements: LossMeasurements | GradientMeasurements, bound: float | Tensor, prior: float | Tensor
    ) -> PsdFitResult:
        config = self.config
        if config.solver is Solver.cvxpylayers:
            from sfu.curvature.psd_fit.reference import fit_psd_reference

            mu = config.prior_strength * _largest_curvature(measurements)
            return fit_psd_reference(measurements, mu=mu, lower_bound=bound, prior=prior)
        return fit_psd(
            measurements,
            lower_bound=bound,
            prior=prior,
            prior_strength=config.prior_strength,
            tolerance=config.tolerance,
            max_iterations=config.max_iterations,
            algorithm=config.solver.value,
        )

    def _targets(self, observation: Observations) -> Tensor:
        if self.config.pairs is Pairs.antithetic:  # the odd term has cancelled, whatever its sign
            return observation.response
        return observation.response + _SLOPE_SIGN[self.config.gradient_term] * observation.slope_Q

    def _lower_bound(self, observation: Observations, request: ForgetRequest) -> float | Tensor:
        head = request.head
        if self.config.lower_bound is LowerBound.zero:
            return 0.0
        if self.config.lower_bound is LowerBound.l2:
            return head.l2 * head.regularized_E if head.bias else head.l2
        share = request.n_forget / head.n_train
        return share * observation.moments.hessian(head.l2, head.regularized_E)

    def _prior(self, observation: Observations, request: ForgetRequest) -> float | Tensor:
        head = request.head
        if self.config.prior is Prior.zero:
            return 0.0
        if self.config.prior is Prior.l2:
            return head.l2 * head.regularized_E if head.bias else head.l2
        if self.config.prior is Prior.diagonal:
            return self._measured_diagonal(observation).clamp(min=head.l2)
        square = float(observation.delta_QE.square().sum(1).mean())
        if self.config.measurement is Measurement.gradient:
            along = float((observation.delta_QE * observation.response).sum(1).mean())
        else:
            along = 2.0 * float(self._targets(observation).mean())
        return max(along / square, head.l2)

    def _measured_diagonal(self, observation: Observations) -> Tensor:
        """The diagonal of the Hessian as measured, ``[E]``, by moments of the Gaussian perturbations."""
        square = observation.delta_QE.square()
        if self.config.measurement is Measurement.gradient:
            return (observation.delta_QE * observation.response).mean(0) / square.mean(0)
        targets = self._targets(observation)
        variance = self.config.scale**2
        return (targets @ (square - variance)) / (targets.shape[0] * variance**2)


def _largest_curvature(measurements: LossMeasurements | GradientMeasurements) -> float:
    """Largest eigenvalue of the data term's Hessian, to which ``prior_strength`` is relative."""
    if isinstance(measurements, GradientMeasurements):
        return 2.0 * float(torch.linalg.eigvalsh(measurements.gram_DD)[-1])
    products_PP = (measurements.delta_PD @ measurements.delta_PD.T).square() / 4
    return 2.0 * float(torch.linalg.eigvalsh(products_PP)[-1]) / products_PP.shape[0]


def _as_matrix(bound: float | Tensor, like: Tensor) -> Tensor:
    if isinstance(bound, float):
        return bound * torch.eye(like.shape[0], dtype=like.dtype, device=like.device)
    return torch.diag(bound) if bound.ndim == 1 else bound
