"""Augmented copies of images, for more curvature from the forget set alone.

Every augmentation preserves the image's size, depends only on the image (and, if it is random, on its number), and is
applied before the backbone's own transform. Shapes: K channels, H rows, W columns.
"""

from __future__ import annotations

import hashlib
import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sfu.data.images.images import Images
from sfu.errors import ConfigError
from sfu.registry import Registered

_WINDOW = 0.875  # side of the cropped window
_DEGREES = 10.0
_BRIGHTNESS = 0.3


class Augmentation(Registered, kind="augmentation"):
    """A change to an image, uint8 ``[K, H, W]``, that preserves its size."""

    @staticmethod
    @abstractmethod
    def apply(image: Tensor, generator: torch.Generator) -> Tensor:
        """Return the changed image; whatever is random is drawn from ``generator``."""


class Flip(Augmentation, name="flip"):
    """Left and right swapped."""

    @staticmethod
    def apply(image: Tensor, generator: torch.Generator) -> Tensor:
        return image.flip(-1)


class Crop(Augmentation, name="crop"):
    """A random window of 7/8 of each side, resized to the full size."""

    @staticmethod
    def apply(image: Tensor, generator: torch.Generator) -> Tensor:
        from torchvision.transforms import v2

        height, width = image.shape[-2:]
        rows, columns = max(1, round(_WINDOW * height)), max(1, round(_WINDOW * width))
        top = int(torch.randint(height - rows + 1, (), generator=generator))
        left = int(torch.randint(width - columns + 1, (), generator=generator))
        return v2.functional.resized_crop(image, top, left, rows, columns, [height, width], antialias=True)


class FlipCrop(Augmentation, name="flip_crop"):
    """A flip, then a crop."""

    @staticmethod
    def apply(image: Tensor, generator: torch.Generator) -> Tensor:
        return Crop.apply(Flip.apply(image, generator), generator)


class Rotate(Augmentation, name="rotate"):
    """A rotation by up to 10 degrees; the corners get the image's mean colour."""

    @staticmethod
    def apply(image: Tensor, generator: torch.Generator) -> Tensor:
        from torchvision.transforms import v2

        degrees = _DEGREES * (2 * float(torch.rand((), generator=generator)) - 1)
        mean = image.float().mean((-2, -1)).tolist()
        return v2.functional.rotate(image, degrees, v2.InterpolationMode.BILINEAR, fill=mean)


class Brightness(Augmentation, name="brightness"):
    """The brightness multiplied by 0.7 to 1.3."""

    @staticmethod
    def apply(image: Tensor, generator: torch.Generator) -> Tensor:
        from torchvision.transforms import v2

        factor = 1 + _BRIGHTNESS * (2 * float(torch.rand((), generator=generator)) - 1)
        return v2.functional.adjust_brightness(image, factor)


def check_augmentations(names: Sequence[str], where: str) -> None:
    """Check the names of augmentations.

    Raises:
        ConfigError: A name is unknown or repeated.
    """
    for name in names:
        Augmentation.named(name, where)
    if len(set(names)) < len(names):
        raise ConfigError(f"{where}={list(names)} names an augmentation twice. Name each once.")


class AugmentedImages(Images):
    """Images changed by one augmentation, in the same way every time."""

    def __init__(self, images: Images, name: str) -> None:
        """Wrap ``images``; ``name`` is that of an :class:`Augmentation`."""
        self._images, self._name = images, name
        self.channels = images.channels

    def __len__(self) -> int:
        return len(self._images)

    def decode(self, index: int) -> Tensor:
        image = self._images.decode(index).contiguous()
        seed = zlib.crc32(f"{self._name} {index}".encode())
        return Augmentation.named(self._name).apply(image, torch.Generator().manual_seed(seed))

    def name(self, index: int) -> str:
        return f"{self._images.name(index)} ({self._name})"

    def take(self, rows: Sequence[int] | Tensor) -> AugmentedImages:
        """Return some of them; a random augmentation depends on the new numbers."""
        return AugmentedImages(self._images.take(rows), self._name)

    def fingerprint(self, reading: Callable[[int], None] | None = None) -> str:
        return hashlib.sha256(f"{self._name} {self._images.fingerprint(reading)}".encode()).hexdigest()

    @property
    def paths(self) -> list[Path]:
        return self._images.paths
