"""Observe every fold of the forget set once, estimate the curvature without each: the folds that choose the step.

The part of a fold's right-hand side that is not sampling noise is the training rows' mean gradient less the correction:
under objective perturbation -b/V belongs to it, with nothing random about it.

A fold is scored with its own Hessian, exactly: one block under the quadratic loss, products with its rows elsewhere.

Shapes: C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

from typing import Any

import torch

from sfu.curvature.estimators.base import CurvatureEstimator
from sfu.curvature.regularization import Fold, fold_indices
from sfu.losses import Layout
from sfu.request import ForgetRequest, MethodContext
from sfu.settings import Structure


def cross_validate(
    estimator: CurvatureEstimator[Any], request: ForgetRequest, context: MethodContext, n_folds: int
) -> tuple[Any, list[list[Fold]], int]:
    """Split the forget set at random (seed ``folds``) and estimate on all folds but one, for every fold.

    Returns:
        The observation of the whole forget set, the folds for each of ``estimator.weights``, and how many of the folds'
        estimates came with a complaint (a fit that did not converge).
    """
    head, total = request.head, request.weight
    parts = [request.rows(index) for index in fold_indices(request.n_forget, n_folds, context.generator("folds"))]
    steps = n_folds * (1 + len(estimator.weights))
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if context.progress is not None:
            context.progress(done, steps)

    seen = []
    for part in parts:
        seen.append(estimator.observe(part.for_curvature(), context))
        tick()
    scored_by = Structure.shared if head.layout is Layout.shared else Structure.products
    held_out = [part.hessian(scored_by) for part in parts]
    sums = torch.stack([part.forget_gradient() * part.weight for part in parts])
    correction = (head.total_weight / total) * head.gradient_CE
    folds: list[list[Fold]] = [[] for _ in estimator.weights]
    complaints = 0
    for k, part in enumerate(parts):
        others = estimator.merge([seen[j] for j in range(n_folds) if j != k])
        gradient = (sums.sum(0) - sums[k]) / (total - part.weight) - correction
        for index, weight in enumerate(estimator.weights):
            estimate = estimator.estimate(others, request, weight)
            complaints += estimate.note is not None
            inverse = estimate.operator.damped()
            folds[index].append(Fold(inverse, gradient, head.rows_gradient_CE - correction, held_out[k]))
            tick()
    return estimator.merge(seen), folds, complaints
