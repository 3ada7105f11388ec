r"""The paper's estimator: a PSD-constrained fit to losses or gradients of the forget set at perturbed heads.

.. math:: \min_{X \succeq L} \frac1Q \sum_i (\tfrac12 d_i^T X d_i - t_i)^2 + \tfrac\mu2 \|X - X_0\|_F^2
          \quad\text{or}\quad \frac1Q \sum_i \|X d_i - h_i\|^2 + \tfrac\mu2 \|X - X_0\|_F^2

for loss and gradient measurements. The targets of loss measurements are :math:`t_i = \Delta J_i \pm g_f^T d_i`: plus as
published (``gradient_term=paper``, which keeps an odd term :math:`2 g_f^T d`), minus as the expansion of J_f has it
(``exact``).

Gradients at enough perturbed heads determine the forget set's Hessian: the fit returns it, up to the weight of the
prior. If ``solver`` and (where gradients are only nearly linear) ``scale`` are left to sfu, it computes that Hessian
instead. Under the Huberised hinge, whose gradients have corners, it fits.

Under the quadratic loss one matrix is fitted. Under losses that are separate for each class, each class has its own
matrix, or all share their mean if they share perturbations and one loss is observed. Under softmax one matrix over all
parameters is fitted, up to 2048 of them. Beyond that, products with the Hessian replace a fit to gradients, and losses
are fitted to the diagonal blocks. A linearised head is fitted in a subspace
(:mod:`sfu.curvature.subspace`).

Shapes: K problems of side S (see :mod:`sfu.curvature.observations`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from sfu.curvature.estimators.base import CurvatureEstimate, CurvatureEstimator
from sfu.curvature.observations import (
    HessianObservation,
    Observations,
    default_scale,
    draw_perturbations,
    enough_gradients,
    merge_hessians,
    observe,
)
from sfu.curvature.psd_fit import GradientMeasurements, LossMeasurements, Measurements, PsdFitResult, Status, fit_psd
from sfu.curvature.psd_fit.problem import dense, symmetric_term
from sfu.curvature.settings import GradientTerm, LowerBound, Measurement, Pairs, Prior, PsdFitSettings, Solver
from sfu.curvature.subspace import make_basis, restrict
from sfu.errors import ConfigError, SolverError
from sfu.lazy import torch
from sfu.losses.base import Layout
from sfu.operators.explicit import ExplicitOperator
from sfu.operators.lifted import LiftedOperator
from sfu.operators.structure import Structure
from sfu.request import ForgetRequest, MethodContext, Retained, merge_requests

if TYPE_CHECKING:
    from torch import Tensor

CLOSED_FORM = "closed form: gradients at enough perturbed heads determine it"
_WEAK = 1e-6
"""A prior of this strength, or less, does not count."""
_SLOPE_SIGN = {GradientTerm.paper: 1.0, GradientTerm.exact: -1.0, GradientTerm.none: 0.0}


class Deferred(NamedTuple):
    """Rows to be observed once all of them are known, because the subspace depends on them."""

    request: ForgetRequest
    context: MethodContext


Observation = Observations | HessianObservation | Deferred


class PsdFit(CurvatureEstimator[PsdFitSettings, Observation], name="psd_fit"):
    """Fits ``X >= L`` to loss or gradient measurements of the forget set, near a prior X0."""

    def __init__(self, settings: PsdFitSettings) -> None:
        super().__init__(settings)
        self._drawn: tuple[tuple[object, ...], Tensor] | None = None

    def observe(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> Observation:
        if request.head.layout is Layout.products:
            return Deferred(request, context)
        structure = self._structure(request)
        if structure is Structure.products or self.is_forget_hessian(request):
            return HessianObservation(request.hessian(structure), request.weight)
        return observe(self.settings, request, self._perturbations(request, context, structure), structure)

    def is_forget_hessian(self, request: ForgetRequest) -> bool:
        """Whether gradients determine the forget set's Hessian, to which the fit adds nothing."""
        settings, head = self.settings, request.head
        if settings.measurement is Measurement.loss or head.layout is Layout.products:
            return False
        if settings.solver is not Solver.auto or settings.prior_strength > _WEAK or settings.subtract_lower_bound:
            return False
        change = head.loss.constants.curvature_lipschitz
        if change == math.inf or (change > 0 and settings.scale is not None):
            return False
        (n_classes, width), structure = head.parameters_CE.shape, self._plan(request).structure
        enough = enough_gradients(settings, n_classes, width, structure)
        return structure is Structure.products or (settings.perturbations or enough) >= enough

    def _structure(self, request: ForgetRequest) -> Structure:
        """Return the structure to fit.

        Raises:
            ConfigError: The matrix would not fit, and losses cannot be fitted by products.
        """
        layout, settings = request.head.layout, self.settings
        by_loss = settings.measurement is Measurement.loss
        if layout is Layout.blocks and by_loss and not settings.per_class and settings.structure is Structure.auto:
            return Structure.shared
        structure = self.plan(request).structure
        if structure is Structure.products and by_loss:
            if layout is Layout.dense and settings.structure is Structure.auto:
                return Structure.blocks
            raise ConfigError(
                "curvature.measurement=loss fits explicit matrices, and this head can only be handled by products. Use "
                "curvature.measurement=gradient or curvature.estimator=closed_form."
            )
        return structure

    def _perturbations(self, request: ForgetRequest, context: MethodContext, structure: Structure) -> Tensor:
        """Draw ``[P, C, E]`` once for all folds of a request, on the head's device and in its dtype."""
        like = request.head.parameters_CE
        key = (context.seeds.get("perturbation"), like.shape, like.device, like.dtype, structure)
        if self._drawn is None or self._drawn[0] != key:
            delta = draw_perturbations(
                self.settings, like.shape[0], like.shape[1], context.generator("perturbation"), structure=structure,
                scale=default_scale(request),
            )  # fmt: skip
            self._drawn = (key, delta.to(like))
        return self._drawn[1]

    def merge(self, observations: Sequence[Observation]) -> Observation:
        deferred = [part for part in observations if isinstance(part, Deferred)]
        if deferred:
            return Deferred(merge_requests([part.request for part in deferred]), deferred[0].context)
        hessians = [part for part in observations if isinstance(part, HessianObservation)]
        if hessians:
            return merge_hessians(hessians)
        return Observations.merge([part for part in observations if isinstance(part, Observations)])

    def estimate(self, observation: Observation, request: ForgetRequest) -> CurvatureEstimate:
        head = request.head
        if isinstance(observation, Deferred):
            return self._in_a_subspace(observation)
        if isinstance(observation, HessianObservation):
            return CurvatureEstimate(observation.operator, {"fit_status": CLOSED_FORM})
        results = [FitProblem(self.settings, observation, request, k) for k in range(observation.delta_KQS.shape[0])]
        matrices, fits = zip(*(problem.solve() for problem in results), strict=True)
        stacked, n_groups = torch.stack(matrices), head.parameters_CE.shape[0]
        if observation.structure is Structure.dense and head.loss.shift_invariant and n_groups > 1:
            stacked = _without_shifts(stacked, head.objective().ridge_E, n_groups)
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

    def _in_a_subspace(self, deferred: Deferred) -> CurvatureEstimate:
        """Fit in a subspace; elsewhere the curvature is the mean of what remains of the trace."""
        request, settings = deferred.request, self.settings
        head, hessian = request.head, request.hessian(Structure.products)
        drawn = deferred.context.generator("perturbation")
        basis_KP = make_basis(settings.subspace, request, hessian, settings.dimension, drawn)
        small = restrict(request, basis_KP)
        inner = PsdFit(settings)
        found = inner.estimate(inner.observe(small, deferred.context), small)
        assert isinstance(found.operator, ExplicitOperator)
        size, dimension = head.parameters_CE.numel(), basis_KP.shape[0]
        left = hessian.trace() - found.operator.trace() - head.l2 * (size - dimension)
        places = max(1, min(size, request.labels_F.shape[0] * head.n_classes) - dimension)
        operator = LiftedOperator(
            basis_KP, found.operator, head.l2 + max(0.0, left) / places, head.parameters_CE.shape[0], head.regularized_E
        )
        return replace(found, operator=operator, details={**found.details, "subspace_dimension": dimension})


