r"""The paper's estimator: a PSD-constrained least-squares fit to what perturbed heads show of the forget set.

.. math:: \min_{X \succeq L} \frac1Q \sum_i (\tfrac12 d_i^T X d_i - t_i)^2 + \tfrac\mu2 \|X - X_0\|_F^2
          \quad\text{or}\quad \frac1Q \sum_i \|X d_i - h_i\|^2 + \tfrac\mu2 \|X - X_0\|_F^2

for loss and gradient measurements. The targets of loss measurements are :math:`t_i = \Delta J_i \pm g_f^T d_i`: plus as
published (``gradient_term=paper``, which keeps an odd term :math:`2 g_f^T d`), minus as the expansion of J_f has it
(``exact``).

One matrix is fitted under the quadratic loss; one a class where classes are separate, or their mean where all are
perturbed alike and one loss is seen; one over all parameters under softmax, up to 2048 of them. Beyond that gradients
would determine the closed form anyway, which takes the fit's place by products, and losses are fitted to the diagonal
blocks. A linearised head is fitted in a subspace (:mod:`sfu.curvature.subspace`).

Shapes: K problems of side S (see :mod:`sfu.curvature.measurements`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sfu.curvature.estimators.base import CurvatureEstimate, CurvatureEstimator, HessianObservation, merge_hessians
from sfu.curvature.measurements import Observations, default_scale, draw_perturbations, observe
from sfu.curvature.psd_fit import GradientMeasurements, LossMeasurements, PsdFitResult, Status, fit_psd
from sfu.curvature.subspace import make_basis, restrict
from sfu.errors import ConfigError, SolverError
from sfu.losses import Layout
from sfu.operators.explicit import ExplicitOperator
from sfu.operators.lifted import LiftedOperator
from sfu.request import ForgetRequest, MethodContext, RetainedSet, merge_requests
from sfu.settings import GradientTerm, LowerBound, Measurement, Pairs, Prior, Solver, Structure

if TYPE_CHECKING:
    from sfu.settings import CurvatureConfig

_SLOPE_SIGN = {GradientTerm.paper: 1.0, GradientTerm.exact: -1.0, GradientTerm.none: 0.0}


class Deferred(NamedTuple):
    """Rows that are looked at only when they are known to be all: the subspace depends on them."""

    request: ForgetRequest
    context: MethodContext


Observation = Observations | HessianObservation | Deferred


class PsdFit(CurvatureEstimator[Observation]):
    """Fits ``X >= L`` to loss or gradient measurements of the forget set, near a prior X0."""

    def __init__(self, config: CurvatureConfig) -> None:
        super().__init__(config)
        self._drawn: tuple[tuple[object, ...], Tensor] | None = None

    def observe(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None = None
    ) -> Observation:
        """Perturb the head and observe the forget rows; or their Hessian, where it takes the fit's place."""
        if request.head.layout is Layout.products:
            return Deferred(request, context)
        structure = self._structure(request)
        if structure is Structure.products:
            return HessianObservation(request.hessian(structure), request.weight)
        return observe(self.config, request, self._perturbations(request, context, structure), structure)

    def _structure(self, request: ForgetRequest) -> Structure:
        """What is fitted.

        Raises:
            ConfigError: Losses were to be fitted by products.
        """
        layout, config = request.head.layout, self.config
        by_loss = config.measurement is Measurement.loss
        if layout is Layout.blocks and by_loss and not config.per_class and config.structure is Structure.auto:
            return Structure.shared
        structure = self.plan(request).structure
        if structure is Structure.products and by_loss:
            if layout is Layout.dense and config.structure is Structure.auto:
                return Structure.blocks
            raise ConfigError(
                "curvature.measurement=loss fits matrices, which do not fit here: use "
                "curvature.measurement=gradient or curvature.estimator=closed_form."
            )
        return structure

    def _perturbations(self, request: ForgetRequest, context: MethodContext, structure: Structure) -> Tensor:
        """Drawn once for all folds of a request: ``[P, C, E]`` on the head's device, in its dtype."""
        like = request.head.parameters_CE
        key = (context.seeds.get("perturbation"), like.shape, like.device, like.dtype, structure)
        if self._drawn is None or self._drawn[0] != key:
            delta = draw_perturbations(
                self.config, like.shape[0], like.shape[1], context.generator("perturbation"), structure=structure,
                scale=default_scale(request),
            )  # fmt: skip
            self._drawn = (key, delta.to(like))
        return self._drawn[1]

    def merge(self, observations: Sequence[Observation]) -> Observation:
        """Observations of the union."""
        rest = [part for part in observations if isinstance(part, Deferred)]
        if rest:
            return Deferred(merge_requests([part.request for part in rest]), rest[0].context)
        seen = [part for part in observations if isinstance(part, HessianObservation)]
        return (
            merge_hessians(seen)
            if seen
            else Observations.merge([p for p in observations if isinstance(p, Observations)])
        )

    def estimate(
        self, observation: Observation, request: ForgetRequest, weight: float | None = None
    ) -> CurvatureEstimate:
        """Fit.

        Raises:
            SolverError: A fit failed outright (no finite X).
        """
        head = request.head
        if isinstance(observation, Deferred):
            return self._in_a_subspace(observation)
        if isinstance(observation, HessianObservation):
            return CurvatureEstimate(observation.operator, {"fit_status": "closed form, the limit of the fit"})
        results = [_Problem(self.config, observation, request, k) for k in range(observation.delta_KQS.shape[0])]
        matrices, fits = zip(*(problem.solve() for problem in results), strict=True)
        stacked, n_groups = torch.stack(matrices), head.parameters_CE.shape[0]
        if observation.structure is Structure.dense and head.loss.shift_invariant and n_groups > 1:
            stacked = _blind_to_shifts(stacked, head.objective().ridge_E, n_groups)
        operator = ExplicitOperator(stacked, n_groups, head.regularized_E)
        bad = [fit for fit in fits if fit.status is not Status.CONVERGED]
        worst = bad[0] if bad else fits[0]
        details = {
            "measurements": observation.delta_KQS.shape[1],
            "fits": len(fits),
            "fit_status": worst.status.value,
            "fit_iterations": max(fit.iterations for fit in fits),
            "fit_objective": sum(fit.objective for fit in fits),
            "fit_gap": max(fit.gap for fit in fits),
            "fit_seconds": sum(fit.seconds for fit in fits),
            "fit_algorithm": worst.algorithm,
        }
        return CurvatureEstimate(operator, details, f"the fit did not converge: {worst.message}" if bad else None)

    def _in_a_subspace(self, rest: Deferred) -> CurvatureEstimate:
        """The fit to the rows of a subspace, and the mean of what curvature there is elsewhere."""
        request, config = rest.request, self.config
        head, hessian = request.head, request.hessian(Structure.products)
        basis_KP = make_basis(
            config.subspace, request, hessian, config.dimension, rest.context.generator("perturbation")
        )  # fmt: skip
        small = restrict(request, basis_KP)
        inner = PsdFit(config)
        found = inner.estimate(inner.observe(small, rest.context), small)
        assert isinstance(found.operator, ExplicitOperator)
        size, dimension = head.parameters_CE.numel(), basis_KP.shape[0]
        left = hessian.trace() - found.operator.trace() - head.l2 * (size - dimension)
        places = max(1, min(size, request.labels_F.shape[0] * head.n_classes) - dimension)
        operator = LiftedOperator(
            basis_KP, found.operator, head.l2 + max(0.0, left) / places, head.parameters_CE.shape[0], head.regularized_E
        )
        return replace(found, operator=operator, details={**found.details, "subspace_dimension": dimension})


