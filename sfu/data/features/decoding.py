"""Decode and resize a batch of images, noting those that cannot be decoded."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
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
        pixels: Their pixels after the transform's resize and crop, uint8.
        damaged: What is wrong with each of the others.
    """

    rows: list[int]
    pixels: list[Tensor]
    damaged: dict[int, str]


def decode_batch(
    images: Images, numbers: Sequence[int], transform: ImageTransform, pool: Executor, workers: int
) -> Batch:
    """Decode the images of some numbers, in ``workers`` shares that ``pool`` works on; here, if it is one share."""
    if workers == 1:
        return _decode(images, numbers, transform)
    size = -(-len(numbers) // workers)
    shares = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    parts = list(pool.map(lambda share: _decode(images, share, transform), shares))
    return Batch(
        [row for part in parts for row in part.rows],
        [image for part in parts for image in part.pixels],
        {row: what for part in parts for row, what in part.damaged.items()},
    )


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


def find_damage(images: Images, numbers: Sequence[int], pool: Executor) -> dict[int, str]:
    """What is wrong with those of some images that cannot be decoded."""

    def trouble(number: int) -> str | None:
        try:
            images.decode(number)
        except ImageError as error:
            return str(error)
        return None

    found = zip(numbers, pool.map(trouble, numbers), strict=True)
    return {number: what for number, what in found if what is not None}
