"""Minibatch Adam with early stopping: the paper's way of training the head, kept as an option.

It stops short of the optimum; the gradient that remains is stored with the head, and the Newton step corrects for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfu.losses.objective import Objective
from sfu.losses.rows import Rows

if TYPE_CHECKING:
    from sfu.settings import AdamConfig


def train_adam(
    objective: Objective,
    rows: Rows,
    n_classes: int,
    config: AdamConfig,
    *,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Train from zero weights; return the parameters of the best epoch and their gradient, ``[C, E]`` each.

    Training stops after ``config.max_epochs``, or once the full objective has not fallen by ``config.tolerance``
    (relative) for ``config.patience`` epochs. Rows are drawn without regard to their weights, which enter the gradient.

    Args:
        objective: What to minimise.
        rows: Training rows.
        n_classes: C.
        config: The ``head.adam`` settings.
        seed: Seed of the order of rows.
        progress: Called with (epochs done, epochs at most).
    """
    start = rows.parameters(n_classes)
    parameters = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Adam([parameters], lr=config.lr)
    generator = torch.Generator().manual_seed(seed)
    best, best_value, stale = start, float("inf"), 0
    for epoch in range(config.max_epochs):
        order = torch.randperm(rows.count, generator=generator)
        for batch in order.split(config.batch_size):
            parameters.grad = objective.gradient(rows.batch(batch), parameters.detach())
            optimizer.step()
        value = objective.value(rows, parameters.detach())
        stale = 0 if value < best_value * (1 - config.tolerance) else stale + 1
        if value < best_value:
            best, best_value = parameters.detach().clone(), value
        if progress is not None:
            progress(epoch + 1, config.max_epochs)
        if stale >= config.patience:
            break
    return best, objective.gradient(rows, best)
