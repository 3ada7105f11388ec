"""What lies in the store of results, and removing it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sfu.experiment.result_store import ABOUT, GRAM, KEY

_KINDS = {"row.json": "row", "metrics.json": "run", GRAM: "gram"}
_DAY = 86_400.0


@dataclass(frozen=True)
class Entry:
    """One result that is kept.

    Attributes:
        folder: Where it lies; its name is the key.
        kind: ``gram``, ``head``, ``row`` or ``run``.
        used: When it was last used.
    """

    folder: Path
    kind: str
    used: datetime


def list_entries(root: Path) -> list[Entry]:
    """All whole entries below ``root``, the last used first."""
    found = []
    for folder in _folders(root):
        if (folder / ABOUT).is_file():
            kind = next((kind for name, kind in _KINDS.items() if (folder / name).is_file()), "head")
            found.append(Entry(folder, kind, datetime.fromtimestamp((folder / ABOUT).stat().st_mtime, UTC)))
    return sorted(found, key=lambda entry: entry.used, reverse=True)


def size_of(entries: list[Entry]) -> int:
    """Bytes on the disk; a file that several entries share counts once."""
    files = {}
    for entry in entries:
        for path in entry.folder.iterdir():
            about = path.stat()
            files[about.st_dev, about.st_ino] = about.st_size
    return sum(files.values())


def remove_entries(root: Path, *, unused_days: float) -> list[Entry]:
    """Remove entries that no run has used for so long, and whatever was left by processes that were killed.

    Returns:
        The entries removed.
    """
    limit = time.time() - unused_days * _DAY
    gone = [entry for entry in list_entries(root) if entry.used.timestamp() <= limit]
    for entry in gone:
        shutil.rmtree(entry.folder, ignore_errors=True)
    for path in root.glob(".*") if root.is_dir() else ():
        about = path.stat()
        if path.is_dir() and about.st_mtime <= min(limit, time.time() - _DAY):
            shutil.rmtree(path, ignore_errors=True)
        elif path.suffix == ".blob" and about.st_nlink == 1:
            path.unlink(missing_ok=True)
    return gone


def _folders(root: Path) -> Iterator[Path]:
    for folder in root.iterdir() if root.is_dir() else ():
        if KEY.fullmatch(folder.name) and folder.is_dir():
            yield folder
