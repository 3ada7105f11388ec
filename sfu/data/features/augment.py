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

from sfu.data.augmentations import Augmentation
from sfu.data.images.images import Images


class AugmentedImages(Images):
    """Every image changed by one augmentation; the same numbers every time."""

    def __init__(self, images: Images, name: str) -> None:
        """Keep both; ``name`` is that of an augmentation."""
        self._images, self._augmentation = images, name
        self.channels = images.channels

    def __len__(self) -> int:
        """N."""
        return len(self._images)

    def decode(self, index: int) -> Tensor:
        """Decode, then augment."""
        image = self._images.decode(index).contiguous()
        seed = zlib.crc32(f"{self._augmentation} {index}".encode())
        return Augmentation.named(self._augmentation)()(image, torch.Generator().manual_seed(seed))

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
