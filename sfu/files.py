"""Write files so that a reader finds the whole file or none, and lock them.

A file that cannot be written (full disk, no permission) raises :class:`~sfu.errors.ArtifactError`.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sfu.errors import ArtifactError

if TYPE_CHECKING:
    from torch import Tensor


SECRET = ".secret"
"""Ending of files that stay with their owner: what a head holds that could give back a row or break a certificate."""
_OWNER_ONLY = 0o600
_in_use: dict[Path, tuple[int, int]] = {}


@contextmanager
def folder_in_use(folder: Path) -> Iterator[None]:
    """Refuse to write below ``folder`` in this block once it has been removed, or another has taken its place.

    Writing makes missing folders, so a run whose folder is removed would otherwise leave a part of its files.
    """
    place = Path(os.path.abspath(folder))
    _in_use[place] = _identity(place)
    try:
        yield
    finally:
        del _in_use[place]


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _require_folder(path: Path) -> None:
    for folder in Path(os.path.abspath(path)).parents:
        if folder in _in_use and (not folder.is_dir() or _identity(folder) != _in_use[folder]):
            raise ArtifactError(
                f"{path} cannot be written, because the folder {folder} was removed or replaced while it was in use. "
                "Run again, and leave the folder alone meanwhile."
            )


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; rename it to ``path`` if the block succeeds, remove it otherwise."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    _require_folder(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be written ({error}). Free some space or choose another folder.") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def leftovers(folder: Path) -> list[Path]:
    """Return the temporary files that processes killed while they wrote have left in a folder."""
    return [path for path in folder.glob(".*") if path.suffix[1:].isdigit() and path.is_file()]


def write_text(path: Path, text: str) -> None:
    """Write text as UTF-8; the file is either complete or as it was."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def copy_file(source: Path, path: Path) -> None:
    """Copy a file's content; a copy of a file that only its owner can read is for its owner alone, too."""
    with replacing(path) as temporary:
        if not source.stat().st_mode & 0o077:
            temporary.touch(mode=_OWNER_ONLY)
        shutil.copyfile(source, temporary)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None, *, private: bool = False
) -> None:
    """Write tensors and the metadata ``about`` as safetensors; tensors that share memory are copied.

    A ``private`` file can be read by its owner alone, from the first byte on.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with replacing(path) as temporary:
        try:
            temporary.touch(_OWNER_ONLY if private else 0o666)
            mode = _OWNER_ONLY if private else temporary.stat().st_mode
            save_file(
                {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()},
                temporary,
                dict(about or {}),
            )
            temporary.chmod(mode)  # safetensors makes files for their owner alone, whatever the umask
        except SafetensorError as error:
            raise OSError(str(error)) from error


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def human_size(n_bytes: float) -> str:
    """Return a size for people: ``512 B``, ``1.5 MiB``."""
    if n_bytes < 1024:
        return f"{n_bytes:.0f} B"
    power = min(int(math.log2(n_bytes) // 10), 4)
    return f"{n_bytes / 1024**power:.1f} {'KMGT'[power - 1]}iB"


def acquire_lock(path: Path, waiting: Callable[[], object] | None = None) -> AbstractContextManager[object]:
    """Wait for the lock file ``path``, and hold it until the ``with`` block ends or the process dies.

    Its folder is made if necessary. ``waiting`` is called if another process holds the lock.

    Raises:
        OSError: The folder cannot be written.
    """
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        if waiting is not None:
            waiting()
        return lock.acquire()
