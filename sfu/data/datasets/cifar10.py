"""CIFAR-10: 50,000 training and 10,000 test images, 32 x 32, 10 classes (Krizhevsky 2009), by torchvision's reader.

The published files are pickles, which sfu otherwise never loads. Here torchvision compares the MD5 of every one of them
with the known sums of the authors' files before it is unpickled, so what is unpickled is what they published.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sfu.data.dataset_settings import refuse_unused, root_folder
from sfu.data.download import Archive, obtain, require_obtainable
from sfu.data.images.image_set import ImageSet
from sfu.data.images.images import ArrayImages
from sfu.errors import DataError

if TYPE_CHECKING:
    from torchvision.datasets import CIFAR10

    from sfu.settings import DatasetConfig


def images(config: DatasetConfig) -> ImageSet:
    """The 50,000 training images, then the 10,000 test images, in the files' order.

    Raises:
        DataError: They are missing and cannot be fetched, or a file is not the published one.
    """
    from torchvision.datasets import CIFAR10

    return read_cifar(CIFAR10, config)


def source_files(config: DatasetConfig) -> list[Path]:
    """The folder of batches and the archive it comes from, below ``dataset.root``.

    Raises:
        ConfigError: A setting that CIFAR-10 would ignore.
        DataError: Files are missing, and ``dataset.download=false``.
    """
    from torchvision.datasets import CIFAR10

    return cifar_files(CIFAR10, config)


def read_cifar(reader: type[CIFAR10], config: DatasetConfig) -> ImageSet:
    """Both parts by torchvision's class ``reader``."""
    cifar_files(reader, config)
    root = root_folder(config)
    obtain([_archive(reader)], root, config.download)
    try:
        train, test = (reader(root, train=train, download=False) for train in (True, False))
    except RuntimeError as error:
        raise DataError(_damage(reader, root)) from error
    labels_N = np.array(train.targets + test.targets, dtype=np.int64)
    pixels_NHWK = np.empty((len(labels_N), *train.data.shape[1:]), dtype=np.uint8)
    pixels_NHWK[: len(train)], pixels_NHWK[len(train) :] = train.data, test.data  # torchvision's are turned, not copied
    is_test_N = np.arange(len(labels_N)) >= len(train)
    return ImageSet(ArrayImages(pixels_NHWK, f"dataset={config.name}"), labels_N, is_test_N, tuple(train.classes))


def cifar_files(reader: type[CIFAR10], config: DatasetConfig) -> list[Path]:
    """What :func:`read_cifar` reads, once it is clear that it can."""
    refuse_unused(config, "root")
    root = root_folder(config)
    files = require_obtainable([_archive(reader)], root, config.download)
    folder = root / reader.base_folder
    lacking = [name for name, _ in _published(reader) if not (folder / name).exists()]
    if folder.exists() and lacking:
        raise DataError(f"{folder} lacks {', '.join(lacking)}. {_again(folder)}")
    return files


def _archive(reader: type[CIFAR10]) -> Archive:
    return Archive(reader.url, reader.filename, "md5", reader.tgz_md5, (reader.base_folder,))


def _published(reader: type[CIFAR10]) -> list[tuple[str, str]]:
    meta = [reader.meta["filename"], reader.meta["md5"]]
    return [(name, md5) for name, md5 in (*reader.train_list, *reader.test_list, meta)]


def _damage(reader: type[CIFAR10], root: Path) -> str:
    from torchvision.datasets.utils import check_integrity

    folder = root / reader.base_folder
    bad = [f"{name} (md5 {md5})" for name, md5 in _published(reader) if not check_integrity(folder / name, md5)]
    return f"{folder} differs from the published files in {', '.join(bad)}; nothing was unpickled. {_again(folder)}"


def _again(folder: Path) -> str:
    return "Remove that folder, and sfu extracts it again from its archive, or downloads that (dataset.download=true)."
