r"""Choose the damping rho and the length c of the step by cross-validation on the forget set alone.

The step :math:`u = c (H + \rho R)^{-1} g` misses the ideal one by :math:`u^T H_r u - 2 u^T g + const` in the
retain-Hessian norm. The forget set is split into K folds. H and g are estimated on K - 1 of them, and the error is
scored with the held-out fold's own Hessian, which is independent of u: an unbiased estimate of the error that needs no
source data. For every rho the best c is :math:`\langle u, g\rangle / \langle u, H u\rangle`.

At the optimum the forget gradient is sampling noise, of which K - 1 folds have more (squared) than the whole set, by a
known factor, so the predicted gain is scaled down by it. The part of the gradient that is not noise is not scaled: what
an early stop left of the training gradient, and the -b/V of objective perturbation.

All of this takes the forget set for a random sample of the training data; :mod:`sfu.curvature.sampling` tests that.

Shapes: K folds, M values of rho, C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from sfu.curvature.estimators.base import CurvatureEstimator
from sfu.curvature.observations import HessianObservation
from sfu.lazy import torch
from sfu.losses.base import Layout
from sfu.operators.base import CurvatureOperator, DampedInverse
from sfu.operators.galerkin import refine, share_subspace
from sfu.operators.products import ProductOperator
from sfu.operators.structure import Structure
from sfu.request import ForgetRequest, MethodContext

if TYPE_CHECKING:
    from torch import Tensor

_GRID_POINTS = 81
_NO_SIGNAL = 1e-6  # of the gradient; it counts by its square
_REFINEMENTS = 30
_GRID_DECADES = (-6.0, 4.0)  # of the mean eigenvalue


@dataclass(frozen=True)
class Fold:
    """One fold of the forget set.

    Attributes:
        inverse: The inverse estimated from the other folds, ready for any rho.
        gradient_CE: Right-hand side of the Newton step from the other folds.
        signal_CE: The part of it that is not sampling noise: ``g - b / V - (V / V_f) g`` for the stored training
            gradient g and the b of objective perturbation, if there was any.
        held_out: This fold's own Hessian.
    """

    inverse: DampedInverse
    gradient_CE: Tensor
    signal_CE: Tensor
    held_out: CurvatureOperator


@dataclass(frozen=True)
class StepChoice:
    """How to damp (rho) and scale (c) the step, and its expected gain.

    The gain is the reduction of the squared distance to Retrained in the retain-Hessian norm, for a step of ratio
    V_f / V_r = 1; negative if the step is expected to do harm.
    """

    rho: float
    scale: float
    gain: float


class Validation(NamedTuple):
    """What cross-validation observed."""

    observation: Any  # of the whole forget set
    folds: list[list[Fold]]  # for each of the estimator's weights
    failed_fits: int  # how many of the folds' estimates came with a note


def cross_validate(
    estimator: CurvatureEstimator[Any, Any], request: ForgetRequest, context: MethodContext, n_folds: int
) -> Validation:
    """Split the forget set at random (seed ``folds``) and, for every fold, estimate the curvature from the others.

    A fold is scored with its own Hessian: one block under the quadratic loss, products with its rows otherwise.
    """
    head, total = request.head, request.weight
    parts = [request.rows(index) for index in fold_indices(request.n_forget, n_folds, context.generator("folds"))]
    steps = n_folds * (1 + len(estimator.weights))
    observations = []
    for done, part in enumerate(parts, start=1):
        observations.append(estimator.observe(part.for_curvature(), context))
        context.report(done, steps)
    held_out = [_own_hessian(part, seen) for part, seen in zip(parts, observations, strict=True)]
    sums = torch.stack([part.forget_gradient() * part.weight for part in parts])
    correction = (head.total_weight / total) * head.gradient_CE
    gradients = [
        (sums.sum(0) - own_CE) / (total - part.weight) - correction for own_CE, part in zip(sums, parts, strict=True)
    ]
    folds: list[list[Fold]] = [[] for _ in estimator.weights]
    signal_CE = head.rows_gradient_CE - correction
    if estimator.is_forget_hessian(request) and (found := _in_a_subspace(observations, gradients, held_out)):
        inverses, whole = found
        folds[0] = [Fold(*each) for each in zip(inverses, gradients, [signal_CE] * n_folds, held_out, strict=True)]
        return Validation(whole, folds, 0)
    failed_fits = 0
    for k, gradient in enumerate(gradients):
        others = estimator.merge([observations[j] for j in range(n_folds) if j != k])
        for index, weight in enumerate(estimator.weights):
            estimate = estimator.estimate(others, request, weight)
            failed_fits += estimate.note is not None
            folds[index].append(Fold(estimate.operator.damped(), gradient, signal_CE, held_out[k]))
            context.report(n_folds + k * len(folds) + index + 1, steps)
    return Validation(estimator.merge(observations), folds, failed_fits)


def _own_hessian(part: ForgetRequest, observation: Any) -> CurvatureOperator:
    """Return the Hessian of a fold's own rows, without views; the observation may be it already."""
    seen = observation.operator if isinstance(observation, HessianObservation) else None
    by_products = isinstance(seen, ProductOperator) or part.head.layout is not Layout.shared
    structure = Structure.products if by_products else Structure.shared
    if seen is not None and seen.structure == structure.value and part.views_VFD is None:
        return seen
    return part.hessian(structure)


