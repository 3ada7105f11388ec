"""CIFAR-10 and CIFAR-100: 50,000 training and 10,000 test images, 32 x 32 (Krizhevsky 2009), by torchvision's reader.

The published files are pickles, which sfu otherwise never loads. Here torchvision compares the MD5 of every one of them
with the known sums of the authors' files before it is unpickled, so what is unpickled is what they published. Of
CIFAR-100 the 100 fine classes are used.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sfu.data.datasets.base import PublicDataset
from sfu.errors import DataError

if TYPE_CHECKING:
    from torchvision.datasets import CIFAR10

    from sfu.data.download import Archive
    from sfu.data.images.image_set import ImageSet


@dataclass
class Cifar(PublicDataset):
    """The training images, then the test images, in the files' order."""

    archive_bytes: ClassVar[int]

    @abstractmethod
    def reader(self) -> type[CIFAR10]:
        """Return torchvision's class."""

    def images(self) -> ImageSet:
        from torchvision.datasets.utils import check_integrity

        from sfu.data.images.image_set import ImageSet
        from sfu.data.images.images import ArrayImages

        self.source_files()
        reader, root = self.reader(), self.obtain()
        folder = root / reader.base_folder
        try:
            train, test = (reader(root, train=train, download=False) for train in (True, False))
        except RuntimeError as error:
            bad = [f"{name} (md5 {md5})" for name, md5 in _published(reader) if not check_integrity(folder / name, md5)]
            raise DataError(
                f"{folder} differs from the published files in {', '.join(bad)}; nothing was unpickled. "
                + _again(folder)
            ) from error
        labels_N = np.array(train.targets + test.targets, dtype=np.int64)
        pixels_NHWK = np.empty((len(labels_N), *train.data.shape[1:]), dtype=np.uint8)
        pixels_NHWK[: len(train)], pixels_NHWK[len(train) :] = train.data, test.data  # a copy in plain C order
        is_test_N = np.arange(len(labels_N)) >= len(train)
        return ImageSet(ArrayImages(pixels_NHWK, self.source), labels_N, is_test_N, tuple(train.classes))

    def source_files(self) -> list[Path]:
        files = super().source_files()
        folder = files[0]
        lacking = [name for name, _ in _published(self.reader()) if not (folder / name).exists()]
        if folder.exists() and lacking:
            raise DataError(f"{folder} lacks {', '.join(lacking)}. {_again(folder)}")
        return files

    def archives(self) -> tuple[Archive, ...]:
        from sfu.data.download import Archive

        reader = self.reader()
        return (Archive(reader.url, reader.filename, "md5", reader.tgz_md5, (reader.base_folder,), self.archive_bytes),)


@dataclass
class Cifar10(Cifar, name="cifar10"):
    """10 classes."""

    archive_bytes: ClassVar[int] = 170_498_071

    def reader(self) -> type[CIFAR10]:
        from torchvision.datasets import CIFAR10

        return CIFAR10


@dataclass
class Cifar100(Cifar, name="cifar100"):
    """100 fine classes."""

    archive_bytes: ClassVar[int] = 169_001_437

    def reader(self) -> type[CIFAR10]:
        from torchvision.datasets import CIFAR100

        return CIFAR100


def _published(reader: type[CIFAR10]) -> list[tuple[str, str]]:
    meta = [reader.meta["filename"], reader.meta["md5"]]
    return [(name, md5) for name, md5 in (*reader.train_list, *reader.test_list, meta)]


def _again(folder: Path) -> str:
    return "Remove that folder, and sfu extracts it again from its archive, or downloads that (dataset.download=true)."
