"""Overlap decoding and inference: two worker threads each decode a batch and run the network on it.

While one of them decodes (in Python, one thread at a time), the other keeps the cores busy with the network. Two
workers with half of the cores each lose less time than one that alternates with all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sfu.data.backbones.transform import ImageTransform
from sfu.data.features.ranks import local_share
from sfu.data.images.decode import ImageError
from sfu.data.images.images import Images

_GROUP_VALUES = 1 << 22
"""Images are resized as soon as so many values are decoded, so that memory holds few of them at full size."""


@dataclass(frozen=True)
class DecodedBatch:
    """Some images after decoding.

    Attributes:
        rows: Numbers of those that could be decoded.
        pixels: Their pixels after the transform's resize and crop, uint8.
        damaged: What is wrong with each of the others, by number.
    """

    rows: list[int]
    pixels: list[Tensor]
    damaged: dict[int, str]


@dataclass(frozen=True)
class ThreadPools:
    """Threads for ``batches``, each of which handles one at a time, and ``decoders`` for their ``workers`` shares."""

    batches: ThreadPoolExecutor
    decoders: ThreadPoolExecutor
    workers: int

    def decode(self, images: Images, rows: Sequence[int], transform: ImageTransform) -> DecodedBatch:
        """Decode and resize a batch of images; those that cannot be decoded are noted, not raised."""
        if self.workers == 1:
            return _decode(images, rows, transform)
        size = -(-len(rows) // self.workers)
        shares = [rows[start : start + size] for start in range(0, len(rows), size)]
        parts = list(self.decoders.map(lambda share: _decode(images, share, transform), shares))
        return DecodedBatch(
            [row for part in parts for row in part.rows],
            [image for part in parts for image in part.pixels],
            {row: what for part in parts for row, what in part.damaged.items()},
        )

    def find_damage(self, images: Images, rows: Sequence[int]) -> dict[int, str]:
        """Return what is wrong with those of some images that cannot be decoded."""

        def trouble(row: int) -> str | None:
            try:
                images.decode(row)
            except ImageError as error:
                return str(error)
            return None

        found = zip(rows, self.decoders.map(trouble, rows), strict=True)
        return {row: what for row, what in found if what is not None}


@contextmanager
def thread_pools(device: torch.device, workers: int | None) -> Iterator[ThreadPools]:
    """Open the pools for a device; ``workers`` threads decode in all (``None``: one for each core of this process)."""
    threads = torch.get_num_threads()
    count = 3 if device.type == "cuda" else min(2, threads)
    workers = local_share() if workers is None else workers
    try:
        with (
            ThreadPoolExecutor(count, "batch", torch.set_num_threads, (max(1, threads // count),)) as batches,
            ThreadPoolExecutor(workers, "decode", torch.set_num_threads, (1,)) as decoders,
        ):
            yield ThreadPools(batches, decoders, max(1, workers // count))
    finally:
        torch.set_num_threads(threads)  # some builds apply a worker's number to the whole process


def _decode(images: Images, rows: Sequence[int], transform: ImageTransform) -> DecodedBatch:
    decoded, pixels, damaged = list[int](), list[Tensor](), dict[int, str]()
    group: list[Tensor] = []
    n_values = 0
    for row in rows:
        try:
            image = images.decode(row)
            transform.require_shape(image, images.name(row))
        except ImageError as error:
            damaged[row] = str(error)
            continue
        decoded.append(row)
        group.append(image)
        n_values += image.numel()
        if n_values > _GROUP_VALUES:
            pixels += transform.pixels(group)
            group, n_values = [], 0
    return DecodedBatch(decoded, pixels + transform.pixels(group), damaged)
