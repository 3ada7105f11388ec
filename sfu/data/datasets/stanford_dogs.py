"""Stanford Dogs: 12,000 training and 8,580 test images of 120 breeds (Khosla et al. 2011), official lists and layout.

    root/stanford_dogs/Images/n02085620-Chihuahua/n02085620_10074.jpg ...
    root/stanford_dogs/train_list.mat, test_list.mat        fields file_list [n, 1] and labels [n, 1], 1 .. 120

Checksums as in TensorFlow Datasets.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sfu.data.datasets.base import PublicDataset
from sfu.data.mat import read_mat
from sfu.errors import DataError
from sfu.readers import refusing
from sfu.schema import setting

if TYPE_CHECKING:
    from sfu.data.download import Archive
    from sfu.data.images.image_set import ImageSet

log = logging.getLogger(__name__)

_HOME = "http://vision.stanford.edu/aditya86/ImageNetDogs/"
_LISTS = ("train_list.mat", "test_list.mat")
_PUBLISHED = [12_000, 8_580]


@dataclass
class StanfordDogs(PublicDataset, name="stanford_dogs"):
    """The training list, then the test list, in their order whichever split is used."""

    subfolder: ClassVar[str] = "stanford_dogs"

    official_split: bool = setting(True, "Use the published split of 12,000 / 8,580; false draws a test part.")
    test_fraction: float = setting(0.1, "Share held out without the official split.", above=0, below=1)

    def images(self) -> ImageSet:
        from sfu.data.images.image_set import ImageSet
        from sfu.data.images.images import FileImages

        root = self.obtain()
        parts = [_read_list(root / name) for name in _LISTS]
        files = [file for part, _ in parts for file in part]
        labels_N = np.concatenate([labels for _, labels in parts]) - 1
        breeds = _breeds(files, labels_N, root)
        _require_files(files, root / "Images")
        counts = [len(part) for part, _ in parts]
        if counts != _PUBLISHED:
            log.warning(
                "%s: the lists name %d training and %d test images, the published ones %d and %d",
                root, *counts, *_PUBLISHED,
            )  # fmt: skip
        is_test_N = np.arange(len(files)) >= counts[0] if self.official_split else None
        return ImageSet(FileImages([os.path.join(root, "Images", file) for file in files]), labels_N, is_test_N, breeds)

    def archives(self) -> tuple[Archive, ...]:
        from sfu.data.download import Archive

        images = "a443fc2f9a851aa1a7b8e4fa4af94b8459fce2c9f5a2f4dd4669cf9673a4ec58"
        lists = "34b47cacd9a98b5d150e084f24d29391c084c55272295ec65c85651bc35f4d6c"
        return (
            Archive(f"{_HOME}images.tar", "images.tar", "sha256", images, ("Images",), 793_579_520),
            Archive(f"{_HOME}lists.tar", "lists.tar", "sha256", lists, _LISTS, 481_280),
        )


def _read_list(path: Path) -> tuple[list[str], np.ndarray]:
    """File names relative to Images, and labels from 1."""
    with refusing(path, "Remove it, and sfu extracts it again from lists.tar.", DataError):
        content = read_mat(path, ("file_list", "labels"))
        files, labels = content.get("file_list"), content.get("labels")
        if not (isinstance(files, list) and all(isinstance(name, str) for name in files)):
            raise ValueError("it has no file_list of texts")
        if not isinstance(labels, np.ndarray) or not files or len(files) != len(labels):
            raise ValueError("it has not one label for every file of its file_list")
        if not np.array_equal(labels, labels.astype(np.int64)):
            raise ValueError("its labels are not whole numbers")
        return files, labels.astype(np.int64)


def _breeds(files: list[str], labels_N: np.ndarray, root: Path) -> tuple[str, ...]:
    """Names of the classes; every class is one folder, every folder one class, and no file is listed twice."""
    if len(set(files)) < len(files):
        raise DataError(f"{root}: {' and '.join(_LISTS)} name an image twice, so test images would be trained on.")
    folders = sorted({(int(label), file.split("/")[0]) for label, file in zip(labels_N, files, strict=True)})
    labels, names = zip(*folders, strict=True)
    if labels != tuple(range(len(folders))) or len(set(names)) < len(names):
        raise DataError(
            f"{root}: labels and folders of {' and '.join(_LISTS)} contradict each other. Each label from 1 on must "
            "stand for one folder such as n02085620-Chihuahua."
        )
    return tuple(name.split("-", 1)[-1].replace("_", " ") for name in names)


def _require_files(files: list[str], folder: Path) -> None:
    there: set[str] = set()
    for name in {file.split("/")[0] for file in files}:
        if name.strip(".") and (folder / name).is_dir():  # never ".."
            there.update(f"{name}/{file}" for file in os.listdir(folder / name))
    lacking = [file for file in files if file not in there]
    if lacking:
        raise DataError(
            f"{folder} lacks {lacking[0]} and {len(lacking) - 1} more of the {len(files)} images that "
            f"{' and '.join(_LISTS)} name. Remove the folder, and sfu extracts it again from images.tar."
        )
