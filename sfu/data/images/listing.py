"""What lies in a folder, in an order that depends on no file system. Hidden files and folders are left out.

The order is that of torchvision's ``ImageFolder``, and so are the file endings; importing torchvision takes longer than
listing 60,000 files, so it is not used for that.
"""

from __future__ import annotations

import os
from pathlib import Path

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


def is_image(file: str) -> bool:
    """Whether a file's name ends as images' names do."""
    return file.lower().endswith(IMAGE_ENDINGS)


def subfolders(folder: Path) -> list[str]:
    """Names of the folders in a folder, sorted; links to folders count."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def files_below(folder: Path) -> list[str]:
    """Paths of all files below a folder, relative to it: folder by folder, both sorted; links are followed."""
    found = []
    places = []
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        places.append((place, sorted(files)))
    start = len(str(folder)) + 1
    for place, files in sorted(places):
        prefix = f"{place[start:]}{os.sep}" if len(place) > start else ""
        found += [prefix + name for name in files if not name.startswith(".")]
    return found
