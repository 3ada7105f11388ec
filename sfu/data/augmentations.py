"""Augmentations of the forget images, for more curvature from the forget set alone.

Each keeps the image's size and goes before the backbone's own transform. Most change one image; a :class:`Mixture` also
takes another one. This module imports PyTorch only when an image is changed. Shapes: K channels, H rows, W columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from sfu.errors import ConfigError
from sfu.registry import Registered

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_WINDOW = 0.875
_DEGREES = 10.0
_BRIGHTNESS = 0.3
_PADDING = 0.125
_SMALLEST_WINDOW = 0.6
_JITTER = 0.4
_SHARES = (0.2, 0.5)  # of the other image


class Augmentation(Registered, ABC, kind="augmentation"):
    """A change of an image, chosen by its name in ``curvature.augment``.

    Attributes:
        random: Whether copies differ, so that several of an image are worth having.
    """

    random: ClassVar[bool] = True

    @abstractmethod
    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        """Return a changed copy of a uint8 image ``[K, H, W]``; ``generator`` draws what is random."""


class Mixture(Augmentation):
    """A mixture of an image with another image to forget.

    No label is mixed: under the quadratic, logistic and softmax losses, curvature does not depend on labels.
    """

    @abstractmethod
    def mix(self, image: Tensor, other: Tensor, generator: torch.Generator) -> Tensor:
        """Return a mixture of two uint8 images of one size, ``[K, H, W]``."""

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        return self.mix(image, image, generator)


class Flip(Augmentation, name="flip"):
    """Exchanges left and right."""

    random = False

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        return image.flip(-1)


class Crop(Augmentation, name="crop"):
    """Takes a random window of 7/8 of each side and resizes it to the whole image."""

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        from torchvision.transforms import v2

        top, left, rows, columns = _window(image, _WINDOW, generator)
        return v2.functional.resized_crop(image, top, left, rows, columns, list(image.shape[-2:]), antialias=True)


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


class PadCrop(Augmentation, name="pad_crop"):
    """Moves the image by up to 1/8 of each side; reflection at the edge fills the gap."""

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        import torch

        for axis, size in ((-2, image.shape[-2]), (-1, image.shape[-1])):
            reach = min(round(_PADDING * size), size - 1)
            moved = torch.arange(size) + int(torch.randint(-reach, reach + 1, (), generator=generator))
            image = image.index_select(axis, (size - 1 - (size - 1 - moved.abs()).abs()).to(image.device))
        return image


class Zoom(Augmentation, name="zoom"):
    """Takes a random window of 60 to 100 % of each side and resizes it to the whole image."""

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        from torchvision.transforms import v2

        side = _between(_SMALLEST_WINDOW, 1.0, generator)
        top, left, rows, columns = _window(image, side, generator)
        return v2.functional.resized_crop(image, top, left, rows, columns, list(image.shape[-2:]), antialias=True)


class ColorJitter(Augmentation, name="color_jitter"):
    """Multiplies brightness, contrast and, in colour images, saturation by 0.6 to 1.4 each."""

    def __call__(self, image: Tensor, generator: torch.Generator) -> Tensor:
        from torchvision.transforms import v2

        change = v2.functional
        brightness, contrast, saturation = (1 + _JITTER * _signed(generator) for _ in range(3))
        image = change.adjust_contrast(change.adjust_brightness(image, brightness), contrast)
        return change.adjust_saturation(image, saturation) if image.shape[0] == 3 else image


class CutMix(Mixture, name="cutmix"):
    """Replaces a random box, 20 to 50 % of the image, by the same box of another image to forget."""

    def mix(self, image: Tensor, other: Tensor, generator: torch.Generator) -> Tensor:
        top, left, rows, columns = _window(image, _between(*_SHARES, generator) ** 0.5, generator)
        mixed, box = image.clone(), (..., slice(top, top + rows), slice(left, left + columns))
        mixed[box] = other[box]
        return mixed


class MixUp(Mixture, name="mixup"):
    """Averages the image with another image to forget, of weight 20 to 50 %."""

    def mix(self, image: Tensor, other: Tensor, generator: torch.Generator) -> Tensor:
        share = _between(*_SHARES, generator)
        return (image + share * (other.float() - image.float())).round().to(image.dtype)


def _signed(generator: torch.Generator) -> float:
    """Draw a number from -1 to 1."""
    import torch

    return 2 * float(torch.rand((), generator=generator)) - 1


def _between(low: float, high: float, generator: torch.Generator) -> float:
    """Draw a number from an interval."""
    import torch

    return low + (high - low) * float(torch.rand((), generator=generator))


def _window(image: Tensor, side: float, generator: torch.Generator) -> tuple[int, int, int, int]:
    """Draw where a window of this part of each side is: top, left, height, width."""
    import torch

    height, width = image.shape[-2:]
    rows, columns = max(1, round(side * height)), max(1, round(side * width))
    top = int(torch.randint(height - rows + 1, (), generator=generator))
    left = int(torch.randint(width - columns + 1, (), generator=generator))
    return top, left, rows, columns


def numbered(names: Sequence[str]) -> list[tuple[str, int]]:
    """Return each name with the number of the draw, from 1: the second ``crop`` is another draw than the first."""
    return [(name, names[: place + 1].count(name)) for place, name in enumerate(names)]


def check_augmentations(names: Sequence[str], key: str) -> None:
    """Raise :class:`ConfigError` for unknown names, and for repeated ones whose copies would not differ.

    ``key`` is the setting that gave them.
    """
    for name, draw in numbered(names):
        if not Augmentation.named(name, key).random and draw > 1:
            raise ConfigError(
                f"{key}={list(names)} names {name} twice, but it always gives the same copy. Name it once."
            )
