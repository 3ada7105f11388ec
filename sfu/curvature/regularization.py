r"""Damping rho and length c of the step, chosen by cross-validation on the forget set alone.

The step :math:`u = c (H + \rho R)^{-1} g` misses the exact one by :math:`u^T H_r u - 2 u^T g + const` in the
retain-Hessian norm. With the forget set in K folds, H and g are estimated on K - 1 of them and the error is scored with
the held-out fold's own Hessian, which is independent of u: an unbiased estimate of the error that asks nothing of the
source data. For every rho the best c is :math:`\langle u, g\rangle / \langle u, H u\rangle`. At the optimum the forget
gradient is sampling noise, of which K - 1 folds have more (squared) than the whole, by a known factor: the predicted
gain is scaled back by it. What is left of the training gradient after an early stop is known exactly and is not scaled.

All of it takes the forget set for a random sample of the training data; :mod:`sfu.curvature.sampling` tests that.

Shapes: K folds, M values of rho, C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sfu.operators.base import CurvatureOperator, DampedInverse

_GRID_POINTS = 81
_GRID_DECADES = (-6.0, 4.0)  # of the mean eigenvalue


@dataclass(frozen=True)
class Fold:
    """One fold of the forget set.

    Attributes:
        inverse: The estimate from the other folds, ready for any rho.
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
    """How to damp and scale the step, and what that is expected to bring.

    Attributes:
        rho: Damping.
        scale: c.
        predicted_gain: Expected reduction of the squared distance to Retrained in the retain-Hessian norm, for a step
            of ratio 1; negative if the step is expected to do harm.
    """

    rho: float
    scale: float
    predicted_gain: float


def fold_indices(n_rows: int, n_folds: int, generator: torch.Generator) -> list[Tensor]:
    """A random partition of ``range(n_rows)`` into ``n_folds`` parts of almost equal size."""
    return list(torch.randperm(n_rows, generator=generator).tensor_split(n_folds))


def noise_factor(n_folds: int, forget_share: float) -> float:
    """Squared sampling noise of the whole forget gradient over that of K - 1 folds, for draws without replacement.

    Args:
        n_folds: K.
        forget_share: N_f / N.
    """
    return (n_folds - 1) * (1 - forget_share) / (n_folds - forget_share * (n_folds - 1))


def choose_step(folds: Sequence[Fold], noise: float) -> StepChoice:
    """The rho of a wide grid, and its c, of smallest held-out error; ``noise`` is :func:`noise_factor`."""
    mean = sum(fold.inverse.mean_eigenvalue for fold in folds) / len(folds)
    rhos = (mean * torch.logspace(*_GRID_DECADES, _GRID_POINTS, dtype=torch.float64)).tolist()
    if all(fold.inverse.invertible for fold in folds):
        rhos = [0.0, *rhos]
    along_M, curved_M = _scores(folds, rhos)
    usable_M = (curved_M > 0) & (along_M > 0)
    if not bool(usable_M.any()):  # the gradient is zero: nothing to gain
        return StepChoice(rhos[-1], 0.0, 0.0)
    best = int(torch.where(usable_M, along_M.square() / curved_M, -1.0).argmax())
    along, curved = float(along_M[best]), float(curved_M[best])
    return StepChoice(rhos[best], along / curved, _gain(folds, along, curved, rhos[best], along / curved, noise, 0.0))


def predict_gain(folds: Sequence[Fold], rho: float, noise: float, *, floor: float = 0.0) -> StepChoice:
    """The expected gain of a given rho at c = 1."""
    along, curved = (float(score[0]) for score in _scores(folds, [rho], floor=floor))
    return StepChoice(rho, 1.0, _gain(folds, along, curved, rho, 1.0, noise, floor))


def _gain(
    folds: Sequence[Fold], along: float, curved: float, rho: float, scale: float, noise: float, floor: float
) -> float:
    """``2 c <u, g> - c^2 <u, H u>``, with the share that is sampling noise brought to the size of the whole set's."""
    signal = [replace(fold, gradient_CE=fold.signal_CE) for fold in folds]
    known, bent = (float(score[0]) for score in _scores(signal, [rho], floor=floor))
    whole, of_signal = 2 * scale * along - scale**2 * curved, 2 * scale * known - scale**2 * bent
    return noise * whole + (1 - noise) * of_signal


def _scores(folds: Sequence[Fold], rhos: list[float], *, floor: float = 0.0) -> tuple[Tensor, Tensor]:
    """Means over folds of ``<u, g>`` and ``<u, H_heldout u>`` at c = 1, ``[M]`` each."""
    along = torch.zeros(len(rhos), dtype=torch.float64)
    curved = torch.zeros_like(along)
    for fold in folds:
        gains, costs = fold.inverse.scores(fold.gradient_CE, rhos, fold.held_out, floor=floor)
        along += gains.double().cpu() / len(folds)
        curved += costs.double().cpu() / len(folds)
    return along, curved