def _without_shifts(blocks_1SS: Tensor, ridge_E: Tensor, n_classes: int) -> Tensor:
    """Remove the fit's curvature along shifts common to all classes, which a softmax does not have.

    Without this, the curvature along equal biases would be rounding error, and its inverse meaningless.
    """
    ridge_SS = torch.diag(ridge_E.repeat(n_classes))
    data = (blocks_1SS[0] - ridge_SS).unflatten(0, (n_classes, -1)).unflatten(2, (n_classes, -1))
    data = data - data.mean(0, keepdim=True)
    data = data - data.mean(2, keepdim=True)
    return (data.flatten(2).flatten(0, 1) + ridge_SS)[None]


class FitProblem:
    """One of the K fits."""

    def __init__(self, settings: PsdFitSettings, observed: Observations, request: ForgetRequest, k: int) -> None:
        self.settings, self._head = settings, request.head
        self._delta_QS, self._response = observed.delta_KQS[k], observed.response[k]
        self._slope_Q = observed.slope_KQ[k]
        self._share = request.weight / request.head.total_weight
        regularized_E = request.head.regularized_E
        regularized_S = regularized_E.repeat(self._delta_QS.shape[1] // regularized_E.shape[0])
        self._ridge = request.head.l2 * regularized_S if request.head.bias else request.head.l2
        self._hessian_SS: Tensor | None = None
        if observed.hessian is not None:
            assert isinstance(observed.hessian.operator, ExplicitOperator)
            self._hessian_SS = observed.hessian.operator.blocks_BKK[k]

    def solve(self) -> tuple[Tensor, PsdFitResult]:
        """Return the fitted matrix ``[S, S]`` and the result of the fit.

        Raises:
            SolverError: The fit found no finite X.
        """
        bound = self._lower_bound()
        if self.settings.measurement is Measurement.gradient:
            measurements: Measurements = GradientMeasurements.from_pairs(self._delta_QS, self._response)
        else:
            measurements = LossMeasurements(self._delta_QS, self.targets())
        result = self._fit(measurements, bound, self.prior())
        matrix = result.value_DD
        if matrix is None:
            raise SolverError(result.message)
        if self.settings.subtract_lower_bound:
            matrix = matrix - dense(symmetric_term("lower_bound", bound, matrix.shape[0]), matrix)
        return matrix, result

    def _fit(self, measurements: Measurements, bound: float | Tensor, prior: float | Tensor) -> PsdFitResult:
        settings = self.settings
        if settings.solver is Solver.cvxpylayers:
            from sfu.curvature.psd_fit.conic import fit_psd_conic

            mu = settings.prior_strength * _largest_curvature(measurements)
            limit = {} if settings.max_iterations is None else {"iterations": settings.max_iterations}
            return fit_psd_conic(
                measurements, mu=mu, lower_bound=bound, prior=prior, tolerance=settings.tolerance, **limit
            )
        return fit_psd(
            measurements,
            lower_bound=bound,
            prior=prior,
            prior_strength=settings.prior_strength,
            tolerance=settings.tolerance,
            max_iterations=settings.max_iterations,
            algorithm=settings.solver.value,
        )

    def targets(self) -> Tensor:
        """The values that ``1/2 d^T X d`` should take, ``[Q]``."""
        if self.settings.pairs is Pairs.antithetic:  # the odd term has cancelled, whatever its sign
            return self._response
        return self._response + _SLOPE_SIGN[self.settings.gradient_term] * self._slope_Q

    def _lower_bound(self) -> float | Tensor:
        if self.settings.lower_bound is LowerBound.zero:
            return 0.0
        if self.settings.lower_bound is LowerBound.l2:
            return self._ridge
        assert self._hessian_SS is not None
        return self._share * self._hessian_SS

    def prior(self) -> float | Tensor:
        if self.settings.prior is Prior.zero:
            return 0.0
        if self.settings.prior is Prior.l2:
            return self._ridge
        if self.settings.prior is Prior.diagonal:
            return self.measured_diagonal().clamp(min=self._head.l2)
        square = float(self._delta_QS.square().sum(1).mean())
        if self.settings.measurement is Measurement.gradient:
            along = float((self._delta_QS * self._response).sum(1).mean())
        else:
            along = 2.0 * float(self.targets().mean())
        return max(along / square, self._head.l2)

    def measured_diagonal(self) -> Tensor:
        """The diagonal of the Hessian as measured, ``[S]``, by moments of the Gaussian perturbations."""
        square = self._delta_QS.square()
        if self.settings.measurement is Measurement.gradient:
            return (self._delta_QS * self._response).mean(0) / square.mean(0)
        targets, variance = self.targets(), float(square.mean())
        if self.settings.scale is not None:
            variance = self.settings.scale**2
        return (targets @ (square - variance)) / (targets.shape[0] * variance**2)


def _largest_curvature(measurements: Measurements) -> float:
    """Return the largest eigenvalue of the data term's Hessian, to which ``prior_strength`` is relative."""
    if isinstance(measurements, GradientMeasurements):
        return 2.0 * float(torch.linalg.eigvalsh(measurements.gram_DD)[-1])
    products_PP = (measurements.delta_PD @ measurements.delta_PD.T).square() / 4
    return 2.0 * float(torch.linalg.eigvalsh(products_PP)[-1]) / products_PP.shape[0]
