"""Augmented copies of images, for more curvature from the forget set alone.

Every augmentation keeps the image's size, depends on nothing but the image (and, for a random one, its number), and
goes before the backbone's own transform. Shapes: K channels, H rows, W columns.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sfu.data.images.images import Images
from sfu.errors import ConfigError

_WINDOW = 0.875  # side of the cropped window
_DEGREES = 10.0
_BRIGHTNESS = 0.3

Augmentation = Callable[[Tensor, torch.Generator], Tensor]


def _flip(image: Tensor, generator: torch.Generator) -> Tensor:
    return image.flip(-1)


def _crop(image: Tensor, generator: torch.Generator) -> Tensor:
    from torchvision.transforms import v2

    height, width = image.shape[-2:]
    rows, columns = max(1, round(_WINDOW * height)), max(1, round(_WINDOW * width))
    top = int(torch.randint(height - rows + 1, (), generator=generator))
    left = int(torch.randint(width - columns + 1, (), generator=generator))
    return v2.functional.resized_crop(image, top, left, rows, columns, [height, width], antialias=True)


def _flip_crop(image: Tensor, generator: torch.Generator) -> Tensor:
    return _crop(_flip(image, generator), generator)


def _rotate(image: Tensor, generator: torch.Generator) -> Tensor:
    from torchvision.transforms import v2

    degrees = _DEGREES * (2 * float(torch.rand((), generator=generator)) - 1)
    edge = image.float().mean((-2, -1)).tolist()  # the corners take the image's mean colour
    return v2.functional.rotate(image, degrees, v2.InterpolationMode.BILINEAR, fill=edge)


def _brightness(image: Tensor, generator: torch.Generator) -> Tensor:
    from torchvision.transforms import v2

    return v2.functional.adjust_brightness(
        image, 1 + _BRIGHTNESS * (2 * float(torch.rand((), generator=generator)) - 1)
    )


AUGMENTATIONS: dict[str, Augmentation] = {
    "flip": _flip,  # left and right exchanged
    "crop": _crop,  # a window of 7/8 of each side, at random, brought back to size
    "flip_crop": _flip_crop,
    "rotate": _rotate,  # by up to 10 degrees
    "brightness": _brightness,  # times 0.7 to 1.3
}


def check_augmentations(names: Sequence[str], where: str) -> None:
    """Refuse unknown and repeated names.

    Raises:
        ConfigError: Naming the key and what there is.
    """
    unknown = [name for name in names if name not in AUGMENTATIONS]
    if unknown:
        raise ConfigError(f"{where}={list(names)} names {unknown[0]}; there are {', '.join(AUGMENTATIONS)}.")
    if len(set(names)) < len(names):
        raise ConfigError(f"{where}={list(names)} names an augmentation twice.")


class AugmentedImages(Images):
    """Every image changed by one augmentation; the same numbers every time."""

    def __init__(self, images: Images, name: str) -> None:
        """Keep both; ``name`` is one of :data:`AUGMENTATIONS`."""
        self._images, self._augmentation = images, name
        self.channels = images.channels

    def __len__(self) -> int:
        """N."""
        return len(self._images)

    def decode(self, index: int) -> Tensor:
        """Decode, then augment."""
        image = self._images.decode(index).contiguous()
        seed = zlib.crc32(f"{self._augmentation} {index}".encode())
        return AUGMENTATIONS[self._augmentation](image, torch.Generator().manual_seed(seed))

    def name(self, index: int) -> str:
        """That of the image, and the augmentation."""
        return f"{self._images.name(index)} ({self._augmentation})"

    def take(self, rows: Sequence[int] | Tensor) -> AugmentedImages:
        """Some of them; a random augmentation goes by the new numbers."""
        return AugmentedImages(self._images.take(rows), self._augmentation)

    def fingerprint(self, reading: Callable[[int], None] | None = None) -> str:
        """Over that of the images and the augmentation."""
        return hashlib.sha256(f"{self._augmentation} {self._images.fingerprint(reading)}".encode()).hexdigest()

    @property
    def paths(self) -> list[Path]:
        """Those of the images."""
        return self._images.paths