def _in_a_subspace(
    observations: Sequence[HessianObservation], gradients: Sequence[Tensor], held_out: Sequence[CurvatureOperator]
) -> tuple[Sequence[DampedInverse], HessianObservation] | None:
    """Return the folds' inverses and the whole set's Hessian by products in one subspace, if they are products.

    Where the classes share all parameters, they need another way.
    """
    own = [part.operator for part in observations if isinstance(part.operator, ProductOperator)]
    scored = [operator for operator in held_out if isinstance(operator, ProductOperator)]
    if len(own) < len(observations) or own[0].shared:
        return None
    weights = [part.weight for part in observations]
    inverses, whole = share_subspace(own, weights, gradients, scored)
    return inverses, HessianObservation(whole, sum(weights))


def fold_indices(n_rows: int, n_folds: int, generator: torch.Generator) -> list[Tensor]:
    """Return a random partition of ``range(n_rows)`` into ``n_folds`` parts of almost equal size."""
    return list(torch.randperm(n_rows, generator=generator).tensor_split(n_folds))


def noise_factor(n_folds: int, forget_share: float) -> float:
    """Return the squared sampling noise of the whole forget gradient over that of K - 1 folds.

    ``forget_share`` is N_f / N; the rows are drawn without replacement.
    """
    return (n_folds - 1) * (1 - forget_share) / (n_folds - forget_share * (n_folds - 1))


def choose_step(folds: Sequence[Fold], noise: float) -> StepChoice:
    """Return the rho of a wide grid, and its c, with the smallest held-out error; ``noise`` is :func:`noise_factor`."""
    mean = sum(fold.inverse.mean_eigenvalue for fold in folds) / len(folds)
    rhos = (mean * torch.logspace(*_GRID_DECADES, _GRID_POINTS, dtype=torch.float64)).tolist()
    if all(fold.inverse.invertible for fold in folds):
        rhos = [0.0, *rhos]
    choice = _best(folds, rhos, noise)
    for _ in range(_REFINEMENTS):
        if not _refine(folds, choice.rho):
            break
        choice = _best(folds, rhos, noise)
    return choice


def _refine(folds: Sequence[Fold], rho: float) -> bool:
    return refine([fold.inverse for fold in folds], [fold.gradient_CE for fold in folds], rho)


def _best(folds: Sequence[Fold], rhos: list[float], noise: float) -> StepChoice:
    along_M, curved_M = _scores(folds, rhos)
    usable_M = (curved_M > 0) & (along_M > 0)
    if not bool(usable_M.any()):  # the gradient is zero: nothing to gain
        return StepChoice(rhos[-1], 0.0, 0.0)
    best = int(torch.where(usable_M, along_M.square() / curved_M, -1.0).argmax())
    along, curved = float(along_M[best]), float(curved_M[best])
    return StepChoice(rhos[best], along / curved, _gain(folds, along, curved, rhos[best], along / curved, noise, 0.0))


def predict_gain(folds: Sequence[Fold], rho: float, noise: float, *, floor: float = 0.0) -> StepChoice:
    """Return a given rho at c = 1, with its expected gain."""
    for _ in range(_REFINEMENTS):
        if not _refine(folds, rho):
            break
    along, curved = (float(score[0]) for score in _scores(folds, [rho], floor=floor))
    return StepChoice(rho, 1.0, _gain(folds, along, curved, rho, 1.0, noise, floor))


def _gain(
    folds: Sequence[Fold], along: float, curved: float, rho: float, scale: float, noise: float, floor: float
) -> float:
    """Return ``2 c <u, g> - c^2 <u, H u>``, with its sampling noise scaled to that of the whole set."""
    whole = 2 * scale * along - scale**2 * curved
    if all(float(fold.signal_CE.norm()) <= _NO_SIGNAL * float(fold.gradient_CE.norm()) for fold in folds):
        return noise * whole
    signal = [replace(fold, gradient_CE=fold.signal_CE) for fold in folds]
    signal_along, signal_curved = (float(score[0]) for score in _scores(signal, [rho], floor=floor))
    of_signal = 2 * scale * signal_along - scale**2 * signal_curved
    return noise * whole + (1 - noise) * of_signal


def _scores(folds: Sequence[Fold], rhos: list[float], *, floor: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the means over folds of ``<u, g>`` and ``<u, H_heldout u>`` at c = 1, ``[M]`` each."""
    along = torch.zeros(len(rhos), dtype=torch.float64)
    curved = torch.zeros_like(along)
    for fold in folds:
        gains, costs = fold.inverse.scores(fold.gradient_CE, rhos, fold.held_out, floor=floor)
        along += gains.double().cpu() / len(folds)
        curved += costs.double().cpu() / len(folds)
    return along, curved
