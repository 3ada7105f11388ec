"""Caches on disk: every entry lies under a key that is a digest of everything that decides its content.

Because keys follow content, an entry is never out of date. An entry is a folder of files with their SHA-256 digests in
``entry.json``. It is written to a temporary folder and renamed into place, so an interrupted write never leaves a
partial entry. A damaged entry is dropped when it is read, and whoever needs it makes it again.

A store that cannot be written raises :class:`~sfu.errors.ArtifactError`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from uuid import uuid4

from pydantic import ConfigDict, Field

from sfu.errors import ArtifactError
from sfu.files import acquire_lock, file_digest, write_tensors, write_text
from sfu.readers import Record, parse_record, read_bytes, read_tensors, refusing

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

T = TypeVar("T")
_ABOUT, _TENSORS = "entry.json", "tensors.safetensors"
_KEY = re.compile(r"[0-9a-f]{32}")
_ABOUT_BYTES = 1 << 20
_LAST_TIME = 253_402_300_799.0  # the end of the year 9999, beyond which Python has no dates
_LARGE = 1 << 20  # bytes: larger files are shared by hard links, if the store does that
_DAY = 86_400.0
_unwritable: set[Path] = set()
_REMEDY = "Remove it, so that it is made again."


def cache_dir(kind: str) -> Path:
    """Return ``$SFU_CACHE/kind``, or ``sfu/kind`` in the user's cache folder (``$XDG_CACHE_HOME`` if that is set)."""
    from platformdirs import user_cache_path

    given = os.environ.get("SFU_CACHE")
    return (Path(given).expanduser() if given else user_cache_path("sfu", appauthor=False)) / kind


