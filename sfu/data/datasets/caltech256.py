"""Caltech-256: 29,780 images in 256 classes, and 827 of clutter (Griffin, Holub & Perona 2007). No official test part.

Files, order and class numbers are those of torchvision's ``Caltech256``: image i of category c is ``c_i.jpg``, for
i = 1 .. the number of .jpg files in the category's folder. torchvision takes whatever lies in the folder for a
category, and believes that no image is missing; here strays are left out and gaps are errors.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sfu.data.dataset_settings import refuse_unused, root_folder
from sfu.data.download import Archive, obtain, require_obtainable
from sfu.data.images.image_set import ImageSet
from sfu.data.images.images import FileImages
from sfu.errors import DataError

if TYPE_CHECKING:
    from sfu.settings import DatasetConfig

log = logging.getLogger(__name__)

_FOLDER = "256_ObjectCategories"
_ARCHIVE = Archive(
    "https://data.caltech.edu/records/nyy15-4j048/files/256_ObjectCategories.tar",
    "256_ObjectCategories.tar",
    "md5",
    "67b4f42ca05d46448c6bb8ecd2220f6d",
    (_FOLDER,),
)
_CATEGORY = re.compile(r"(\d{3})\.(.+)")  # 003.backpack
_CLUTTER = 257
_PUBLISHED = {False: 29_780, True: 30_607}


def images(config: DatasetConfig) -> ImageSet:
    """All images in the order of categories and numbers; the test part is yet to be drawn.

    Raises:
        DataError: They are missing and cannot be fetched, or the folder has gaps.
    """
    refuse_unused(config, "root", "clutter")
    root = root_folder(config) / "caltech256"
    obtain([_ARCHIVE], root, config.download)
    paths: list[str] = []
    labels: list[int] = []
    names = _category_names(root / _FOLDER, config.clutter)
    for label, name in enumerate(names):
        mine = _category_images(root / _FOLDER / f"{label + 1:03d}.{name}", label + 1)
        paths += mine
        labels += [label] * len(mine)
    if len(paths) != _PUBLISHED[config.clutter]:
        log.warning(
            "%s holds %d images, the published archive %d", root / _FOLDER, len(paths), _PUBLISHED[config.clutter]
        )
    return ImageSet(FileImages(paths), np.asarray(labels, dtype=np.int64), None, tuple(names))


def source_files(config: DatasetConfig) -> list[Path]:
    """The folder of categories and its archive, below ``dataset.root``/caltech256 as torchvision has it.

    Raises:
        ConfigError: A setting that Caltech-256 would ignore.
        DataError: Neither is there, and ``dataset.download=false``; or the folder lacks categories.
    """
    refuse_unused(config, "root", "clutter")
    root = root_folder(config) / "caltech256"
    files = require_obtainable([_ARCHIVE], root, config.download)
    if (root / _FOLDER).exists():
        _category_names(root / _FOLDER, config.clutter)
    return files


def _category_names(folder: Path, clutter: bool) -> list[str]:
    """Names by number, without it: class c is category c + 1."""
    numbered: dict[int, str] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _CATEGORY.fullmatch(entry.name)
            if match and entry.is_dir():
                other = numbered.setdefault(int(match[1]), match[2])
                if other != match[2]:
                    raise DataError(f"{folder} holds category {match[1]} twice: {other} and {match[2]}; remove one.")
    wanted = range(1, _CLUTTER + clutter)
    lacking = [f"{number:03d}" for number in wanted if number not in numbered]
    if lacking:
        more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
        raise DataError(
            f"{folder} lacks category {', '.join(lacking[:5])}{more}. Remove it, and sfu extracts it again from its "
            "archive; to use a choice of categories, take dataset=image_folder."
        )
    return [numbered[number] for number in wanted]


def _category_images(folder: Path, category: int) -> list[str]:
    found = {name for name in os.listdir(folder) if name.endswith(".jpg")}
    named = [f"{category:03d}_{number:04d}.jpg" for number in range(1, len(found) + 1)]
    lacking = [name for name in named if name not in found]
    if lacking or not named:
        what = f"{lacking[0]} is missing" if lacking else "it is empty"
        raise DataError(
            f"{folder} does not hold the images that were published: {what}. Remove {folder.parent}, and sfu extracts "
            "it again from its archive."
        )
    return [os.path.join(folder, name) for name in named]
