"""What lies in the feature cache, and removing it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from sfu.data.features.place import VIEWS
from sfu.data.features.store import lock_path
from sfu.errors import ArtifactError, ConfigError

_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class StoreInfo:
    """One store of features.

    Attributes:
        key: 32 hex digits, the folder's name.
        folder: Where it lies.
        about: ``about.json``; empty if it is missing or damaged.
        chunks: Number of chunks that are there.
        size: Bytes in all.
        used: When it was last used.
    """

    key: str
    folder: Path
    about: dict[str, Any]
    chunks: int
    size: int
    used: datetime

    @property
    def unfinished(self) -> bool:
        """Whether a chunk is known to be missing (their contents are checked when they are read)."""
        return self.chunks < int((self.about.get("shown") or {}).get("chunks", 0))


def list_stores(root: Path) -> list[StoreInfo]:
    """All stores below ``root``, the last used first."""
    if not root.is_dir():
        return []
    places = [*root.iterdir(), *(root / VIEWS).glob("*")]
    found = [_info(folder) for folder in places if folder.is_dir() and _KEY.fullmatch(folder.name)]
    return sorted(found, key=lambda info: info.used, reverse=True)


def find_stores(root: Path, prefixes: list[str]) -> list[StoreInfo]:
    """The stores that ``prefixes`` of keys name, each exactly one.

    Raises:
        ConfigError: A prefix names none, or several.
    """
    stores, chosen = list_stores(root), []
    for prefix in prefixes:
        matching = [info for info in stores if info.key.startswith(prefix)]
        if len(matching) != 1:
            what = "no features" if not matching else f"{len(matching)} features"
            raise ConfigError(f"{prefix} names {what} in {root}; sfu-features ls shows the keys.")
        chosen += matching
    return chosen


def remove_store(info: StoreInfo) -> None:
    """Remove a store, unless a run is extracting it.

    Raises:
        ArtifactError: It is in use, or cannot be removed.
    """
    from filelock import FileLock, Timeout

    path = lock_path(info.folder)
    lock = FileLock(path)
    try:
        with lock.acquire(timeout=0):
            shutil.rmtree(info.folder)
            path.unlink(missing_ok=True)
    except Timeout:
        raise ArtifactError(f"{info.key[:12]} is being extracted by a run; stop that first.") from None
    except OSError as error:
        raise ArtifactError(f"cannot remove {info.folder} ({error}).") from error


def _info(folder: Path) -> StoreInfo:
    path = folder / "about.json"
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        about = about if isinstance(about, dict) else {}
    except (OSError, ValueError):
        about = {}
    files = [file for file in folder.iterdir() if file.is_file()]
    chunks = sum(file.suffix == ".safetensors" and not file.name.startswith(".") for file in files)
    used = datetime.fromtimestamp((path if path.is_file() else folder).stat().st_mtime)
    return StoreInfo(folder.name, folder, about, chunks, sum(file.stat().st_size for file in files), used)
