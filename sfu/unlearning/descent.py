"""Stochastic gradient descent from the trained head: minibatches, SGD, and a guard against running away.

Methods that ascend on a loss have no minimum to reach, and a learning rate that is too large makes the parameters grow
without bound. :func:`descend` then stops and raises, so such weights never become a result.

Shapes: C classes, E parameters of a class; any shape will do.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from sfu.errors import DivergedError
from sfu.heads.base import Head
from sfu.lazy import torch
from sfu.request import ForgetRequest, MethodContext, Retained
from sfu.schema import setting
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.result import UnlearningResult

if TYPE_CHECKING:
    from torch import Tensor

RUNAWAY = 1e4
"""Growth of the parameters' norm that ends a descent."""
LONGEST_PATH = 200
LARGEST_PATH = 1 << 24
"""Numbers in a path at most: there may be one for each of several settings."""


@dataclass
class Path:
    """Points of a descent, the start first; if they become too many or too large, every second one is dropped."""

    keep: bool
    points: list[Tensor] = field(default_factory=list)
    _stride: int = 1
    _count: int = 0

    def add(self, point_CE: Tensor) -> None:
        """Record a point, if it is on the stride."""
        if self.keep and self._count % self._stride == 0:
            self.points.append(point_CE.detach().clone())
            if len(self.points) > max(2, min(LONGEST_PATH, LARGEST_PATH // point_CE.numel())):
                self.points, self._stride = self.points[::2], 2 * self._stride
        self._count += 1

    def ended(self, point_CE: Tensor) -> tuple[Tensor, ...]:
        """Return all points, the last one being ``point_CE``."""
        if self.keep and not torch.equal(self.points[-1], point_CE):
            self.points.append(point_CE.detach().clone())
        return tuple(self.points)


@dataclass(frozen=True)
class Sgd:
    """Settings of ``torch.optim.SGD``, the largest gradient norm of a step, and whether gradients are ever zeroed.

    ``weight_decay`` may be a number for each parameter of a class, ``[E]``. With ``accumulate``, a step follows the sum
    of all gradients so far.

    The step is written out because the first optimiser of a process makes PyTorch load its compiler. That takes
    seconds, which is longer than most methods run.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float | Tensor = 0.0
    clip: float | None = None
    accumulate: bool = False

    def step(self, parameters_CE: Tensor, gradient_CE: Tensor, velocity_CE: Tensor) -> None:
        """Update the parameters and the velocity (0 at first) in place."""
        if self.clip is not None:
            gradient_CE = gradient_CE * (self.clip / (gradient_CE.norm() + 1e-6)).clamp(max=1.0)
        gradient_CE = gradient_CE + self.weight_decay * parameters_CE
        velocity_CE.mul_(self.momentum).add_(gradient_CE)
        parameters_CE.sub_(velocity_CE, alpha=self.lr)


@dataclass(frozen=True)
class DescentProblem:
    """What a descent minimises, whatever the settings of SGD.

    Attributes:
        batches: One batch for each step.
        loss: A scalar of the parameters and a batch.
        total: Number of batches, for progress and messages.
        details: Scalars worth reporting.
        done: Whether a point has forgotten everything; the descent then stops.
    """

    batches: Iterable[Any]
    loss: Callable[[Tensor, Any], Tensor]
    total: int
    details: dict[str, Any] = field(default_factory=dict)
    done: Callable[[Tensor], bool] | None = None


class Descent:
    """A descent by SGD, in progress or at its end.

    Attributes:
        parameters_CE: The point it has come to.
        steps: Number of steps.
        error: Why it stopped, if it has diverged.
    """

    def __init__(self, start_CE: Tensor, sgd: Sgd, keep_path: bool) -> None:
        self.parameters_CE, self._velocity_CE = start_CE.detach().clone(), torch.zeros_like(start_CE)
        self._gradients_CE = torch.zeros_like(start_CE)
        self.steps = 0
        self.error: DivergedError | None = None
        self._sgd, self._start, self._path = sgd, float(start_CE.norm()), Path(keep_path)
        self._path.add(self.parameters_CE)

    @property
    def path(self) -> tuple[Tensor, ...]:
        """All points so far, see :class:`Path`."""
        return self._path.ended(self.parameters_CE)

    def step(self, gradient_CE: Tensor, value: Tensor, total: int) -> None:
        """Take a step; record an error if it diverges."""
        if self._sgd.accumulate:
            gradient_CE = self._gradients_CE.add_(gradient_CE)
        self._sgd.step(self.parameters_CE, gradient_CE, self._velocity_CE)
        self.steps += 1
        norm = float(self.parameters_CE.norm())
        if math.isfinite(norm) and norm <= RUNAWAY * max(1.0, self._start) and math.isfinite(float(value.detach())):
            self._path.add(self.parameters_CE)
            return
        self.error = DivergedError(
            f"diverged at step {self.steps} of {total}: |w| went from {self._start:.3g} to {norm:.3g} with "
            f"lr={self._sgd.lr:g}. These weights mean nothing. Lower "
            f"lr{'' if self._sgd.clip is not None else ', or set clip'}."
        )


def descend(start_CE: Tensor, problem: DescentProblem, sgd: Sgd, context: MethodContext) -> Descent:
    """Take one step of SGD for each batch.

    Raises:
        DivergedError: A loss is not finite, or the parameters have grown :data:`RUNAWAY`-fold.
    """
    (end,) = descend_together(start_CE, problem, [sgd], context)
    if end.error is not None:
        raise end.error
    return end


def descend_together(
    start_CE: Tensor, problem: DescentProblem, settings: Sequence[Sgd], context: MethodContext
) -> list[Descent]:
    """Run a descent for each of the settings on the same batches: one product with the rows serves all of them.

    The loss is mapped over the settings (``torch.func.vmap``) if there are several. A descent that diverges holds its
    error and does not stop the others.
    """
    descents, alone = [Descent(start_CE, sgd, context.keep_path) for sgd in settings], len(settings) == 1
    active, loss = descents, problem.loss if alone else torch.func.vmap(problem.loss, in_dims=(0, None))
    for steps, batch in enumerate(problem.batches, start=1):
        if problem.done is not None and problem.done(active[0].parameters_CE):
            break
        points = [descent.parameters_CE for descent in active]
        parameters = (points[0] if alone else torch.stack(points)).detach().requires_grad_()
        values = loss(parameters, batch)
        (gradients,) = torch.autograd.grad(values.sum(), parameters)
        for index, descent in enumerate(active):
            descent.step(gradients if alone else gradients[index], values if alone else values[index], problem.total)
        active = [descent for descent in active if descent.error is None]
        context.report(steps, problem.total)
        if not active:
            break
    return descents


def n_batches(n_rows: int, batch_size: int) -> int:
    """Return the number of minibatches in an epoch."""
    return -(-n_rows // batch_size)


def minibatches(n_rows: int, batch_size: int, epochs: int | None, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the row numbers of each batch, in a new random order every epoch; endlessly if ``epochs`` is ``None``."""
    for _ in count() if epochs is None else range(epochs):
        yield from torch.randperm(n_rows, generator=generator).split(batch_size)


@dataclass(frozen=True)
class DescentMethod(UnlearningMethod):
    """A method that descends from the trained head by SGD; subclasses say what they minimise."""

    lr: float = setting(1e-4, "Learning rate.", above=0)
    epochs: int = setting(5, "Passes over the rows.", at_least=1)
    batch_size: int = setting(256, "Rows of a step.", at_least=1)
    momentum: float = setting(0.9, "Momentum of SGD.", at_least=0, below=1)
    weight_decay: float | None = setting(
        None, "SGD adds ``weight_decay * w`` to the gradient; ``None`` for the head's l2.", at_least=0
    )
    clip: float | None = setting(None, "Largest gradient norm of a step; ``None`` for no limit.", above=0)

    def sgd(self, head: Head) -> Sgd:
        """Return the settings of SGD; the head's l2 spares the bias."""
        decay = head.objective().ridge_E if self.weight_decay is None else self.weight_decay
        return Sgd(self.lr, self.momentum, decay, self.clip)

    @abstractmethod
    def problem(self, request: ForgetRequest, context: MethodContext, retained: Retained) -> DescentProblem:
        """Return what the method minimises, whatever the settings of SGD."""

    @property
    def own_details(self) -> dict[str, Any]:
        """Scalars worth reporting that depend on the learning rate."""
        return {}

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        problem, head = self.problem(request, context, retained), request.head
        return self._result(request, problem, descend(head.parameters_CE, problem, self.sgd(head), context))

    def descends_with(self, other: UnlearningMethod) -> bool:
        """Whether the other method differs only in its learning rate, so that both can descend together."""
        return type(other) is type(self) and replace(self, lr=other.lr) == other

    def unlearn_together(
        self, others: Sequence[DescentMethod], request: ForgetRequest, context: MethodContext, retained: Retained
    ) -> list[UnlearningResult | DivergedError]:
        """Run methods that differ only in their learning rate on one linear head, whose outputs can be vmapped."""
        problem, head = self.problem(request, context, retained), request.head
        ends = descend_together(head.parameters_CE, problem, [other.sgd(head) for other in others], context)
        return [end.error or other._result(request, problem, end) for other, end in zip(others, ends, strict=True)]

    def _result(self, request: ForgetRequest, problem: DescentProblem, end: Descent) -> UnlearningResult:
        details = {
            "steps": end.steps, "lr": self.lr, "batch_size": self.batch_size, **problem.details, **self.own_details,
        }  # fmt: skip
        if problem.done is not None:
            details["all_forgotten"] = problem.done(end.parameters_CE)
        return UnlearningResult(request.unlearned_head(end.parameters_CE), details=details, path=end.path)

    def _over_rows(
        self, context: MethodContext, n_rows: int, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> DescentProblem:
        """Return plain epochs over ``n_rows`` rows."""
        batches = minibatches(n_rows, self.batch_size, self.epochs, context.generator("training"))
        return DescentProblem(batches, loss, self.epochs * n_batches(n_rows, self.batch_size))
