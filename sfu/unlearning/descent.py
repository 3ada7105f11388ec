"""Stochastic gradient descent from the trained head: minibatches, SGD, and a guard against running away.

Methods that ascend on a loss have no minimum to reach; a learning rate too large makes the parameters grow without
bound. :func:`descend` stops there and raises, so that such weights are never taken for a result.

Shapes: C classes, E parameters of a class; any shape will do.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.func import vmap

from sfu.checks import above, at_least, between, whole
from sfu.errors import DivergedError
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.base import UnlearningMethod, UnlearningResult

Batch = TypeVar("Batch")
RUNAWAY = 1e4
"""Growth of the parameters' norm that ends a descent: no head that far away says anything of the data."""
LONGEST_PATH = 200
LARGEST_PATH = 1 << 24
"""In numbers: a path may be kept for each of several settings."""


@dataclass(frozen=True)
class DescentResult:
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


@dataclass(frozen=True)
class DescentProblem(Generic[Batch]):
    """What a descent descends on; settings of SGD are not part of it.

    Attributes:
        batches: What each step sees.
        loss: A scalar of the parameters and a batch.
        total: Number of batches, for progress and messages.
        details: Scalars worth keeping.
        done: Stops the descent before a step if it returns true.
        after: Further scalars, of the point that was reached.
    """

    batches: Iterable[Batch]
    loss: Callable[[Tensor, Batch], Tensor]
    total: int
    details: dict[str, Any] = field(default_factory=dict)
    done: Callable[[Tensor], bool] | None = None
    after: Callable[[Tensor], dict[str, Any]] | None = None


def descend(start_CE: Tensor, course: DescentProblem[Any], sgd: Sgd, context: MethodContext) -> DescentResult:
    """One step of SGD for each batch.

    Raises:
        DivergedError: A loss is not finite, or the parameters have grown :data:`RUNAWAY`-fold.
    """
    (walk,) = descend_together(start_CE, course, [sgd], context)
    if isinstance(walk, DivergedError):
        raise walk
    return walk


def descend_together(
    start_CE: Tensor, course: DescentProblem[Any], settings: Sequence[Sgd], context: MethodContext
) -> list[DescentResult | DivergedError]:
    """Descents that see the same batches, step by step: one product with the rows serves all of them.

    Args:
        start_CE: Where each starts.
        course: What they descend on; its loss is mapped over the settings (``torch.func.vmap``) if there are several.
        settings: One of each descent.
        context: Of the run.

    Returns:
        Where each led, or why it was stopped; the others go on.
    """
    starters = [_Descent(start_CE, sgd, context.keep_path) for sgd in settings]
    walkers, loss = starters, course.loss if len(settings) == 1 else vmap(course.loss, in_dims=(0, None))
    for steps, batch in enumerate(course.batches, start=1):
        if course.done is not None and course.done(walkers[0].point_CE):
            break
        points = [walker.point_CE for walker in walkers]
        parameters = (points[0] if len(settings) == 1 else torch.stack(points)).detach().requires_grad_()
        values = loss(parameters, batch)
        (gradients,) = torch.autograd.grad(values.sum(), parameters)
        for index, walker in enumerate(walkers):
            alone = len(settings) == 1
            walker.step(gradients if alone else gradients[index], values if alone else values[index], course.total)
        walkers = [walker for walker in walkers if walker.error is None]
        if context.progress is not None:
            context.progress(steps, course.total)
        if not walkers:
            break
    return [walker.end() for walker in starters]


class _Descent:
    """One descent on its way."""

    def __init__(self, start_CE: Tensor, sgd: Sgd, keep_path: bool) -> None:
        self.point_CE, self._velocity_CE = start_CE.detach().clone(), torch.zeros_like(start_CE)
        self.error: DivergedError | None = None
        self._sgd, self._start, self._steps = sgd, float(start_CE.norm()), 0
        self._path = Path(keep_path)
        self._path.add(self.point_CE)

    def step(self, gradient_CE: Tensor, value: Tensor, total: int) -> None:
        """Go on, or note why not."""
        self._sgd.step(self.point_CE, gradient_CE, self._velocity_CE)
        self._steps += 1
        norm = float(self.point_CE.norm())
        if math.isfinite(norm) and norm <= RUNAWAY * max(1.0, self._start) and math.isfinite(float(value.detach())):
            self._path.add(self.point_CE)
            return
        self.error = DivergedError(
            f"diverged at step {self._steps} of {total}: |w| went from {self._start:.3g} to {norm:.3g} with "
            f"lr={self._sgd.lr:g}. Lower lr{'' if self._sgd.clip is not None else ', or set clip'}; these weights are "
            "no result"
        )

    def end(self) -> DescentResult | DivergedError:
        """Where it led."""
        return self.error or DescentResult(self.point_CE, self._steps, self._path.ended(self.point_CE))


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

    def unlearn(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None = None
    ) -> UnlearningResult:
        """Descend; the head is what was reached.

        Raises:
            DivergedError: The descent ran away.
        """
        course = self.course(request, context, retained)
        return self._outcome(request, course, descend(request.head.parameters_CE, course, self.sgd, context))

    @abstractmethod
    def course(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None
    ) -> DescentProblem[Any]:
        """What it descends on, whatever the settings of SGD."""

    @property
    def own_details(self) -> dict[str, Any]:
        """Scalars worth keeping that depend on the learning rate."""
        return {}

    def alike(self, other: UnlearningMethod) -> bool:
        """Whether another differs in its learning rate alone, so that both can descend together."""
        return type(other) is type(self) and replace(self, lr=other.lr) == other

    def unlearn_together(
        self,
        others: Sequence[DescentMethod],
        request: ForgetRequest,
        context: MethodContext,
        retained: RetainedSet | None,
    ) -> list[UnlearningResult | DivergedError]:
        """The outcomes of others that are alike: of a linear head, whose outputs can be mapped over parameters."""
        course = self.course(request, context, retained)
        walks = descend_together(request.head.parameters_CE, course, [other.sgd for other in others], context)
        return [
            walk if isinstance(walk, DivergedError) else other._outcome(request, course, walk)
            for other, walk in zip(others, walks, strict=True)
        ]

    def _outcome(self, request: ForgetRequest, course: DescentProblem[Any], walk: DescentResult) -> UnlearningResult:
        details = {
            "steps": walk.steps,
            "lr": self.lr,
            "batch_size": self.batch_size,
            **course.details,
            **self.own_details,
        }
        if course.after is not None:
            details |= course.after(walk.parameters_CE)
        return UnlearningResult(request.unlearned_head(walk.parameters_CE), details=details, path=walk.path)

    def _over_rows(
        self, context: MethodContext, count: int, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> DescentProblem[Tensor]:
        """Plain epochs over ``count`` rows."""
        batches = minibatches(count, self.batch_size, self.epochs, context.generator("training"))
        return DescentProblem(batches, loss, self.epochs * n_batches(count, self.batch_size))
