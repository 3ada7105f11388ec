"""Caltech-256: 29,780 images in 256 classes, and 827 of clutter (Griffin, Holub & Perona 2007). No official test part.

Files, order and class numbers are those of torchvision's ``Caltech256``: image i of category c is ``c_i.jpg``, for
i = 1 .. the number of .jpg files in the category's folder. torchvision takes whatever lies in the folder for a
category, and believes that no image is missing; here strays are left out and gaps are errors.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sfu.data.datasets.base import PublicDataset
from sfu.errors import DataError
from sfu.schema import setting

if TYPE_CHECKING:
    from sfu.data.download import Archive
    from sfu.data.images.image_set import ImageSet

log = logging.getLogger(__name__)

_FOLDER = "256_ObjectCategories"
_CATEGORY = re.compile(r"(\d{3})\.(.+)")  # 003.backpack
_CLUTTER = 257
_PUBLISHED = {False: 29_780, True: 30_607}


@dataclass
class Caltech256(PublicDataset, name="caltech256"):
    """All images in the order of categories and numbers; the test part is yet to be drawn."""

    test_fraction: float = setting(0.1, "Share held out for testing.", above=0, below=1)
    clutter: bool = setting(False, "Keep the 257th class, of clutter.")

    def images(self) -> ImageSet:
        """List the images of every category.

        Raises:
            DataError: They are missing and cannot be fetched, or the folder has gaps.
        """
        from sfu.data.download import obtain
        from sfu.data.images.image_set import ImageSet
        from sfu.data.images.images import FileImages

        root = self._root()
        obtain([_archive()], root, self.download)
        paths: list[str] = []
        labels: list[int] = []
        names = _category_names(root / _FOLDER, self.clutter)
        for label, name in enumerate(names):
            mine = _category_images(root / _FOLDER / f"{label + 1:03d}.{name}", label + 1)
            paths += mine
            labels += [label] * len(mine)
        if len(paths) != _PUBLISHED[self.clutter]:
            log.warning(
                "%s holds %d images, the published archive %d", root / _FOLDER, len(paths), _PUBLISHED[self.clutter]
            )
        return ImageSet(FileImages(paths), np.asarray(labels, dtype=np.int64), None, tuple(names))

    def source_files(self) -> list[Path]:
        """Return the folder of categories and its archive, below ``dataset.root``/caltech256 as torchvision has it.

        Raises:
            DataError: Neither is there, and ``dataset.download=false``; or the folder lacks categories.
        """
        from sfu.data.download import require_obtainable

        root = self._root()
        files = require_obtainable([_archive()], root, self.download)
        if (root / _FOLDER).exists():
            _category_names(root / _FOLDER, self.clutter)
        return files

    def _root(self) -> Path:
        return self.root_folder() / "caltech256"


def _archive() -> Archive:
    from sfu.data.download import Archive

    return Archive(
        "https://data.caltech.edu/records/nyy15-4j048/files/256_ObjectCategories.tar",
        "256_ObjectCategories.tar",
        "md5",
        "67b4f42ca05d46448c6bb8ecd2220f6d",
        (_FOLDER,),
    )


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
