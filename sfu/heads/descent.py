"""Training by minibatch gradient descent: Adam with early stopping, as in the paper, and SGD with a stepped rate.

Both stop short of the optimum. The gradient that remains is stored with the head.

Source: Golatkar et al., Mixed-privacy forgetting in deep networks, 2021, for the defaults of SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from sfu.errors import SolverError
from sfu.heads.settings import AdamSettings, SgdSettings
from sfu.lazy import torch
from sfu.losses.objective import Objective
from sfu.losses.rows import Rows

if TYPE_CHECKING:
    from torch import Tensor

Progress = Callable[[int, int], None]
"""Called with (epochs done, largest number of epochs)."""


def train_adam(
    objective: Objective, rows: Rows, start_CE: Tensor, config: AdamSettings, *, seed: int, progress: Progress | None
) -> Tensor:
    """Return the parameters of the best epoch of Adam.

    Training stops after ``config.max_epochs``, or once the full objective has not fallen by ``config.tolerance``
    (relative) for ``config.patience`` epochs. Rows are drawn without regard to their weights, which enter the gradient.
    """
    parameters = torch.nn.Parameter(start_CE.clone())
    optimizer = torch.optim.Adam([parameters], lr=config.lr)
    best, best_value, stale = start_CE, float("inf"), 0
    for _ in _epochs(objective, rows, optimizer, config.batch_size, config.max_epochs, seed, progress):
        value = objective.value(rows, parameters.detach())
        stale = 0 if value < best_value * (1 - config.tolerance) else stale + 1
        if value < best_value:
            best, best_value = parameters.detach().clone(), value
        if stale >= config.patience:
            break
    return best


def train_sgd(
    objective: Objective, rows: Rows, start_CE: Tensor, config: SgdSettings, *, seed: int, progress: Progress | None
) -> Tensor:
    """Return the last parameters of SGD with momentum, whose rate falls at ``config.milestones``.

    Raises:
        SolverError: The parameters are no longer finite, because the rate is too large.
    """
    parameters = torch.nn.Parameter(start_CE.clone())
    optimizer = torch.optim.SGD([parameters], lr=config.lr, momentum=config.momentum)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, list(config.milestones), config.decay)
    for epoch in _epochs(objective, rows, optimizer, config.batch_size, config.epochs, seed, progress):
        schedule.step()
        if not torch.isfinite(parameters.detach()).all():
            raise SolverError(
                f"training diverged in epoch {epoch}: the parameters are no longer finite. Lower "
                f"head.sgd.lr={config.lr:g}."
            )
    return parameters.detach().clone()


def _epochs(
    objective: Objective,
    rows: Rows,
    optimizer: torch.optim.Optimizer,
    batch_size: int,
    count: int,
    seed: int,
    progress: Progress | None,
) -> Iterator[int]:
    """Train one epoch at a time, in a new random order each; yield the number of epochs done."""
    (parameters,) = optimizer.param_groups[0]["params"]
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(1, count + 1):
        for batch in torch.randperm(rows.count, generator=generator).split(batch_size):
            parameters.grad = objective.gradient(rows.batch(batch), parameters.detach())
            optimizer.step()
        if progress is not None:
            progress(epoch, count)
        yield epoch
