"""Minibatch gradient descent with momentum and a stepped rate, as linearised networks are trained in the literature.

It stops short of the optimum; the gradient that remains is stored with the head, and the Newton step corrects for it.

Source: Golatkar et al., Mixed-privacy forgetting in deep networks, 2021, for the defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfu.errors import SolverError
from sfu.losses.objective import Objective
from sfu.losses.rows import Rows

if TYPE_CHECKING:
    from sfu.settings import SgdConfig


def train_sgd(
    objective: Objective,
    rows: Rows,
    n_classes: int,
    config: SgdConfig,
    *,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Train from zero weights; return the last parameters and their gradient.

    Raises:
        SolverError: The objective has no finite value any more: the rate is too large.
    """
    parameters = torch.nn.Parameter(rows.parameters(n_classes))
    optimizer = torch.optim.SGD([parameters], lr=config.lr, momentum=config.momentum)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, list(config.milestones), config.decay)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(config.epochs):
        for batch in torch.randperm(rows.count, generator=generator).split(config.batch_size):
            parameters.grad = objective.gradient(rows.batch(batch), parameters.detach())
            optimizer.step()
        schedule.step()
        if not torch.isfinite(parameters.detach()).all():
            raise SolverError(f"training diverged in epoch {epoch + 1}; lower head.sgd.lr={config.lr:g}.")
        if progress is not None:
            progress(epoch + 1, config.epochs)
    reached = parameters.detach().clone()
    return reached, objective.gradient(rows, reached)
