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
from typing import TYPE_CHECKING, ClassVar

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

    subfolder: ClassVar[str] = "caltech256"  # as torchvision has it

    test_fraction: float = setting(0.1, "Share held out for testing.", above=0, below=1)
    clutter: bool = setting(False, "Keep the 257th class, of clutter.")

    def images(self) -> ImageSet:
        from sfu.data.images.image_set import ImageSet
        from sfu.data.images.images import FileImages

        folder = self.obtain() / _FOLDER
        names = _category_names(folder, self.clutter)
        images_of = [_category_images(folder / f"{number:03d}.{name}", number) for number, name in enumerate(names, 1)]
        paths = [path for mine in images_of for path in mine]
        if len(paths) != _PUBLISHED[self.clutter]:
            log.warning("%s holds %d images, the published archive %d", folder, len(paths), _PUBLISHED[self.clutter])
        labels_N = np.repeat(np.arange(len(names)), [len(mine) for mine in images_of])
        return ImageSet(FileImages(paths), labels_N, None, tuple(names))

    def source_files(self) -> list[Path]:
        files = super().source_files()
        if files[0].exists():
            _category_names(files[0], self.clutter)
        return files

    def archives(self) -> tuple[Archive, ...]:
        from sfu.data.download import Archive

        url = f"https://data.caltech.edu/records/nyy15-4j048/files/{_FOLDER}.tar"
        return (Archive(url, f"{_FOLDER}.tar", "md5", "67b4f42ca05d46448c6bb8ecd2220f6d", (_FOLDER,)),)


def _category_names(folder: Path, clutter: bool) -> list[str]:
    """Names by number, without it: class c is category c + 1."""
    numbered: dict[int, str] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _CATEGORY.fullmatch(entry.name)
            if match and entry.is_dir():
                other = numbered.setdefault(int(match[1]), match[2])
                if other != match[2]:
                    raise DataError(f"{folder} holds category {match[1]} twice: {other} and {match[2]}. Remove one.")
    wanted = range(1, _CLUTTER + clutter)
    lacking = [f"{number:03d}" for number in wanted if number not in numbered]
    if lacking:
        more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
        raise DataError(
            f"{folder} lacks category {', '.join(lacking[:5])}{more}. Remove it, and sfu extracts it again from its "
            "archive. To use a choice of categories, take dataset=image_folder."
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
