"""Digests of many files, remembered so that a second look costs a directory listing and not a read of every byte.

A memo is believed as long as every file's path, size, inode and time of change are what they were, as version control
does; a damaged memo is made again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sfu.cache_dir import cache_dir
from sfu.errors import ArtifactError, DataError
from sfu.files import replacing

_SIZE = hashlib.sha256().digest_size


def file_digests(paths: Sequence[str]) -> list[bytes]:
    """SHA-256 of each file, 32 bytes each.

    Raises:
        DataError: A file is missing or cannot be read.
    """
    memo = cache_dir("fingerprints") / f"{_listing(paths)}.sha256"
    known = _read_memo(memo, len(paths))
    if known is None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            known = list(pool.map(_digest, paths, chunksize=256))
        _write_memo(memo, known)
    return known


def _listing(paths: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}).") from error
        place = os.path.abspath(path)
        digest.update(
            f"{place}\0{status.st_size} {status.st_mtime_ns} {status.st_ino}\n".encode(errors="surrogateescape")
        )
    return digest.hexdigest()


def _digest(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
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
