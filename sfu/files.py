"""Write files so that a reader finds the whole file or none, and lock them.

A file that cannot be written (full disk, no permission) raises :class:`~sfu.errors.ArtifactError`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from sfu.errors import ArtifactError

if TYPE_CHECKING:
    import numpy as np
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


def write_folder(path: Path, write: Callable[[Path], object], *, replace: bool = False) -> None:
    """Make a folder of the files that ``write`` writes into the folder it is given; one rename makes it visible.

    The files reach the disk before the rename, so a process that is killed and a machine that stops leave no folder or
    the complete one. They can also leave a hidden folder beside it, ``.NAME.unfinished``, which :func:`folder_lock`
    removes. Hold this lock meanwhile.

    Args:
        path: The folder.
        write: Writes the files.
        replace: Take the place of a folder that is there, in one step, too.

    Raises:
        ArtifactError: The folder is there and is not to be replaced, a file cannot be written, or the file system
            cannot swap two folders.
    """
    path = Path(os.path.abspath(path))
    temporary = _unfinished(path)
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        for part in (*temporary.rglob("*"), temporary):
            _flush(part)
        if replace:
            try:
                _swap(temporary, path)
            except OSError as error:
                raise ArtifactError(
                    f"{path} cannot be replaced in one step, because the system or its disk cannot swap two folders "
                    f"({error}). Write to a new folder instead."
                ) from error
        elif os.path.lexists(path):
            raise ArtifactError(f"{path} exists, and it is not to be replaced. Choose another folder.")
        else:
            temporary.rename(path)
        _flush(path.parent)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be written ({error}). Free some space or choose another folder.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def folder_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a folder, ``.NAME.lock`` beside it, and remove what a process that was killed left there.

    See :func:`acquire_lock`.
    """
    place = Path(os.path.abspath(path))
    with acquire_lock(place.with_name(f".{place.name}.lock")):
        shutil.rmtree(_unfinished(place), ignore_errors=True)
        yield


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.unfinished")


def _flush(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to the disk."""
    if os.name == "nt" and path.is_dir():
        return
    opened = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # Windows flushes what can be written
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _swap(first: Path, second: Path) -> None:
    """Exchange two folders in one step, so that each name leads to a complete folder at any moment."""
    import ctypes

    places = os.fsencode(first), os.fsencode(second)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            failed = libc.renamex_np(*places, ctypes.c_uint(2))
        else:
            here = ctypes.c_int(-100)  # paths are relative to the working folder
            failed = libc.renameat2(here, places[0], here, places[1], ctypes.c_uint(2))
    except (AttributeError, TypeError) as error:
        raise OSError(errno.ENOSYS, "this system cannot swap two folders") from error
    if failed:
        raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())}, swapping two folders")


@dataclass(frozen=True)
class StreamedArray:
    """An array that is written piece by piece.

    Attributes:
        dtype: Type of its numbers; they are written with the lowest byte first.
        shape: Its shape.
        pieces: Consecutive parts along the first axis, which together have that shape.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    pieces: Iterable[np.ndarray]

    @classmethod
    def of(cls, values: np.ndarray) -> StreamedArray:
        """Return an array that is in memory as one piece."""
        return cls(values.dtype, values.shape, (values,))

    @property
    def n_bytes(self) -> int:
        """Bytes of all its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize

    def write(self, file: IO[bytes]) -> None:
        """Write the numbers of all pieces.

        Raises:
            ValueError: The pieces do not have the shape.
        """
        done = 0
        for piece in self.pieces:
            done += file.write(piece.astype(self.dtype.newbyteorder("<"), copy=False).tobytes())
            del piece  # before the next one is made
        if done != self.n_bytes:
            raise ValueError(f"{done:,} bytes for an array of shape {list(self.shape)}, which has {self.n_bytes:,}")


def write_arrays(path: Path, arrays: Mapping[str, StreamedArray]) -> None:
    """Write arrays as npz or, by the suffix, as safetensors, in the order given; memory holds one piece at a time."""
    import numpy as np

    ordered = dict(sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize))  # so that each is aligned
    with replacing(path) as temporary, temporary.open("wb") as file:
        if path.suffix == ".safetensors":
            header, start = {}, 0
            for name, one in ordered.items():
                kind = {"f": "F", "i": "I", "u": "U"}[one.dtype.kind] + str(8 * one.dtype.itemsize)
                places = [start, start + one.n_bytes]
                header[name] = {"dtype": kind, "shape": list(one.shape), "data_offsets": places}
                start += one.n_bytes
            text = json.dumps(header).encode()
            text += b" " * (-len(text) % 8)
            file.write(len(text).to_bytes(8, "little") + text)
            for one in ordered.values():
                one.write(file)
            return
        with zipfile.ZipFile(file, "w") as archive:
            for name, one in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    about = {"descr": one.dtype.newbyteorder("<").str, "fortran_order": False, "shape": one.shape}
                    np.lib.format.write_array_header_1_0(member, about)
                    one.write(member)


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
