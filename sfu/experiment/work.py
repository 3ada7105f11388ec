"""The units in which costs are counted, sizes, work, arrays and stages, and the rates of this machine.

The rates are measured, not assumed: a product and passes over rows take less than a tenth of a second.

Shapes: B rows of a pass, D features, C vectors, S side of a square matrix.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from sfu.lazy import torch
from sfu.losses.chunks import outputs_of
from sfu.losses.rows import CHUNK_ROWS

_SMALL, _LARGE = 320, 2048  # side of the product by which a CPU and a GPU are measured
_ROWS, _VECTORS = (2048, 512), 10
_REPEATS = 3


@dataclass(frozen=True)
class Sizes:
    """Numbers of rows, features and classes; ``itemsize`` is the bytes of a number of the features."""

    rows: int
    forget: int
    test: int
    features: int
    classes: int
    bias: bool = False
    itemsize: int = 4

    @property
    def width(self) -> int:
        """E: the features, and the bias if there is one."""
        return self.features + int(self.bias)

    @property
    def retain(self) -> int:
        """R: the training rows that are not forgotten."""
        return self.rows - self.forget

    @property
    def data_bytes(self) -> int:
        """Bytes of the features of both parts."""
        return (self.rows + self.test) * self.features * self.itemsize


class Work(NamedTuple):
    """Work of one kind.

    Attributes:
        flops: Operations of products.
        read: Bytes that products read. The slower of the two decides.
        moved: Bytes read and written besides.
        solved: Operations of products that take as long as the decompositions.
        fixed: Further seconds, of whatever size.
    """

    flops: float = 0.0
    read: float = 0.0
    moved: float = 0.0
    solved: float = 0.0
    fixed: float = 0.0


class Remedy(Enum):
    """What makes an array smaller."""

    nothing = "nothing"
    rows = "rows"
    perturbations = "perturbations"


class Held(NamedTuple):
    """An array that a stage holds, its bytes, and what makes it smaller.

    For perturbations, their number is given, and which of the bytes grow with it and not with its square.
    """

    what: str
    size: float
    remedy: Remedy = Remedy.nothing
    number: int = 0
    linear: float = 0.0


@dataclass(frozen=True)
class Stage:
    """One stage: its work, piece by piece, and what it holds besides Python and PyTorch."""

    name: str
    work: tuple[Work, ...] = ()
    held: tuple[Held, ...] = ()

    @property
    def size(self) -> float:
        """Bytes of all arrays that it holds."""
        return sum(one.size for one in self.held)

    @property
    def flops(self) -> float:
        """Operations of products."""
        return sum(one.flops for one in self.work)


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second: operations of float64 products, and bytes read and written in a pass over rows.

    A pass converts rows to float64 and multiplies them by a few vectors. That is slower than a plain copy, because the
    converted rows take memory that was not used before.
    """

    flops: float
    bandwidth: float

    @classmethod
    def measured(cls, device: Any, clock: Callable[[], float] = time.perf_counter) -> Rates:
        """Measure a product, the best of a few, and passes over a few thousand rows, of which the median counts."""
        side = _SMALL if device.type == "cpu" else _LARGE
        matrix_SS = torch.ones(side, side, dtype=torch.float64, device=device)
        rows_BD, vectors_CD = torch.ones(_ROWS), torch.ones(_VECTORS, _ROWS[1], dtype=torch.float64, device=device)

        converted: list[Any] = []  # so that each pass takes new memory, as in a run

        def rows_pass() -> None:
            converted.extend(chunk.to(device, torch.float64) for chunk in rows_BD.split(CHUNK_ROWS))
            float(sum(outputs_of(chunk, vectors_CD)[0, 0] for chunk in converted[-len(rows_BD) // CHUNK_ROWS :]))

        product = min(_timed(lambda: float((matrix_SS @ matrix_SS)[0, 0]), clock))
        passed = statistics.median(_timed(rows_pass, clock))
        return cls(2.0 * side**3 / product, 20.0 * rows_BD.numel() / passed)

    def seconds(self, stage: Stage) -> float:
        """Return the time of a stage, piece by piece."""
        return sum(self._of(piece) for piece in stage.work)

    def _of(self, work: Work) -> float:
        products = max(work.flops / self.flops, work.read / self.bandwidth)
        return products + work.moved / self.bandwidth + work.solved / self.flops + work.fixed


def _timed(work: Callable[[], object], clock: Callable[[], float]) -> list[float]:
    work()  # the first call sets the library up
    times = []
    for _ in range(_REPEATS):
        start = clock()
        work()
        times.append(max(clock() - start, 1e-9))
    return times
