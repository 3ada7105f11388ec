"""Results of stages on disk, each under a key of everything that decides it: nothing in here is ever out of date.

An entry is a folder of files with the SHA-256 of each in ``entry.json``. It is written beside its place and renamed
into it, so that it is whole or absent whoever is killed when; one that is damaged is thrown away and made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

from sfu.cache_dir import cache_dir
from sfu.errors import ArtifactError
from sfu.files import acquire_lock, write_text

log = logging.getLogger(__name__)

ABOUT, GRAM = "entry.json", "gram.safetensors"
KEY = re.compile(r"[0-9a-f]{32}")
_LARGE = 1 << 20


def key_of(record: object) -> str:
    """32 hex digits that stand for a JSON value."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:32]


class ResultStore:
    """The folder of all entries: ``results`` in sfu's cache folder unless given."""

    def __init__(self, root: Path | None = None) -> None:
        """Name the folder; nothing is written yet."""
        self.root = root or cache_dir("results")

    def find(self, key: str) -> Path | None:
        """The folder of a whole entry, its time of change that of this use; ``None`` if there is none."""
        folder = self.root / key
        try:
            digests = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            digests = {}
        if not digests or any(_digest(folder / name) != digest for name, digest in digests.items()):
            log.warning("the kept result %s is damaged and is made again", folder)
            shutil.rmtree(folder, ignore_errors=True)
            return None
        with suppress(OSError):  # a read-only cache can be used, too
            os.utime(folder / ABOUT)
        return folder

    def has(self, key: str) -> bool:
        """Whether there is an entry, without looking into it."""
        return (self.root / key / ABOUT).is_file()

    def put(self, key: str, write: Callable[[Path], object]) -> None:
        """Make an entry of the files that ``write`` writes into the folder it is given.

        Raises:
            ArtifactError: It cannot be written.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            made = Path(mkdtemp(prefix=f".{key}.", dir=self.root))
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            write(made)
            digests = {path.name: _digest(path) for path in sorted(made.iterdir())}
            for name, digest in digests.items():
                self._share(made / name, str(digest))
            write_text(made / ABOUT, json.dumps(digests, indent=2) + "\n")
            if not self.has(key):  # else another process was faster, with the same result
                made.rename(self.root / key)
        except OSError as error:
            if not self.has(key):
                raise self._unwritable(error) from error
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def _share(self, path: Path, digest: str) -> None:
        """Keep a large file (the core of linearised heads) once for all entries that hold it, by hard links."""
        if path.stat().st_size < _LARGE:
            return
        blob = self.root / f".{digest}.blob"
        with suppress(OSError):  # no hard links here, or another job made it first: a copy does
            if _digest(blob) == digest:
                path.unlink()
                os.link(blob, path)
            else:
                os.link(path, blob)

    @contextmanager
    def locked(self, key: str, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """Alone on one key; the lock goes with the process that holds it, however that ends.

        Raises:
            ArtifactError: The folder cannot be written.
        """
        try:
            lock = acquire_lock(self.root / f".{key}.lock", waiting)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            yield
        finally:
            lock.release()

    def _unwritable(self, error: OSError) -> ArtifactError:
        return ArtifactError(
            f"cannot keep results in {self.root} ({error}); free some space, set SFU_CACHE to a folder you can write "
            "to, or reuse=never."
        )


def _digest(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
