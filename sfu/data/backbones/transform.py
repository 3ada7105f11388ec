"""What is done to an image before the network sees it: the same for every image, whatever part or set it belongs to.

Shapes: B images, K channels, H rows, W columns, S pixels a side after the crop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sfu.data.images.decode import ImageError
from sfu.errors import DataError

_MOST_PIXELS = 100_000_000


@dataclass(frozen=True)
class ImageTransform:
    """Resize, crop the centre, scale to 0..1, normalise.

    Attributes:
        resize: Length of the shorter side after resizing, with antialiasing; ``None`` leaves the size alone.
        crop: Side S of the centre crop; ``None`` crops nothing.
        interpolation: ``bilinear``, ``bicubic`` or ``nearest``.
        mean: Of each channel, in 0..1; empty: values stay in 0..1.
        std: Of each channel.
    """

    resize: int | None = None
    crop: int | None = None
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def pixels(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Resized and cropped images, uint8 ``[K, S, S]``, on the CPU, from uint8 images of any sizes.

        Images of one size are resized together, which gives the same pixels as one by one: those of Pillow, with which
        weights are made (but for a grey level or two in under 2 % of them, even for noise). On other devices the same
        operation rounds through floating point and differs in a quarter of them, so it is not done there.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, image in enumerate(images):
            groups.setdefault(tuple(image.shape), []).append(index)
        done: list[Tensor] = list(images)
        for (_, height, width), members in groups.items():
            if self._changes(height, width):
                batch = self._resize_and_crop(stack([images[index] for index in members]))
                for index, image in zip(members, batch, strict=True):
                    done[index] = image
        return done

    def require_shape(self, image: Tensor, name: str) -> None:
        """Raise :class:`ImageError` for an image so long and thin that it would be over 100 million pixels resized."""
        _, height, width = image.shape
        if self.resize is not None and self.resize**2 * max(height, width) > _MOST_PIXELS * min(height, width):
            raise ImageError(
                f"{name} is {width} x {height}, too long and thin to resize its shorter side to {self.resize}"
            )

    def _changes(self, height: int, width: int) -> bool:
        resized = self.resize is not None and min(height, width) != self.resize
        return resized or (self.crop is not None and (height, width) != (self.crop, self.crop))

    def _resize_and_crop(self, batch: Tensor) -> Tensor:
        from torchvision.transforms import v2

        if self.resize is not None and min(batch.shape[-2:]) != self.resize:
            mode = v2.InterpolationMode(self.interpolation)
            batch = v2.functional.resize(batch, [self.resize], interpolation=mode, antialias=True)
        if self.crop is not None:
            batch = v2.functional.center_crop(batch, [self.crop, self.crop])
        return batch

    def normalized(self, pixels: Sequence[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
        """One batch ``[B, K, S, S]`` on ``device`` from what :meth:`pixels` gave, scaled to 0..1 and normalised.

        Raises:
            DataError: Without a crop, the images differ in size.
        """
        sizes = sorted({f"{image.shape[2]} x {image.shape[1]}" for image in pixels})
        if len(sizes) > 1:
            raise DataError(f"the images differ in size ({', '.join(sizes[:4])}, ...). Set backbone.size.")
        batch = stack(pixels).to(device, non_blocking=True)
        scaled = batch.to(torch.float32).div_(255.0)
        if len(self.mean) == 3 and batch.shape[1] == 1:  # greyscale for a network of colours
            scaled = scaled.expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)
        if self.mean:
            shape = (1, -1, 1, 1)
            mean, std = (torch.tensor(values, device=device).reshape(shape) for values in (self.mean, self.std))
            scaled = scaled.sub_(mean).div_(std)
        return scaled.to(dtype)


def stack(images: Sequence[Tensor]) -> Tensor:
    """Images of one size ``[K, H, W]`` as one batch ``[B, K, H, W]``, channels last in memory."""
    return torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
