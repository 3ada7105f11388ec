"""Observe every fold of the forget set once, estimate the curvature without each: the folds that choose the step.

Shapes: C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

from typing import Any

import torch

from sfu.curvature.estimators.base import CurvatureEstimator
from sfu.curvature.regularization import Fold, fold_indices
from sfu.curvature.spectral import SpectralInverse
from sfu.unlearning.method import Tools
from sfu.unlearning.request import ForgetRequest


def cross_validate(
    estimator: CurvatureEstimator[Any], request: ForgetRequest, tools: Tools, n_folds: int
) -> tuple[Any, list[list[Fold]], int]:
    """Split the forget set at random (seed ``folds``) and estimate on all folds but one, for every fold.

    Returns:
        The observation of the whole forget set, the folds for each of ``estimator.weights``, and how many of the folds'
        estimates came with a complaint (a fit that did not converge).
    """
    head, total = request.head, request.n_forget
    parts = [request.rows(index) for index in fold_indices(total, n_folds, tools.generator("folds"))]
    steps = n_folds * (1 + len(estimator.weights))
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if tools.progress is not None:
            tools.progress(done, steps)

    seen = []
    for part in parts:
        seen.append(estimator.observe(part.for_curvature(), tools))
        tick()
    held_out = [part.moments().hessian(head.l2, head.regularized_E) for part in parts]
    sums = torch.stack([part.forget_gradient() * part.n_forget for part in parts])
    correction = (head.n_train / total) * head.gradient_CE
    folds: list[list[Fold]] = [[] for _ in estimator.weights]
    complaints = 0
    for k, part in enumerate(parts):
        others = estimator.merge([seen[j] for j in range(n_folds) if j != k])
        gradient = (sums.sum(0) - sums[k]) / (total - part.n_forget) - correction
        for index, weight in enumerate(estimator.weights):
            estimate = estimator.estimate(others, request, weight)
            complaints += estimate.note is not None
            inverse = SpectralInverse(estimate.hessian_EE, head.regularized_E)
            folds[index].append(Fold(inverse, gradient, head.gradient_CE - correction, held_out[k]))
            tick()
    return estimator.merge(seen), folds, complaints
