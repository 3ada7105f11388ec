"""Images of your own: ``dataset.path`` with one folder a class, below train/ and test/ or not, or with a CSV of labels.

Folders are read as torchvision's ``ImageFolder`` reads them: classes in sorted order, images in sorted order, the same
file endings; but hidden files and folders are left out. With ``dataset.labels_csv`` folders mean nothing, except that
train/ and test/ are the parts if the CSV file lists files of both and has no split column.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sfu.data.datasets.base import ImageDataset
from sfu.data.images.files import IMAGE_ENDINGS, files_below, is_image, subfolders
from sfu.errors import ConfigError, DataError
from sfu.schema import setting

if TYPE_CHECKING:
    from sfu.data.images.image_set import ImageSet

_TRAIN, _TEST = "train", "test"


@dataclass
class ImageFolder(ImageDataset, name="image_folder"):
    """Training images, then test images, each by class and name; with ``dataset.labels_csv``, by name."""

    path: str | None = setting(None, "Folder of train/ and test/, or of one folder for each class.", location=True)
    labels_csv: str | None = setting(
        None, "CSV file below it with columns file, label and optionally split.", location=True
    )
    test_fraction: float = setting(0.2, "Share held out for testing where there is no test/.", above=0, below=1)

    def images(self) -> ImageSet:
        from sfu.data.images.image_set import ImageSet
        from sfu.data.images.images import FileImages
        from sfu.data.images.labels_csv import read_labels_csv

        folder, csv_file = self._places()
        if csv_file is not None:
            return read_labels_csv(csv_file, folder, self.n_classes)
        parts = [folder / _TRAIN, folder / _TEST] if _has_parts(folder) else [folder]
        classes = _class_folders(parts[0])
        if len(classes) < 2:
            raise DataError(f"{parts[0]} holds one class, {classes[0]}. At least two are needed.")
        strangers = [name for name in _class_folders(parts[-1]) if name not in classes]
        if strangers:
            raise DataError(f"{parts[-1]} has classes that {parts[0]} lacks: {', '.join(strangers)}.")
        found = [_labelled(part, classes) for part in parts]
        samples = [sample for part in found for sample in part]
        labels_N = np.array([label for _, label in samples], dtype=np.int64)
        is_test_N = np.arange(len(samples)) >= len(found[0]) if len(parts) == 2 else None
        return ImageSet(FileImages([path for path, _ in samples]), labels_N, is_test_N, tuple(classes))

    def source_files(self) -> list[Path]:
        return [place for place in self._places() if place is not None]

    def _places(self) -> tuple[Path, Path | None]:
        if not self.path:
            raise ConfigError(
                "dataset=image_folder needs dataset.path: a folder of train/ and test/, or of one folder for each "
                "class."
            )
        folder = Path(self.path).expanduser()
        if not folder.is_dir():
            what = "is not a folder" if folder.exists() else f"does not exist (looked from {Path.cwd()})"
            raise DataError(f"dataset.path={folder} {what}. Give the path of a folder of images.")
        if self.labels_csv:
            csv_file = folder / Path(self.labels_csv).expanduser()
            if not csv_file.is_file():
                raise DataError(
                    f"dataset.labels_csv={self.labels_csv} is not a file (looked for {csv_file}). Give its path from "
                    "dataset.path."
                )
            return folder, csv_file
        _has_parts(folder)
        return folder, None


def _has_parts(folder: Path) -> bool:
    """Whether there are train/ and test/ with folders in them (a class may well be called train), and not just one."""
    there = [name for name in (_TRAIN, _TEST) if (folder / name).is_dir() and subfolders(folder / name)]
    if len(there) == 1:
        lacking = _TEST if there == [_TRAIN] else _TRAIN
        raise DataError(
            f"dataset.path={folder} has {there[0]}/ but no {lacking}/ with class folders. It holds "
            f"{', '.join(subfolders(folder))}. Add {lacking}/, or set dataset.path={folder / there[0]} to have a "
            "test part drawn."
        )
    return bool(there)


def _class_folders(folder: Path) -> list[str]:
    classes = subfolders(folder)
    if not classes:
        raise DataError(
            f"{folder} holds no folders. Put images in one folder for each class, or name their classes by "
            "dataset.labels_csv."
        )
    return classes


def _labelled(part: Path, classes: list[str]) -> list[tuple[str, int]]:
    """Paths and class indices of one part, in torchvision's order."""
    images_of = {name: [file for file in files_below(part / name) if is_image(file)] for name in subfolders(part)}
    empty = [f"{name}/" for name, files in images_of.items() if not files]
    if empty:
        raise DataError(
            f"{part} has no image in {', '.join(empty)}. Fill or remove it. Images end in {', '.join(IMAGE_ENDINGS)}."
        )
    index = {name: number for number, name in enumerate(classes)}
    return [(f"{part}/{name}/{file}", index[name]) for name, files in images_of.items() for file in files]
