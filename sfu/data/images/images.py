"""Sequences of images that can be decoded one by one, named, digested and reduced to some rows.

Shapes: N images, K channels (1 or 3), H rows, W columns.
"""

from __future__ import annotations

import hashlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sfu.data.augmentations import Augmentation, Mixture
from sfu.data.images.decode import ImageError, decode_image
from sfu.data.images.files import file_digests
from sfu.errors import DataError


class Images(ABC):
    """N images in a fixed order."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def decode(self, index: int) -> Tensor:
        """Return the pixels of one image, uint8 ``[K, H, W]``.

        Raises:
            ImageError: The image cannot be decoded; the message names it.
        """

    @abstractmethod
    def name(self, index: int) -> str:
        """Return what to call one image in messages."""

    @abstractmethod
    def take(self, rows: Sequence[int] | Tensor) -> Images:
        """Return some of the images, in the order given; no other image can be reached from them."""

    @abstractmethod
    def fingerprint(self, reading: Callable[[int], None] | None = None) -> str:
        """Return a SHA-256 over the contents of all images in order, 64 hex digits.

        ``reading`` is called with the number of files if they must be read.
        """

    def digests(self) -> list[bytes]:
        """Return a SHA-256 for each image, 32 bytes: of its file, or of its pixels if it is in memory.

        By default, an image is known by its name alone.
        """
        return [hashlib.sha256(self.name(index).encode()).digest() for index in range(len(self))]

    @property
    def paths(self) -> list[Path]:
        """The files that decoding opens; empty if the images are in memory."""
        return []


class ArrayImages(Images):
    """Images of one size, in memory."""

    def __init__(self, pixels: np.ndarray, what: str) -> None:
        """Wrap ``pixels``, uint8 ``[N, H, W]`` or ``[N, H, W, K]``; ``what`` names the dataset in messages."""
        if pixels.ndim == 3:
            pixels = pixels[..., None]
        if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[3] not in (1, 3):
            raise DataError(f"{what}: images must be uint8 [N, H, W, 1 or 3], not {pixels.dtype} {pixels.shape}.")
        self.pixels_NHWK = np.ascontiguousarray(pixels)
        self._what = what

    def __len__(self) -> int:
        return len(self.pixels_NHWK)

    def decode(self, index: int) -> Tensor:
        return torch.from_numpy(self.pixels_NHWK[index].transpose(2, 0, 1).copy())

    def name(self, index: int) -> str:
        return f"image {index} of {self._what}"

    def take(self, rows: Sequence[int] | Tensor) -> ArrayImages:
        return ArrayImages(self.pixels_NHWK[np.asarray(rows, dtype=np.int64)], self._what)

    def fingerprint(self, reading: Callable[[int], None] | None = None) -> str:
        digest = hashlib.sha256(f"array {self.pixels_NHWK.shape}".encode())
        digest.update(self.pixels_NHWK.data)
        return digest.hexdigest()

    def digests(self) -> list[bytes]:
        return [hashlib.sha256(image.tobytes()).digest() for image in self.pixels_NHWK]


class FileImages(Images):
    """Images in files, of any sizes, read when they are decoded."""

    def __init__(self, paths: Sequence[Path | str], channels: int = 3) -> None:
        self._paths, self._channels = [str(path) for path in paths], channels

    def __len__(self) -> int:
        return len(self._paths)

    def decode(self, index: int) -> Tensor:
        path = self._paths[index]
        try:
            data = Path(path).read_bytes()
        except OSError as error:  # the image may be fine, so this must not be cached as damage
            raise DataError(f"{path} cannot be read ({error.strerror}).") from error
        try:
            return decode_image(data, self._channels)
        except ImageError as error:
            raise ImageError(f"{path} {error}") from None

    def name(self, index: int) -> str:
        return self._paths[index]

    def take(self, rows: Sequence[int] | Tensor) -> FileImages:
        return FileImages([self._paths[int(row)] for row in rows], self._channels)

    def fingerprint(self, reading: Callable[[int], None] | None = None) -> str:
        digest = hashlib.sha256(f"files {self._channels}".encode())
        for one in file_digests(self._paths, reading):
            digest.update(one)
        return digest.hexdigest()

    def digests(self) -> list[bytes]:
        return file_digests(self._paths)

    @property
    def paths(self) -> list[Path]:
        return [Path(path) for path in self._paths]


class AugmentedImages(Images):
    """Images changed by one augmentation. A random one depends on the number of the draw and of the image alone."""

    def __init__(self, images: Images, name: str, draw: int = 1) -> None:
        """Wrap ``images``; ``name`` is that of an :class:`Augmentation`, and ``draw`` tells several copies apart.

        Raises:
            DataError: The augmentation mixes two images, and there is only one.
        """
        self._images, self._name, self._draw = images, name, draw
        self._change = Augmentation.named(name)()
        if isinstance(self._change, Mixture) and len(images) < 2:
            raise DataError(
                f"curvature.augment={name} mixes each image to forget with another one, but there is only one. Leave "
                f"{name} out."
            )

    @property
    def title(self) -> str:
        """The name, and from the second draw on its number."""
        return self._name if self._draw == 1 else f"{self._name} {self._draw}"

    def __len__(self) -> int:
        return len(self._images)

    def partner(self, index: int) -> int:
        """Return the number of the image that one is mixed with; its own if the augmentation mixes none."""
        if not isinstance(self._change, Mixture):
            return index
        further = 1 + int(torch.randint(len(self) - 1, (), generator=self._generator(index, "partner")))
        return (index + further) % len(self)

    def _generator(self, *what: object) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(" ".join(map(str, (self.title, *what))).encode()))

    def decode(self, index: int) -> Tensor:
        image, generator = self._images.decode(index).contiguous(), self._generator(index)
        if not isinstance(self._change, Mixture):
            return self._change(image, generator)
        other = self._images.decode(self.partner(index)).contiguous()
        if other.shape != image.shape:
            from torchvision.transforms import v2

            other = v2.functional.resize(other, list(image.shape[-2:]), antialias=True)
        return self._change.mix(image, other, generator)

    def name(self, index: int) -> str:
        return f"{self._images.name(index)} ({self.title})"

    def take(self, rows: Sequence[int] | Tensor) -> AugmentedImages:
        """Return some of them; a random augmentation depends on the new numbers."""
        return AugmentedImages(self._images.take(rows), self._name, self._draw)

    def fingerprint(self, reading: Callable[[int], None] | None = None) -> str:
        return hashlib.sha256(f"{self.title} {self._images.fingerprint(reading)}".encode()).hexdigest()

    def digests(self) -> list[bytes]:
        """Return those of the images that are changed."""
        return self._images.digests()

    @property
    def paths(self) -> list[Path]:
        return self._images.paths
