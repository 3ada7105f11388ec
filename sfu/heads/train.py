"""Train a head as configured: the one entry that both Original and Retrained go through.

Shapes: N rows, D features, C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sfu.errors import ConfigError
from sfu.heads.adam import train_adam
from sfu.heads.base import Head
from sfu.heads.certificate import Certificate
from sfu.heads.exact import Remember, train_exact
from sfu.heads.existence import warn_if_separated, warn_of_absent_classes
from sfu.heads.linear import LinearHead
from sfu.heads.linearised.core import Core
from sfu.heads.linearised.head import LinearisedHead
from sfu.heads.linearised.rows import TangentRows
from sfu.heads.normal_equations import Checkpoint
from sfu.heads.rounding import rounding_bound
from sfu.heads.sgd import train_sgd
from sfu.losses import Layout, Loss, Rows, loss_from_config
from sfu.losses.rows import check_weights
from sfu.operators.plan import plan_structure
from sfu.settings import Structure, Training

if TYPE_CHECKING:
    from sfu.settings import HeadConfig, LossConfig


def train_head(
    features_ND: Tensor,
    labels_N: Tensor,
    n_classes: int,
    head: HeadConfig,
    loss: LossConfig | Loss,
    *,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    weights_N: Tensor | None = None,
    noise: Certificate | None = None,
    noise_seed: int | None = None,
    core: Core | None = None,
    checkpoint: Checkpoint | None = None,
    gram: Remember | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Head:
    """Train on all rows given, by ``head.training`` (``exact``, ``adam`` or ``sgd``).

    Exact training is float64 whatever ``dtype``; the head is rounded to it in the end, and its stored gradient is that
    of the rounded head.

    Args:
        features_ND: Training features.
        labels_N: Training labels.
        n_classes: C.
        head: The ``head`` group.
        loss: The ``loss`` group, or a loss that is already made (``balanced`` class weights counted).
        seed: Of the order of rows.
        device: Where to train.
        dtype: Of the head.
        weights_N: Sample weights.
        noise: Whose b is used again, with ``head.objective_noise``; ``None`` to draw one.
        noise_seed: Of b, for results that can be repeated but certify nothing to who knows it; ``None`` for the
            operating system's entropy.
        core: Of a linearised head; ``None`` for a linear one.
        checkpoint: Where exact training of a linearised head keeps how far it is.
        gram: What may know the Gram matrix of the rows under the quadratic loss from another training.
        progress: Called with (done, at most).

    Raises:
        SingularHessianError: Exact training with a singular Gram matrix and no regularisation.
        SolverError: Exact training did not reach ``head.tolerance``.
        ConfigError: The curvature to store is too large, or the loss's settings do not fit the data.
        DataError: The sample weights are not one finite number of at least 0 for each row, or all 0.
    """
    if weights_N is not None:
        weights_N = check_weights(weights_N, labels_N)
    kind = loss if isinstance(loss, Loss) else loss_from_config(loss, labels_N, n_classes)
    exact = head.training is Training.exact
    width = features_ND.shape[1] + int(head.bias)
    if head.store_curvature:
        _check_storable(kind, n_classes, width, labels_N.shape[0], device)
    options: dict[str, Any] = {
        "device": device, "dtype": torch.float64 if exact else dtype, "sample_weights_N": weights_N, "keep": True,
    }  # fmt: skip
    if core is None:
        rows = Rows(features_ND, labels_N, kind, bias=head.bias, **options)
        warn_of_absent_classes(rows, kind, n_classes, head.bias)
        certificate = _certificate(head, rows, n_classes, noise, noise_seed)
        blank: Head = LinearHead(**_blank(rows, n_classes, head, kind), bias=head.bias, certificate=certificate)
    else:
        core = core.to(device)
        rows = TangentRows(features_ND, labels_N, kind, core, **options)
        blank = LinearisedHead(**_blank(rows, n_classes, head, kind), core=core)
    if exact:
        trained = _to_the_optimum(blank, rows, head, dtype, progress, checkpoint, gram)
    else:
        trained = _by_descent(blank, rows, head, seed, progress)
    if trained.certificate is not None:
        bound = rows.weight * float(trained.gradient_CE.norm()) + rounding_bound(trained, rows)
        trained = replace(trained, certificate=replace(trained.certificate, residual_bound=bound))
    if head.l2 == 0:
        warn_if_separated(rows, trained)
    if head.store_curvature:
        hessian = trained.objective().data_hessian(rows, trained.parameters_CE, kind.layout)
        trained = replace(trained, data_hessian=hessian)
    return trained.to(device, dtype)


def train_like(original: Head, features_ND: Tensor, labels_N: Tensor, head: HeadConfig, **options: Any) -> Head:
    """Train on other rows as ``original`` was: its loss, class weights, network, device and dtype.

    Args:
        original: The head to be like.
        features_ND: Training features.
        labels_N: Training labels.
        head: The ``head`` group.
        options: Further ones of :func:`train_head`, whose errors are raised.
    """
    like = original.parameters_CE
    return train_head(
        features_ND, labels_N, original.n_classes, head, original.loss, device=like.device, dtype=like.dtype,
        core=original.core if isinstance(original, LinearisedHead) else None, **options,
    )  # fmt: skip


def _blank(rows: Rows, n_classes: int, head: HeadConfig, loss: Loss) -> dict[str, Any]:
    """What an untrained head of either kind begins with."""
    zero_CE = rows.parameters(n_classes)
    weight = None if rows.weights_N is None else rows.weight
    return {
        "parameters_CE": zero_CE, "gradient_CE": zero_CE, "l2": head.l2, "n_train": rows.count, "loss": loss,
        "weight": weight,
    }  # fmt: skip


def _certificate(
    head: HeadConfig, rows: Rows, n_classes: int, noise: Certificate | None, seed: int | None
) -> Certificate | None:
    """With the b given, or one drawn here; ``None`` without objective perturbation."""
    if not head.objective_noise > 0:
        return None
    if noise is not None:
        return replace(noise, noise_CE=noise.noise_CE.to(rows.device, torch.float64), residual_bound=0.0)
    return Certificate.draw(head.objective_noise, (n_classes, rows.width), rows.device, seed)


def _to_the_optimum(
    blank: Head,
    rows: Rows,
    head: HeadConfig,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None,
    checkpoint: Checkpoint | None,
    gram: Remember | None,
) -> Head:
    """Rounded to ``dtype``, with the gradient of what is left."""
    objective = blank.objective_of(rows.weight)
    optimum = train_exact(
        objective, rows, blank.n_classes, tolerance=head.tolerance, max_iterations=head.max_iterations,
        progress=progress, checkpoint=checkpoint, gram=gram,
    )  # fmt: skip
    parameters_CE, gradient_CE = optimum.parameters_CE, optimum.gradient_CE
    if dtype != torch.float64:
        parameters_CE = parameters_CE.to(dtype).double()
        gradient_CE = objective.gradient(rows, parameters_CE)
    return replace(blank, parameters_CE=parameters_CE, gradient_CE=gradient_CE)


def _by_descent(
    blank: Head, rows: Rows, head: HeadConfig, seed: int, progress: Callable[[int, int], None] | None
) -> Head:
    objective = blank.objective_of(rows.weight)
    if head.training is Training.sgd:
        parameters_CE, gradient_CE = train_sgd(
            objective, rows, blank.n_classes, head.sgd, seed=seed, progress=progress
        )  # fmt: skip
    else:
        parameters_CE, gradient_CE = train_adam(
            objective, rows, blank.n_classes, head.adam, seed=seed, progress=progress
        )  # fmt: skip
    return replace(blank, parameters_CE=parameters_CE, gradient_CE=gradient_CE)


def _check_storable(loss: Loss, n_classes: int, width: int, count: int, device: torch.device) -> None:
    """Raise ``ConfigError`` if the Hessian would not be held as a matrix."""
    plan = plan_structure(loss.layout, n_classes, width, count, device)
    if plan.structure is Structure.products:
        remedy = "; store nothing, or use loss=logistic" if loss.layout is Layout.dense else ""
        raise ConfigError(f"head.store_curvature=true cannot be had: {plan.reason}{remedy}.")
