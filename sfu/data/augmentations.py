"""Augmentations of a single image, for more curvature from the forget set alone.

Each keeps the image's size and goes before the backbone's own transform. This module imports PyTorch only when an image
is changed. Shapes: K channels, H rows, W columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sfu.errors import ConfigError
from sfu.registry import Registered

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_WINDOW = 0.875
_DEGREES = 10.0
_BRIGHTNESS = 0.3


class Augmentation(Registered, ABC, kind="augmentation"):
    """A change of an image, chosen by its name in ``curvature.augment``."""

    @abstractmethod
    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        """Return a changed copy of a uint8 image ``[K, H, W]``; ``generator`` draws what is random."""


class Flip(Augmentation, name="flip"):
    """Exchanges left and right."""

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        return image.flip(-1)


class Crop(Augmentation, name="crop"):
    """Takes a random window of 7/8 of each side and resizes it to the whole image."""

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        import torch
        from torchvision.transforms import v2

        height, width = image.shape[-2:]
        rows, columns = max(1, round(_WINDOW * height)), max(1, round(_WINDOW * width))
        top = int(torch.randint(height - rows + 1, (), generator=generator))
        left = int(torch.randint(width - columns + 1, (), generator=generator))
        return v2.functional.resized_crop(image, top, left, rows, columns, [height, width], antialias=True)


class FlipCrop(Augmentation, name="flip_crop"):
    """Exchanges left and right, then crops."""

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        return Crop()(Flip()(image, generator), generator)


class Rotate(Augmentation, name="rotate"):
    """Rotates by up to 10 degrees; the corners take the image's mean colour."""

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        from torchvision.transforms import v2

        edge = image.float().mean((-2, -1)).tolist()
        return v2.functional.rotate(image, _DEGREES * _signed(generator), v2.InterpolationMode.BILINEAR, fill=edge)


class Brightness(Augmentation, name="brightness"):
    """Multiplies the brightness by 0.7 to 1.3."""

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        from torchvision.transforms import v2

        return v2.functional.adjust_brightness(image, 1 + _BRIGHTNESS * _signed(generator))


def _signed(generator: torch.Generator) -> float:
    """Draw a number from -1 to 1."""
    import torch

    return 2 * float(torch.rand((), generator=generator)) - 1


def check_augmentations(names: Sequence[str], key: str) -> None:
    """Raise :class:`ConfigError` for unknown and repeated names; ``key`` is the setting that gave them."""
    for name in names:
        Augmentation.named(name, key)
    if len(set(names)) < len(names):
        raise ConfigError(f"{key}={list(names)} names an augmentation twice. Name each once.")
