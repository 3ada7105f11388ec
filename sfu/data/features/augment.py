"""Augmented copies of images, for more curvature from the forget set alone.

Every augmentation preserves the image's size, depends only on the image (and, if it is random, on its number), and is
applied before the backbone's own transform. Shapes: K channels, H rows, W columns.
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
        return Augmentation.named(self._name)()(image, torch.Generator().manual_seed(seed))

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
