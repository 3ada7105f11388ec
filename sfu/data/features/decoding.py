"""Decode and resize a batch of images in threads, noting those that cannot be decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from sfu.data.backbones.transform import ImageTransform
from sfu.data.images.decode import ImageError
from sfu.data.images.images import Images

_GROUP_VALUES = 1 << 22
"""Images are resized as soon as so many values are decoded, so that memory holds few of them at full size."""


@dataclass(frozen=True)
class Batch:
    """Some images, decoded.

    Attributes:
        rows: Numbers of those that could be.
        images: Their pixels after the transform's resize and crop, uint8.
        damaged: What is wrong with each of the others.
    """

    rows: list[int]
    images: list[Tensor]
    damaged: dict[int, str]


def decoded(
    images: Images, batches: Sequence[Sequence[int]], transform: ImageTransform, *, workers: int, ahead: int
) -> Iterator[Batch]:
    """Decode ``batches`` of image numbers in order.

    Args:
        images: The images.
        transform: Resizes and crops.
        batches: Numbers of the images of each batch.
        workers: Threads.
        ahead: How many batches to decode beforehand, while the caller works. On a CPU that is worth nothing, since
            decoding and network would wait for the same cores.
    """
    with ThreadPoolExecutor(workers, thread_name_prefix="decode") as pool:
        under_way: list[list[Future[Batch]]] = []
        todo = iter(batches)

        def begin() -> None:
            numbers = next(todo, None)
            if numbers is not None:
                size = -(-len(numbers) // workers)
                shares = [numbers[start : start + size] for start in range(0, len(numbers), size)]
                under_way.append([pool.submit(_decode, images, share, transform) for share in shares])

        try:
            for _ in range(ahead + 1):
                begin()
            while under_way:
                parts = [future.result() for future in under_way.pop(0)]
                if ahead:
                    begin()
                yield _joined(parts)
                if not ahead:
                    begin()
        finally:
            for futures in under_way:
                for future in futures:
                    future.cancel()


def _decode(images: Images, numbers: Sequence[int], transform: ImageTransform) -> Batch:
    rows, pixels, damaged = [], [], {}
    group: list[Tensor] = []
    held = 0
    for number in numbers:
        try:
            image = images.decode(number)
            transform.require_shape(image, images.name(number))
        except ImageError as error:
            damaged[number] = str(error)
            continue
        rows.append(number)
        group.append(image)
        held += image.numel()
        if held > _GROUP_VALUES:
            pixels += transform.pixels(group)
            group, held = [], 0
    return Batch(rows, pixels + transform.pixels(group), damaged)


def find_damage(images: Images, numbers: Sequence[int], workers: int) -> dict[int, str]:
    """What is wrong with those of some images that cannot be decoded."""

    def trouble(number: int) -> str | None:
        try:
            images.decode(number)
        except ImageError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(workers) as pool:
        found = zip(numbers, pool.map(trouble, numbers, chunksize=64), strict=True)
        return {number: what for number, what in found if what is not None}


def _joined(parts: Sequence[Batch]) -> Batch:
    return Batch(
        [row for part in parts for row in part.rows],
        [image for part in parts for image in part.images],
        {row: what for part in parts for row, what in part.damaged.items()},
    )
