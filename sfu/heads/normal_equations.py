r"""The optimum of a quadratic objective by products alone: conjugate gradients on :math:`H d = -g`, restarted.

A solve ends at what the precision of the products allows. Then the gradient is measured, and another solve starts from
there, until the gradient is small enough or no longer falls. The gradient that is returned is a measured one.

Shapes: C classes, E parameters of each (1 and p where they share them).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sfu.heads.optimum import Optimum, not_reached
from sfu.lazy import torch
from sfu.losses.base import Loss
from sfu.losses.objective import Objective
from sfu.losses.rows import Rows
from sfu.operators.build import products_of
from sfu.operators.conjugate_gradients import conjugate_gradients
from sfu.readers import floats
from sfu.store import Store, cache_dir, key_of

if TYPE_CHECKING:
    from torch import Tensor

    from sfu.heads.cores.core import Core

_STALLED = 0.5  # a solve that leaves more of the gradient than this has stalled
_REMEDY = "or compute in head.dtype=float64"
_SECONDS = 60.0


@dataclass
class Checkpoint:
    """How far training has come, cached every ``seconds`` so that an interrupted training continues there.

    The key is a digest of all that decides the optimum, so that no other training finds this checkpoint.
    """

    key: str
    store: Store = field(default_factory=lambda: Store(cache_dir("training")))
    seconds: float = _SECONDS

    def __post_init__(self) -> None:
        """Start the clock."""
        self._last = time.monotonic()

    def read(self, like_CE: Tensor) -> Tensor | None:
        """Return the cached parameters, if there are any of this shape."""

        def check(tensors: dict[str, Tensor]) -> None:
            if (shape := floats(tensors, "parameters", 2).shape) != like_CE.shape:
                raise ValueError(f"parameters are {list(shape)}, not {list(like_CE.shape)}")

        found = self.store.read_tensors(self.key, check)
        return None if found is None else found["parameters"].to(like_CE)

    def write(self, parameters_CE: Tensor) -> None:
        """Cache the parameters, if it is time to."""
        if time.monotonic() - self._last >= self.seconds:
            with self.store.optional():
                self.store.write_tensors(self.key, {"parameters": parameters_CE})
            self._last = time.monotonic()

    def remove(self) -> None:
        """Remove the checkpoint, once training is done."""
        with self.store.optional():
            self.store.remove(self.key)


def checkpoint_of(core: Core, fingerprint: str, l2: float, loss: Loss, dtype: torch.dtype) -> Checkpoint:
    """Return the checkpoint of one training."""
    return Checkpoint(key_of([core.digest, fingerprint, l2, str(core.dtype), str(dtype), loss.as_json()]))


def solve_normal_equations(
    objective: Objective,
    rows: Rows,
    start_CE: Tensor,
    *,
    tolerance: float,
    max_iterations: int,
    progress: Callable[[int, int], None] | None = None,
    checkpoint: Checkpoint | None = None,
) -> Optimum:
    """Minimise a quadratic objective until ``|gradient| <= tolerance``, from ``start_CE`` or a checkpoint.

    Raises:
        SolverError: It takes more than ``max_iterations`` products, or the gradient stagnates above the tolerance.
    """
    cached_CE = None if checkpoint is None else checkpoint.read(start_CE)
    point_CE = start_CE if cached_CE is None else cached_CE
    here = objective.linearize(rows, point_CE)
    operator = products_of(objective, rows, here.hessians, start_CE.shape[0])
    precondition = operator.preconditioner(operator.moments())
    products, size = 1, float(here.gradient_CE.norm())
    while size > tolerance:

        def note(done: int, moved_CE: Tensor, so_far: int = products, base_CE: Tensor = point_CE) -> None:
            if progress is not None:
                progress(so_far + done, max_iterations)
            if checkpoint is not None:
                checkpoint.write(base_CE + moved_CE)

        found = conjugate_gradients(
            operator.matmul, -here.gradient_CE, precondition,
            tolerance=max(0.5 * tolerance / size, operator.tolerance), max_iterations=max_iterations - products,
            note=note,
        )  # fmt: skip
        trial_CE = point_CE + found.value_CE
        there = objective.linearize(rows, trial_CE)
        products, left = products + found.iterations + 1, float(there.gradient_CE.norm())
        if left < size:
            point_CE, here = trial_CE, there
        if left <= tolerance:
            break
        if products >= max_iterations:
            raise not_reached(min(left, size), tolerance, f"after head.max_iterations={max_iterations}", _REMEDY)
        if not left < _STALLED * size:
            raise not_reached(min(left, size), tolerance, "and stagnates there", _REMEDY)
        size = left
    if checkpoint is not None:
        checkpoint.remove()
    return Optimum(point_CE, here.gradient_CE)
