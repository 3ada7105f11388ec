"""Digests of many files, remembered so that a second look costs a directory listing and not a read of every byte.

A memo is believed as long as every file's path, size, inode and times of modification and change are what they were, as
version control does. Of files that changed a moment ago no memo is made, since they may change again without a trace; a
damaged memo is made again.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sfu.cache_dir import cache_dir
from sfu.errors import ArtifactError, DataError
from sfu.files import replacing

_SETTLED_SECONDS = 2.0
_THREADED = 1 << 18  # bytes: smaller files are read faster by one thread, since threads wait for Python's lock
_SIZE = hashlib.sha256().digest_size


def file_digests(paths: Sequence[str], reading: Callable[[int], None] | None = None) -> list[bytes]:
    """SHA-256 of each file, 32 bytes each.

    ``reading`` is called with the number of files if they must be read.

    Raises:
        DataError: A file is missing or cannot be read.
    """
    listing, last_change, size = _listing(paths)
    memo = cache_dir("fingerprints") / f"{listing}.sha256"
    known = _read_memo(memo, len(paths))
    if known is None:
        if reading is not None:
            reading(len(paths))
        settled = last_change < time.time() - _SETTLED_SECONDS
        if size < _THREADED * len(paths):
            known = [_digest(path) for path in paths]
        else:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                known = list(pool.map(_digest, paths))
        if settled:
            _write_memo(memo, known)
    return known


def _listing(paths: Sequence[str]) -> tuple[str, float, int]:
    """What stands for the state of all files, when the last of them changed, and their bytes in all."""
    digest, last_change, size = hashlib.sha256(), 0.0, 0
    for path in paths:
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}).") from error
        place = os.path.abspath(path)
        state = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        digest.update(f"{place}\0{state}\n".encode(errors="surrogateescape"))
        last_change = max(last_change, status.st_mtime, status.st_ctime)
        size += status.st_size
    return digest.hexdigest(), last_change, size


def _digest(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return hashlib.sha256(file.read()).digest()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error


def _read_memo(memo: Path, count: int) -> list[bytes] | None:
    try:
        whole = memo.read_bytes()
    except OSError:
        return None
    check, body = whole[:_SIZE], whole[_SIZE:]
    if len(body) != count * _SIZE or hashlib.sha256(body).digest() != check:
        return None
    return [body[start : start + _SIZE] for start in range(0, len(body), _SIZE)]


def _write_memo(memo: Path, digests: list[bytes]) -> None:
    body = b"".join(digests)
    try:
        with replacing(memo) as temporary:
            temporary.write_bytes(hashlib.sha256(body).digest() + body)
    except ArtifactError:
        return  # only speed is lost: the next run reads the files again
