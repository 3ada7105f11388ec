"""Minibatch Adam with early stopping: the paper's way of training the head, kept as an option.

It stops short of the optimum; the gradient that remains is stored with the head, and the Newton step corrects for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfu.heads.linear import LinearHead
from sfu.heads.moments import design_matrix

if TYPE_CHECKING:
    from sfu.settings import AdamConfig


def train_adam(
    features_ND: Tensor,
    labels_N: Tensor,
    n_classes: int,
    config: AdamConfig,
    *,
    l2: float,
    bias: bool,
    target_scale: float,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None = None,
) -> LinearHead:
    """Train from zero weights; keep the parameters of the best epoch.

    Training stops after ``config.max_epochs``, or once the full objective has not fallen by ``config.tolerance``
    (relative) for ``config.patience`` epochs.

    Args:
        features_ND: Training features.
        labels_N: Training labels.
        n_classes: C.
        config: The ``head.adam`` settings.
        l2: Weight of the regulariser.
        bias: Train a bias.
        target_scale: Value of the hot target.
        seed: Seed of the order of rows.
        device: Where to train.
        dtype: Dtype of the parameters.
        progress: Called with (epochs done, epochs at most).
    """
    design = design_matrix(features_ND, bias, device, dtype)
    labels = labels_N.to(device)
    start = torch.zeros(n_classes, design.shape[1], device=device, dtype=dtype)
    head = LinearHead(start, torch.zeros_like(start), l2, design.shape[0], bias, target_scale)
    loss = head.loss()
    parameters = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Adam([parameters], lr=config.lr)
    generator = torch.Generator().manual_seed(seed)
    best, best_value, stale = start, float("inf"), 0
    for epoch in range(config.max_epochs):
        order = torch.randperm(design.shape[0], generator=generator).to(device)
        for batch in order.split(config.batch_size):
            parameters.grad = loss.gradients(design[batch], labels[batch], parameters.detach()[None])[0]
            optimizer.step()
        value = float(loss.values(design, labels, parameters.detach()[None]).sum())
        stale = 0 if value < best_value * (1 - config.tolerance) else stale + 1
        if value < best_value:
            best, best_value = parameters.detach().clone(), value
        if progress is not None:
            progress(epoch + 1, config.max_epochs)
        if stale >= config.patience:
            break
    gradient = loss.gradients(design, labels, best[None])[0]
    return LinearHead(best, gradient, l2, design.shape[0], bias, target_scale)
