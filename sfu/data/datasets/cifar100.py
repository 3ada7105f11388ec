"""CIFAR-100: 50,000 training and 10,000 test images, 32 x 32, 100 fine classes (Krizhevsky 2009).

torchvision reads it. Why its pickles may be loaded stands in :mod:`sfu.data.datasets.cifar10`. The 20 coarse classes
are not used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sfu.data.datasets.cifar10 import cifar_files, read_cifar
from sfu.data.images.image_set import ImageSet

if TYPE_CHECKING:
    from sfu.settings import DatasetConfig


def images(config: DatasetConfig) -> ImageSet:
    """The 50,000 training images, then the 10,000 test images, in the files' order.

    Raises:
        DataError: They are missing and cannot be fetched, or a file is not the published one.
    """
    from torchvision.datasets import CIFAR100

    return read_cifar(CIFAR100, config)


def source_files(config: DatasetConfig) -> list[Path]:
    """The folder of batches and the archive it comes from, below ``dataset.root``.

    Raises:
        ConfigError: A setting that CIFAR-100 would ignore.
        DataError: Files are missing, and ``dataset.download=false``.
    """
    from torchvision.datasets import CIFAR100

    return cifar_files(CIFAR100, config)