def key_of(record: object) -> str:
    """Return 32 hex digits that stand for a JSON value."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:32]


class EntryRecord(Record):
    """The content of ``entry.json``: the key, the SHA-256 of each file, and what else describes the entry."""

    model_config = ConfigDict(extra="allow")

    key: str
    files: dict[Annotated[str, Field(pattern=r"^[^/\\]+$")], str] | None = None


@dataclass(frozen=True)
class Entry:
    """An entry as it lies on the disk.

    Attributes:
        folder: Its folder; the name is the key.
        about: What describes the entry in ``entry.json``; empty if that is missing or damaged.
        used: When it was last used.
    """

    folder: Path
    about: Mapping[str, Any]
    used: datetime

    @classmethod
    def read(cls, folder: Path) -> Entry:
        """Describe the entry in ``folder`` without checking its files."""
        path, about = folder / _ABOUT, {}
        with suppress(OSError, ValueError):
            about = parse_record(read_bytes(path, _ABOUT_BYTES), EntryRecord).model_extra or {}
        used = (path if path.is_file() else folder).stat().st_mtime
        return cls(folder, about, datetime.fromtimestamp(min(max(used, 0.0), _LAST_TIME), UTC))

    @property
    def key(self) -> str:
        """The key: 32 hex digits."""
        return self.folder.name


def size_of(entries: Iterable[Entry]) -> int:
    """Return the bytes that entries take on the disk; a file that several of them share counts once."""
    files = [path.stat() for entry in entries for path in entry.folder.rglob("*") if path.is_file()]
    return sum({(file.st_dev, file.st_ino): file.st_size for file in files}.values())


class Store:
    """A folder of entries."""

    def __init__(
        self,
        root: Path,
        *,
        advice: str = "Free some space, or set SFU_CACHE to a folder you can write to.",
        share_large_files: bool = False,
    ) -> None:
        """Name the folder; nothing is written yet.

        Args:
            root: The folder.
            advice: Ends the message if it cannot be written.
            share_large_files: Store files of equal content once, as hard links.
        """
        self.root, self._advice, self._shares = root, advice, share_large_files

    def find(self, key: str) -> Path | None:
        """Return the folder of an entry after checking its digests, and mark it as used; ``None`` if there is none."""
        folder, about = self.root / key, self._read_about(key)
        if about is None:
            return None
        if not _is_whole(folder, about):
            if self._read_about(key) != about:  # another process replaced the entry meanwhile
                return self.find(key)
            _drop(folder, "its files are not those it was made of")
            return None
        self.touch(key)
        return folder

    def read(self, key: str, read: Callable[[Path], T]) -> T | None:
        """Return what ``read`` makes of an entry's folder; ``None`` if there is none.

        An entry that ``read`` refuses with :class:`ArtifactError` is dropped, although its digests are right.
        """
        about, folder = self._read_about(key), self.find(key)
        if folder is None:
            return None
        try:
            return read(folder)
        except ArtifactError as error:
            if self._read_about(key) != about:
                return self.read(key, read)
            _drop(folder, str(error))
            return None

    def has(self, key: str) -> bool:
        """Return whether there is an entry, without checking its digests."""
        return (self.root / key / _ABOUT).is_file()

    def touch(self, key: str) -> bool:
        """Mark an entry as used now, and return whether there is one."""
        with suppress(OSError):  # a read-only cache can be used, too
            os.utime(self.root / key / _ABOUT)
        return self.has(key)

    def put(
        self,
        key: str,
        write: Callable[[Path], object],
        *,
        replace: bool = False,
        about: Mapping[str, object] | None = None,
    ) -> None:
        """Make an entry of the files that ``write`` writes into the folder it is given, described by ``about``.

        An entry that is there stays, unless ``replace`` is set.
        """
        temporary = self.root / f".{key}.{uuid4().hex}"
        made = temporary / "new"
        try:
            made.mkdir(parents=True)
            write(made)
            digests = {path.name: file_digest(path) for path in sorted(made.iterdir())}
            for name, digest in digests.items():
                self._share(made / name, digest)
            write_text(made / _ABOUT, json.dumps({**(about or {}), "key": key, "files": digests}, indent=2) + "\n")
            if replace or not self.has(key):
                self._move_into_place(made, temporary / "old", key)
        except OSError as error:
            raise self._unwritable(error) from error
        except ArtifactError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError):
                raise
            raise self._unwritable(cause) from error  # name the cache, not the temporary file
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def describe(self, key: str, about: Mapping[str, object]) -> None:
        """Write ``entry.json`` of an entry that is a store of its own, to which parts are added one by one.

        :meth:`find` is not for such an entry, but for its parts.
        """
        write_text(self.root / key / _ABOUT, json.dumps({"key": key, **about}, indent=2) + "\n")

    def read_tensors(
        self, key: str, check: Callable[[dict[str, Tensor]], object] = lambda tensors: None
    ) -> dict[str, Tensor] | None:
        """Return the tensors of an entry written by :meth:`write_tensors`, or ``None`` if there is none.

        An entry that ``check`` refuses with :class:`ValueError` is dropped.
        """

        def read(folder: Path) -> dict[str, Tensor]:
            tensors = read_tensors(folder / _TENSORS, _REMEDY)
            with refusing(folder, _REMEDY):
                check(tensors)
            return tensors

        return self.read(key, read)

    def write_tensors(self, key: str, tensors: Mapping[str, Tensor], about: Mapping[str, object] | None = None) -> None:
        """Make an entry of tensors, or replace the one that is there."""
        self.put(key, lambda folder: write_tensors(folder / _TENSORS, tensors), replace=True, about=about)

    @contextmanager
    def locked(self, key: str, waiting: Callable[[], object] | None = None) -> Iterator[None]:
        """Hold the lock of a key, so that one process makes the entry while the others wait."""
        try:
            held = acquire_lock(self._lock_path(key), waiting)
        except OSError as error:
            raise self._unwritable(error) from error
        with held:
            yield

    @contextmanager
    def optional(self) -> Iterator[None]:
        """Go on after a block that cannot write this store, with one warning, since it only makes work faster."""
        try:
            yield
        except ArtifactError as error:
            if self.root not in _unwritable:
                log.warning("%s The run goes on without caching.", error)
            _unwritable.add(self.root)

    def entries(self) -> list[Entry]:
        """Return all entries, the last used first; other files and folders are ignored."""
        folders = list(self.root.iterdir()) if self.root.is_dir() else []
        found = [Entry.read(folder) for folder in folders if _KEY.fullmatch(folder.name) and folder.is_dir()]
        return sorted(found, key=lambda entry: entry.used, reverse=True)

    def remove(self, key: str) -> None:
        """Remove an entry, if there is one.

        Raises:
            ArtifactError: A run is using the entry, or it cannot be removed.
        """
        from filelock import FileLock, Timeout

        folder, lock_path = self.root / key, self._lock_path(key)
        if not folder.exists():
            return
        try:
            with FileLock(lock_path).acquire(timeout=0):
                shutil.rmtree(folder)
                lock_path.unlink(missing_ok=True)
        except Timeout:
            raise ArtifactError(f"{key[:12]} is in use by a run. Wait until it ends, or stop it first.") from None
        except OSError as error:
            raise ArtifactError(f"{folder} cannot be removed ({error}).") from error

    def remove_leftovers(self, older_than: float = _DAY) -> None:
        """Remove what interrupted writes left behind so many seconds ago, and shared files that no entry uses."""
        limit = self.now() - older_than
        for path in self.root.glob(".*"):
            about = path.stat()
            if path.is_dir() and about.st_mtime <= limit:
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix == ".blob" and about.st_nlink == 1:
                path.unlink(missing_ok=True)

    def now(self) -> float:
        """Return the time, in seconds since 1970, by the clock that stamps the files of the store."""
        probe = self.root / f".{uuid4().hex}"
        try:
            probe.touch()
            return probe.stat().st_mtime
        except OSError:
            return time.time()
        finally:
            with suppress(OSError):
                probe.unlink()

    def _read_about(self, key: str) -> bytes | None:
        try:
            return read_bytes(self.root / key / _ABOUT, _ABOUT_BYTES)
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            return b""

    def _move_into_place(self, made: Path, old: Path, key: str) -> None:
        folder = self.root / key
        with suppress(FileNotFoundError):
            folder.rename(old)
        try:
            made.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # else another process was faster
                raise

    def _share(self, path: Path, digest: str) -> None:
        if not self._shares or path.stat().st_size < _LARGE:
            return
        blob = self.root / f".{digest}.blob"
        with suppress(OSError):  # no hard links here, or another process made it first: a copy will do
            if blob.exists() and file_digest(blob) == digest:
                os.link(blob, linked := path.with_name("linked"))
                linked.replace(path)
            else:
                os.link(path, blob)

    def _lock_path(self, key: str) -> Path:
        return self.root / f".{key}.lock"

    def _unwritable(self, error: OSError) -> ArtifactError:
        return ArtifactError(f"the cache {self.root} cannot be written ({error}). {self._advice}")


def _is_whole(folder: Path, about: bytes) -> bool:
    try:
        found = parse_record(about, EntryRecord)
        if found.files is None or found.key != folder.name:
            return False
        files = {folder / name: digest for name, digest in found.files.items()}
        return all(path.is_file() and file_digest(path) == digest for path, digest in files.items())
    except (OSError, ValueError):
        return False


def _drop(folder: Path, why: str) -> None:
    log.warning("the cached entry %s is damaged and will be made again (%s)", folder, why)
    shutil.rmtree(folder, ignore_errors=True)
