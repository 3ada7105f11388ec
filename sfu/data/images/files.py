"""Find files in an order that depends on no file system, and tell their contents apart by digests.

The order and the file endings are those of torchvision's ``ImageFolder``; importing torchvision takes longer than
listing 60,000 files, so it is not used here. Digests are cached, so that a second look at a dataset costs a directory
listing and not a read of every byte.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sfu.errors import ArtifactError, DataError
from sfu.names import composed
from sfu.readers import read_bytes, refusing
from sfu.store import Store, cache_dir, key_of

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_SETTLED_SECONDS = 2.0
_THREADED = 1 << 18  # bytes: smaller files are read faster by one thread, since threads wait for Python's lock
_SIZE = hashlib.sha256().digest_size
DIGESTS = "digests.bin"
_SHOWN = 6  # endings
_LITTER = ("thumbs.db", "ehthumbs.db", "desktop.ini")  # files of file managers; those of others are hidden
_LITTER_ENDING = "zone.identifier"  # what Windows notes beside a download, copied to another system
_LITTER_FOLDERS = ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found")


def is_image(file: str) -> bool:
    """Return whether a file's name ends as images' names do."""
    return file.lower().endswith(IMAGE_ENDINGS)


def endings(files: Iterable[str]) -> str:
    """Return how many files have which ending, such as ``2 .gif, 1 .txt``; the most frequent first."""
    names = [os.path.basename(file).lower() for file in files]
    names = [name for name in names if name not in _LITTER and not name.endswith(_LITTER_ENDING)]
    kinds = [os.path.splitext(name)[1] for name in names]
    counts = Counter(kind if kind else "without an ending" for kind in kinds)
    shown = [f"{count:,} {kind}" for kind, count in counts.most_common(_SHOWN)]
    return ", ".join([*shown, *(["others"] if len(counts) > _SHOWN else [])])


def path_key(path: str) -> str:
    """Return what two spellings of a path have in common: ``./a\\b.jpg`` is ``a/b.jpg``, whatever its accents' form."""
    return composed(os.path.normpath(path.replace("\\", "/")).replace(os.sep, "/"))


def subfolders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted; links to folders count, hidden folders do not."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not _is_hidden(entry.name))


def images_in(folder: Path) -> list[str]:
    """Return the names of the images in a folder itself, sorted."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if is_image(entry.name) and not _is_hidden(entry.name))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in _LITTER_FOLDERS


class Walk:
    """Finds the files below the folders of a dataset, and visits each real folder once, whatever links lead to it.

    Attributes:
        repeated: Folders that were left out because they had been visited.
    """

    def __init__(self, root: Path) -> None:
        """Begin at the folder ``root``, which counts as visited, as do all folders that it lies in."""
        self.repeated: list[str] = []
        real = Path(os.path.realpath(root))
        self._visited = {str(folder): folder for folder in (real, *real.parents)}

    def enter(self, folder: Path) -> Path | None:
        """Note that a folder is visited; return by which path it was before, ``None`` if it was not."""
        place = os.path.realpath(folder)
        before = self._visited.get(place)
        self._visited.setdefault(place, folder)
        return before

    def files_below(self, folder: Path) -> list[str]:
        """Return the paths of all files below a folder, relative to it.

        They are sorted folder by folder. Links are followed; hidden files and folders are left out.
        """
        found, places = [], []
        for place, folders, files in os.walk(folder, followlinks=True):
            below = [Path(place, name) for name in sorted(folders) if not _is_hidden(name)]
            below.sort(key=Path.is_symlink)  # a link is left out rather than the folder it leads to
            entered = [folder.name for folder in below if self.enter(folder) is None]
            self.repeated += [str(folder) for folder in below if folder.name not in entered]
            folders[:] = entered
            places.append((place, sorted(files)))
        start = len(str(folder)) + 1
        for place, files in sorted(places):
            prefix = f"{place[start:]}{os.sep}" if len(place) > start else ""
            found += [prefix + name for name in files if not name.startswith(".")]
        return found


def file_digests(
    paths: Sequence[str], reading: Callable[[int], None] | None = None, settled_seconds: float = _SETTLED_SECONDS
) -> list[bytes]:
    """Return the SHA-256 of each file, 32 bytes each.

    Cached digests are used as long as every file's path, size, inode and times of modification and change stay the
    same, as version control does it. Digests of files that changed a moment ago are not cached, since such files may
    change again without a trace (``settled_seconds``). If the cache cannot be written, the next run reads the files
    again. ``reading`` is called with the number of files if they must be read.

    Raises:
        DataError: A file is missing or cannot be read.
    """
    states = [file_state(path) for path in paths]
    key, store = key_of(states), Store(cache_dir("fingerprints"))
    cached = store.read(key, lambda folder: _read_digests(folder / DIGESTS, len(paths)))
    if cached is not None:
        return cached
    if reading is not None:
        reading(len(paths))
    last_change_ns = max((max(state.modified_ns, state.changed_ns) for state in states), default=0)
    is_settled = last_change_ns < (time.time() - settled_seconds) * 1e9
    if sum(state.size for state in states) < _THREADED * len(paths):
        digests = [_digest(path) for path in paths]
    else:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            digests = list(pool.map(_digest, paths))
    if is_settled:
        with suppress(ArtifactError):
            store.put(key, lambda folder: (folder / DIGESTS).write_bytes(b"".join(digests)))
    return digests


def _read_digests(path: Path, n_files: int) -> list[bytes]:
    with refusing(path, "Remove it, and it is made again."):
        body = read_bytes(path, n_files * _SIZE)
        if len(body) != n_files * _SIZE:
            raise ValueError(f"it holds {len(body)} bytes for {n_files} files")
        return [body[start : start + _SIZE] for start in range(0, len(body), _SIZE)]


class FileState(NamedTuple):
    """What tells a file apart from a later state of it."""

    path: str
    size: int
    modified_ns: int
    changed_ns: int
    inode: int


def file_state(path: str) -> FileState:
    """Return the state of a file, or raise :class:`DataError` if it is missing."""
    try:
        status = os.stat(path)
    except OSError as error:
        if os.path.islink(path):
            raise DataError(
                f"{path} is a link to {os.readlink(path)}, which cannot be read ({error.strerror}). Fetch that file "
                "(with git-annex or DataLad, `git annex get` or `datalad get`), or remove the link."
            ) from error
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error
    return FileState(os.path.abspath(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _digest(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return hashlib.sha256(file.read()).digest()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error