def _blind_to_shifts(blocks_1SS: Tensor, ridge_E: Tensor, n_classes: int) -> Tensor:
    """The fit, made flat where a softmax is known to be: equal columns change nothing but the regulariser.

    Without it the curvature along equal biases is the fit's rounding, and so is the inverse there.
    """
    ridge_SS = torch.diag(ridge_E.repeat(n_classes))
    data = (blocks_1SS[0] - ridge_SS).unflatten(0, (n_classes, -1)).unflatten(2, (n_classes, -1))
    data = data - data.mean(0, keepdim=True)
    data = data - data.mean(2, keepdim=True)
    return (data.flatten(2).flatten(0, 1) + ridge_SS)[None]


class _Problem:
    """One of the K fits."""

    def __init__(self, config: CurvatureConfig, seen: Observations, request: ForgetRequest, k: int) -> None:
        self.config, self._head = config, request.head
        self._delta_QS, self._response, self._slope_Q = seen.delta_KQS[k], seen.response[k], seen.slope_KQ[k]
        self._share = request.weight / request.head.total_weight
        self._regularized_S = request.head.regularized_E.repeat(
            self._delta_QS.shape[1] // request.head.regularized_E.shape[0]
        )
        self._hessian_SS: Tensor | None = None
        if seen.hessian is not None:
            assert isinstance(seen.hessian.operator, ExplicitOperator)
            self._hessian_SS = seen.hessian.operator.blocks_BKK[k]

    def solve(self) -> tuple[Tensor, PsdFitResult]:
        """The fitted matrix ``[S, S]`` and how it went.

        Raises:
            SolverError: There is no finite X.
        """
        bound = self._lower_bound()
        if self.config.measurement is Measurement.gradient:
            measurements: LossMeasurements | GradientMeasurements = GradientMeasurements.from_pairs(
                self._delta_QS, self._response
            )
        else:
            measurements = LossMeasurements(self._delta_QS, self.targets())
        result = self._fit(measurements, bound, self._prior())
        matrix = result.value_DD
        if matrix is None:
            raise SolverError(result.message)
        if self.config.subtract_lower_bound:
            matrix = matrix - _as_matrix(bound, matrix)
        return matrix, result

    def _fit(
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

    def targets(self) -> Tensor:
        """What ``1/2 d^T X d`` is to equal, ``[Q]``."""
        if self.config.pairs is Pairs.antithetic:  # the odd term has cancelled, whatever its sign
            return self._response
        return self._response + _SLOPE_SIGN[self.config.gradient_term] * self._slope_Q

    def _ridge(self) -> float | Tensor:
        return self._head.l2 * self._regularized_S if self._head.bias else self._head.l2

    def _lower_bound(self) -> float | Tensor:
        if self.config.lower_bound is LowerBound.zero:
            return 0.0
        if self.config.lower_bound is LowerBound.l2:
            return self._ridge()
        assert self._hessian_SS is not None
        return self._share * self._hessian_SS

    def _prior(self) -> float | Tensor:
        if self.config.prior is Prior.zero:
            return 0.0
        if self.config.prior is Prior.l2:
            return self._ridge()
        if self.config.prior is Prior.diagonal:
            return self.measured_diagonal().clamp(min=self._head.l2)
        square = float(self._delta_QS.square().sum(1).mean())
        if self.config.measurement is Measurement.gradient:
            along = float((self._delta_QS * self._response).sum(1).mean())
        else:
            along = 2.0 * float(self.targets().mean())
        return max(along / square, self._head.l2)

    def measured_diagonal(self) -> Tensor:
        """The diagonal of the Hessian as measured, ``[S]``, by moments of the Gaussian perturbations."""
        square = self._delta_QS.square()
        if self.config.measurement is Measurement.gradient:
            return (self._delta_QS * self._response).mean(0) / square.mean(0)
        targets, variance = self.targets(), float(square.mean())
        if self.config.scale is not None:
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
