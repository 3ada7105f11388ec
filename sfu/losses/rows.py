"""Labelled rows, served in chunks, so that the device's memory does not bound N.

The rows may be spread over several processes (:mod:`sfu.distributed`). A sum over :meth:`Rows.chunks` therefore starts
from :meth:`Rows.once` and ends with :meth:`Rows.summed`::

    total = rows.once(what no row adds)
    for chunk in rows.chunks():
        total = total + ...
    return rows.summed(total)

Shapes: N rows, B rows of a chunk, D features, E = D (+ 1 with bias), C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import TYPE_CHECKING, TypeVar

from sfu.deadline import check_time
from sfu.distributed import Ranks
from sfu.errors import DataError
from sfu.lazy import torch
from sfu.losses.base import Loss
from sfu.losses.chunks import Chunk, LinearChunk
from sfu.losses.gram import add_gram

if TYPE_CHECKING:
    from torch import Tensor

Number = TypeVar("Number", float, "Tensor")

CHUNK_ROWS = 1024
"""On a CPU: few enough rows that the second product with a chunk finds it in the processor's cache."""
GPU_CHUNK_ROWS = 65536
CACHE_BYTES = 1 << 30
"""Largest size of design rows that are converted to the working dtype once and cached while they are in use."""


def design_matrix(features_ND: Tensor, bias: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return feature rows on ``device`` in ``dtype``, with a trailing column of ones if ``bias``."""
    design = features_ND.to(device=device, dtype=dtype)
    if bias:
        design = torch.cat([design, design.new_ones(design.shape[0], 1)], dim=1)
    return design


def check_weights(weights_N: Tensor, labels_N: Tensor, ranks: Ranks | None = None) -> Tensor:
    """Return a private float64 copy of sample weights, on the labels' device.

    Raises:
        DataError: There is not one finite number of at least 0 for each label, or all are 0 (on all ``ranks``).
    """
    copied = weights_N.detach().to(labels_N.device, torch.float64, copy=True).contiguous()
    good_N = torch.isfinite(copied) & (copied >= 0)
    good = copied.shape == labels_N.shape[:1] and bool(good_N.all())
    if not good or not bool(copied.any() if ranks is None else ranks.add_up(copied.sum())):
        raise DataError(
            f"the sample weights must be {labels_N.shape[0]} finite numbers of at least 0, not all 0. Their shape is "
            f"{list(copied.shape)}."
        )
    return copied


class Rows:
    """The labelled rows of a linear head; a subclass makes the chunks of another.

    Attributes:
        count: Number of rows, those of all ranks together.
        width: E.
        shared: Whether the classes share all parameters, ``[1, p]``.
        weight: Sum V of the row weights, those of all ranks together; the number of rows if there are none.
        step: Rows of a chunk.
        ranks: The processes over which the rows are spread; ``None`` if this one has all.
    """

    def __init__(
        self,
        features_ND: Tensor,
        labels_N: Tensor,
        loss: Loss,
        *,
        bias: bool,
        device: torch.device,
        dtype: torch.dtype | None = None,
        sample_weights_N: Tensor | None = None,
        cache: bool = False,
        chunk_rows: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Note where the rows are, in any float dtype and on any device; nothing is copied yet.

        The working ``dtype`` (by default float64) and ``device`` are those of the chunks. With ``cache``, converted
        rows are held from one pass to the next if they fit in :data:`CACHE_BYTES`. ``progress`` is called with (rows
        done, rows in all).
        """
        self.features_ND, self.labels_N = features_ND, labels_N
        self.bias, self.device, self.progress = bias, device, progress
        self.dtype = torch.float64 if dtype is None else dtype
        self.ranks = ranks
        self.width = features_ND.shape[1] + int(bias)
        self.shared = False
        self.weights_N = loss.row_weights(labels_N, sample_weights_N, torch.float64)
        self._measure()
        self.factors_N: Tensor | None = None
        self.step = chunk_rows or (CHUNK_ROWS if device.type == "cpu" else GPU_CHUNK_ROWS)
        size = features_ND.shape[0] * self.width * (torch.finfo(self.dtype).bits // 8)
        self._cached: list[Chunk] | None = [] if cache and size <= CACHE_BYTES else None
        self._moments: Tensor | None = None

    def thinned(self, stride: int) -> Rows:
        """Return every ``stride``-th row."""
        return self._like(slice(None, None, stride), self.dtype)

    def batch(self, index: Tensor) -> Rows:
        """Return some rows; shares are relative to an average batch's weight, so their gradient is unbiased."""
        twin = self._like(index.to(self.features_ND.device), self.dtype)
        twin.weight, twin._cached = self.weight * twin.count / self.count, None
        return twin

    def to_float32(self) -> Rows:
        """Return the same rows in float32, for products that need no more."""
        return self._like(slice(None), torch.float32)

    def _like(self, index: slice | Tensor, dtype: torch.dtype) -> Rows:
        twin = copy(self)
        twin.features_ND, twin.labels_N = self.features_ND[index], self.labels_N[index]
        twin.weights_N = None if self.weights_N is None else self.weights_N[index]
        twin.factors_N = None if self.factors_N is None else self.factors_N[index]
        twin.dtype, twin.progress = dtype, None
        if not isinstance(index, slice) or index != slice(None):
            twin._measure()
        twin._cached, twin._moments = None if self._cached is None else [], None
        return twin

    def _measure(self) -> None:
        """Count and weigh the rows of all ranks."""
        weights_N, count = self.weights_N, self.features_ND.shape[0]
        weight = float(count) if weights_N is None else float(weights_N.sum())
        if self.ranks is not None:
            count, weight = self.ranks.add_up(torch.tensor([count, weight], dtype=torch.float64)).tolist()
        self.count, self.weight = int(count), weight

    def once(self, start: Number) -> Number:
        """Return where a sum starts: at what no row adds, on the first rank; at 0 on the others."""
        return start if self.ranks is None or self.ranks.rank == 0 else 0 * start

    def summed(self, total: Tensor) -> Tensor:
        """Return the sum of all ranks' totals, the same bits on each."""
        return total if self.ranks is None else self.ranks.add_up(total)

    def summed_with(self, value: float, total: Tensor) -> tuple[float, Tensor]:
        """Return the sums of all ranks' numbers and totals, from one exchange."""
        if self.ranks is None:
            return value, total
        both = self.ranks.add_up(torch.cat([total.new_tensor([value], dtype=torch.float64), total.double().flatten()]))
        return float(both[0]), both[1:].reshape(total.shape).to(total)

    def same(self, tensor: Tensor) -> Tensor:
        """Return the first rank's tensor on all ranks, whose own may differ by rounding."""
        return tensor if self.ranks is None else self.summed(self.once(tensor))

    def everywhere(self, flag: bool) -> bool:
        """Return whether all ranks say so, such as that something fits their memory."""
        return flag if self.ranks is None else self.ranks.everywhere(flag)

    def scaled(self, factors_N: Tensor) -> Rows:
        """Return the rows with the share of each times a factor, so that shares no longer sum to 1."""
        twin = self._like(slice(None), self.dtype)
        twin.factors_N = factors_N.to(self.labels_N.device, torch.float64)
        return twin

    @property
    def shares_N(self) -> Tensor:
        """What each row counts for, float64: its share of the weights, times its factor if there are factors."""
        weights_N = self.weights_N
        if weights_N is None:
            weights_N = torch.ones(len(self.labels_N), dtype=torch.float64, device=self.labels_N.device)
        shares_N = weights_N / self.weight
        return shares_N if self.factors_N is None else shares_N * self.factors_N

    def joined(self, others: Sequence[Rows], coefficients: Sequence[float]) -> Rows | None:
        """Join several sets, each row's share times its set's coefficient; ``None`` where that would gain nothing."""
        return None

    @property
    def precision(self) -> torch.dtype:
        """Dtype of the products with the rows."""
        return self.dtype

    def _chunk(self, features_BD: Tensor, labels_B: Tensor, share_B: Tensor) -> Chunk:
        return LinearChunk(labels_B, share_B, design_matrix(features_BD, self.bias, self.device, self.dtype))

    def chunks(self) -> Iterator[Chunk]:
        """Yield all rows of this process, :attr:`step` at a time; one empty chunk if it has none."""
        if self._cached:
            yield from self._cached
            return
        made, shares_N, count = [], self.shares_N, len(self.labels_N)
        for start in range(0, max(count, 1), self.step):
            check_time()
            stop = min(start + self.step, count)
            share_B = shares_N[start:stop].to(self.device, self.dtype)
            chunk = self._chunk(self.features_ND[start:stop], self.labels_N[start:stop].to(self.device), share_B)
            if self._cached is not None:
                made.append(chunk)
            yield chunk
            if self.progress is not None:
                self.progress(stop, count)
        if self._cached is not None:
            self._cached = made

    @property
    def has_moments(self) -> bool:
        """Whether :meth:`moments` costs nothing more."""
        return self._moments is not None

    def moments(self) -> Tensor:
        """Return the second moments ``sum_i s_i a_i a_i^T`` of a linear head's rows, ``[E, E]``, computed once."""
        if self._moments is None:
            total_EE = torch.zeros(self.width, self.width, dtype=self.dtype, device=self.device)
            for chunk in self.linear_chunks():
                add_gram(total_EE, chunk.design_BE, chunk.design_BE * chunk.share_B[:, None])
            self._moments = self.summed(total_EE)
        return self._moments

    def linear_chunks(self) -> Iterator[LinearChunk]:
        """Yield the chunks of a linear head, for work that needs its design rows."""
        for chunk in self.chunks():
            assert isinstance(chunk, LinearChunk)
            yield chunk
