"""Stochastic gradient descent from the trained head: minibatches, SGD, and a guard against running away.

Methods that ascend on a loss have no minimum to reach; a learning rate too large makes the parameters grow without
bound. :func:`descend` stops there and raises, so that such weights are never taken for a result.

Shapes: C classes, E parameters of a class; any shape will do.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from sfu.checks import above, at_least, between, whole
from sfu.errors import DivergedError
from sfu.unlearning.method import RetainedSet, Tools, Unlearned, UnlearningMethod
from sfu.unlearning.request import ForgetRequest

Batch = TypeVar("Batch")
RUNAWAY = 1e4
"""Growth of the parameters' norm that ends a descent: no head that far away says anything of the data."""
LONGEST_PATH = 200
LARGEST_PATH = 1 << 24
"""In numbers: a path may be kept for each of several settings."""


@dataclass(frozen=True)
class Walk:
    """Where a descent has led.

    Attributes:
        parameters_CE: The last point.
        steps: How many were taken.
        path: See :class:`Path`.
    """

    parameters_CE: Tensor
    steps: int
    path: tuple[Tensor, ...]


@dataclass
class Path:
    """Points along the way, the start first; where they are too many or too large, every second is dropped again."""

    keep: bool
    points: list[Tensor] = field(default_factory=list)
    _stride: int = 1
    _seen: int = 0

    def add(self, point_CE: Tensor) -> None:
        """Note a point, if it is one to keep."""
        if self.keep and self._seen % self._stride == 0:
            self.points.append(point_CE.detach().clone())
            if len(self.points) > max(2, min(LONGEST_PATH, LARGEST_PATH // point_CE.numel())):
                self.points, self._stride = self.points[::2], 2 * self._stride
        self._seen += 1

    def ended(self, point_CE: Tensor) -> tuple[Tensor, ...]:
        """All points, the last one being where the way ends."""
        if self.keep and not torch.equal(self.points[-1], point_CE):
            self.points.append(point_CE.detach().clone())
        return tuple(self.points)


@dataclass(frozen=True)
class Sgd:
    """Settings of ``torch.optim.SGD``, and the largest gradient norm a step may use.

    The step is written out because the first optimiser of a process makes PyTorch load its compiler, which takes
    seconds, more than most methods do.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None

    def step(self, parameters_CE: Tensor, gradient_CE: Tensor, velocity_CE: Tensor) -> None:
        """Move the parameters, in place, and the velocity, which starts at 0."""
        if self.clip is not None:
            gradient_CE = gradient_CE * (self.clip / (gradient_CE.norm() + 1e-6)).clamp(max=1.0)
        if self.weight_decay:
            gradient_CE = gradient_CE.add(parameters_CE, alpha=self.weight_decay)
        velocity_CE.mul_(self.momentum).add_(gradient_CE)
        parameters_CE.sub_(velocity_CE, alpha=self.lr)


def descend(
    start_CE: Tensor,
    batches: Iterable[Batch],
    loss: Callable[[Tensor, Batch], Tensor],
    sgd: Sgd,
    *,
    tools: Tools,
    total: int,
    done: Callable[[Tensor], bool] | None = None,
) -> Walk:
    """One step of SGD for each batch.

    Args:
        start_CE: Where to start.
        batches: What each step sees.
        loss: A scalar of the parameters and a batch.
        sgd: The optimiser's settings.
        tools: Of the run.
        total: Number of batches, for progress and messages.
        done: Stops the descent before a step if it returns true.

    Raises:
        DivergedError: A loss is not finite, or the parameters have grown :data:`RUNAWAY`-fold.
    """
    parameters = start_CE.detach().clone().requires_grad_()
    velocity_CE = torch.zeros_like(start_CE)
    bound = RUNAWAY * max(1.0, float(start_CE.norm()))
    path = Path(tools.keep_path)
    path.add(parameters)
    steps = 0
    for batch in batches:
        if done is not None and done(parameters.detach()):
            break
        value = loss(parameters, batch)
        (gradient_CE,) = torch.autograd.grad(value, parameters)
        sgd.step(parameters.detach(), gradient_CE, velocity_CE)
        steps += 1
        norm = float(parameters.detach().norm())
        if not (math.isfinite(norm) and norm <= bound and math.isfinite(float(value.detach()))):
            raise DivergedError(
                f"diverged at step {steps} of {total}: |w| went from {float(start_CE.norm()):.3g} to {norm:.3g} with "
                f"lr={sgd.lr:g}. Lower lr{'' if sgd.clip is not None else ', or set clip'}; these weights are no result"
            )
        path.add(parameters)
        if tools.progress is not None:
            tools.progress(steps, total)
    return Walk(parameters.detach(), steps, path.ended(parameters.detach()))


def n_batches(count: int, batch_size: int) -> int:
    """Minibatches of one epoch."""
    return -(-count // batch_size)


def minibatches(count: int, batch_size: int, epochs: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Row numbers of each batch, in a new random order every epoch."""
    for _ in range(epochs):
        yield from torch.randperm(count, generator=generator).split(batch_size)


@dataclass(frozen=True)
class DescentMethod(UnlearningMethod):
    """A method that is a descent: its settings, checked, and how its walk becomes an outcome.

    Attributes:
        lr: Learning rate.
        epochs: Passes over the rows it descends on.
        batch_size: Rows of a step.
        momentum: Of SGD.
        weight_decay: Of SGD: what PyTorch adds to the gradient, ``weight_decay * w``.
        clip: Largest gradient norm of a step, or ``None``.
    """

    lr: float = 1e-4
    epochs: int = 5
    batch_size: int = 256
    momentum: float = 0.9
    weight_decay: float = 5e-4
    clip: float | None = None

    @property
    def name(self) -> str:
        """For messages."""
        return type(self).__module__.rsplit(".", 1)[-1]

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: Naming the key, the value and what is accepted.
        """
        above(f"{self.name}: lr", self.lr, 0.0)
        whole(f"{self.name}: epochs", self.epochs, 1)
        whole(f"{self.name}: batch_size", self.batch_size, 1)
        between(f"{self.name}: momentum", self.momentum, -1e-300, 1.0)
        at_least(f"{self.name}: weight_decay", self.weight_decay, 0.0)
        if self.clip is not None:
            above(f"{self.name}: clip", self.clip, 0.0)

    @property
    def sgd(self) -> Sgd:
        """The optimiser's settings."""
        return Sgd(self.lr, self.momentum, self.weight_decay, self.clip)

    def unlearn(self, request: ForgetRequest, tools: Tools, retained: RetainedSet | None = None) -> Unlearned:
        """Descend; the head is what was reached.

        Raises:
            DivergedError: The descent ran away.
        """
        walk, details = self._walk(request, tools, retained)
        details = {"steps": walk.steps, "lr": self.lr, "batch_size": self.batch_size, **details}
        return Unlearned(request.unlearned_head(walk.parameters_CE), details=details, path=walk.path)

    @abstractmethod
    def _walk(self, request: ForgetRequest, tools: Tools, retained: RetainedSet | None) -> tuple[Walk, dict[str, Any]]:
        """The descent, and what is worth keeping of it."""

    def _over_rows(
        self, request: ForgetRequest, tools: Tools, count: int, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> Walk:
        """Plain epochs over ``count`` rows."""
        return descend(
            request.head.parameters_CE,
            minibatches(count, self.batch_size, self.epochs, tools.generator("training")),
            loss,
            self.sgd,
            tools=tools,
            total=self.epochs * n_batches(count, self.batch_size),
        )
