"""Images of your own: ``dataset.path`` with one folder a class, below train/ and test/ or not, or with a CSV of labels.

Folders are read as torchvision's ``ImageFolder`` reads them: classes in sorted order, images in sorted order, the same
file endings; but hidden files and folders are left out, and a folder to which several links lead is read once. With
``dataset.labels_csv`` folders mean nothing, except that train/ and test/ are the parts if the CSV file lists files of
both and has no split column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sfu.data.datasets.base import ImageDataset
from sfu.data.images.files import IMAGE_ENDINGS, Walk, endings, images_in, is_image, subfolders
from sfu.errors import ConfigError, DataError
from sfu.names import composed, file_name_key, warn_once
from sfu.schema import setting

if TYPE_CHECKING:
    from sfu.data.images.image_set import ImageSet

_TRAIN, _TEST = "train", "test"


@dataclass
class ImageFolder(ImageDataset, name="image_folder"):
    """Training images, then test images, each by class and name; with ``dataset.labels_csv``, by name."""

    path: str | None = setting(None, "Folder of train/ and test/, or of one folder for each class.", location=True)
    labels_csv: str | None = setting(
        None, "CSV file below it with columns file, label and optionally split and group.", location=True
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
        walk = Walk(folder)
        folders = [class_folders(part, walk) for part in parts]
        classes = list(folders[0])
        if len(classes) < 2:
            inner = parts[0] / classes[0]
            hint = f" Did you mean dataset.path={inner}?" if len(subfolders(inner)) > 1 else ""
            raise DataError(f"{parts[0]} holds one class, {classes[0]}. At least two are needed.{hint}")
        strangers = [name for name in folders[-1] if name not in classes]
        if strangers:
            raise DataError(f"{parts[-1]} has classes that {parts[0]} lacks: {', '.join(strangers)}.")
        left_out: list[str] = []
        found = [labelled(part, mine, classes, walk, left_out) for part, mine in zip(parts, folders, strict=True)]
        _warn(folder, parts, classes, walk.repeated, endings(left_out))
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


def class_folders(part: Path, walk: Walk) -> dict[str, Path]:
    """Folders by the name of their class, in torchvision's order; a link back to the dataset is no class.

    Raises:
        DataError: There are none, or two of them are one.
    """
    folders: dict[str, Path] = {}
    for name in subfolders(part):
        folder = part / name
        before = walk.enter(folder)
        if before is None:
            other = folders.setdefault(composed(name), folder)
            if other != folder:
                raise DataError(f"{other} and {folder} are one class, written in two ways. Merge the two folders.")
        elif part.resolve().is_relative_to(before.resolve()):
            walk.repeated.append(str(folder))
        else:
            raise DataError(
                f"{before} and {folder} are the same folder, so each of its images would count twice. Remove the link."
            )
    if not folders:
        raise DataError(
            f"{part} holds no folders. Put images in one folder for each class, or name their classes by "
            "dataset.labels_csv."
        )
    return folders


def labelled(
    part: Path, folders: Mapping[str, Path], classes: list[str], walk: Walk, left_out: list[str]
) -> list[tuple[str, int]]:
    """Paths and class indices of one part, in torchvision's order; files without an image's ending are ``left_out``."""
    files_of = {name: walk.files_below(folder) for name, folder in folders.items()}
    images_of = {name: [file for file in files if is_image(file)] for name, files in files_of.items()}
    others = [file for files in files_of.values() for file in files if not is_image(file)]
    empty = [f"{name}/" for name, files in images_of.items() if not files]
    if empty:
        holds = f" It holds {endings(others)}." if others else ""
        raise DataError(
            f"{part} has no image in {', '.join(empty)}. Fill or remove it. Images end in {', '.join(IMAGE_ENDINGS)}."
            f"{holds}"
        )
    left_out += others
    index = {name: number for number, name in enumerate(classes)}
    return [(f"{folders[name]}/{file}", index[name]) for name, files in images_of.items() for file in files]


def _warn(folder: Path, parts: list[Path], classes: list[str], repeated: list[str], left_out: str) -> None:
    """Say what a user may not expect of a folder."""
    source = f"dataset.path={folder}"
    others = [f"{name}/" for name in subfolders(folder) if folder / name not in parts] if len(parts) > 1 else []
    if others:
        warn_once(__name__, f"{source}: folders beside train/ and test/ are left out: {', '.join(others)}.")
    loose = [place / name for place in dict.fromkeys([folder, *parts]) for name in images_in(place)]
    if loose:
        warn_once(
            __name__,
            f"{source}: images in no class folder are left out: {len(loose)} (such as {loose[0]}). Move them into the "
            "folder of their class.",
        )
    if left_out:
        warn_once(
            __name__,
            f"{source}: files with other endings than {', '.join(IMAGE_ENDINGS)} are left out: {left_out}. Convert "
            "those that are images, or list them in dataset.labels_csv, which takes any ending.",
        )
    if repeated:
        what = "1 folder is" if len(repeated) == 1 else f"{len(repeated)} folders are"
        warn_once(
            __name__, f"{source}: {what} left out, because links lead to what is read already (such as {repeated[0]})."
        )
    by_key: dict[str, list[str]] = {}
    for name in classes:
        by_key.setdefault(file_name_key(name), []).append(name)
    for names in by_key.values():
        if len(names) > 1:
            warn_once(
                __name__,
                f"{source}: the classes {' and '.join(names)} differ in upper and lower case only. They are separate "
                "classes; merge the folders if they should be one.",
            )
