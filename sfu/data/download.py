"""Public archives: downloaded once, checked before they are used, and extracted.

sfu has a downloader of its own because pooch and torch.hub start over when a connection breaks off. This one keeps a
``.part`` file, asks the server for the rest, and renames the file once its checksum is right.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import re
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sfu.data.archive import Tick, byte_progress, extract
from sfu.errors import ArtifactError, ConfigError, DataError
from sfu.files import acquire_lock

if TYPE_CHECKING:
    from requests import Response

log = logging.getLogger(__name__)

_TRIES = 4  # in a row without a new byte
_TIMEOUT_S = 30.0
_CHUNK = 1 << 18
_TRY_AGAIN = (408, 425, 429)  # and everything from 500 on
_WHOLE, _NO_SUCH_RANGE = 200, 416
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")


@dataclass(frozen=True)
class Archive:
    """A tar archive on the web.

    Attributes:
        url: Where it is published; http or https.
        filename: What it is called on disk.
        algorithm: ``md5`` or ``sha256``, whichever its publishers or later users wrote down.
        checksum: The digest, in hexadecimal.
        entries: The folders and files at its top that are needed.
        size: Bytes, where known.
    """

    url: str
    filename: str
    algorithm: str
    checksum: str
    entries: tuple[str, ...]
    size: int | None = None

    def lacking(self, folder: Path) -> list[str]:
        """Return what is needed from the archive and not in ``folder``."""
        return [entry for entry in self.entries if not (folder / entry).exists()]

    def by_hand(self, folder: Path) -> str:
        """Return how to do without the network."""
        return (
            f"To place it by hand, download {self.url} on any machine and put it at {folder / self.filename} "
            f"({self.algorithm} {self.checksum}). dataset.download=false keeps sfu from trying."
        )

    def checksum_of(self, path: Path) -> str:
        """Return the same kind of digest of a file."""
        try:
            with path.open("rb") as file:
                return hashlib.file_digest(file, lambda: hashlib.new(self.algorithm, usedforsecurity=False)).hexdigest()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}).") from error


def require_obtainable(archives: Sequence[Archive], folder: Path, download: bool) -> list[Path]:
    """Return the files and folders that :func:`obtain` may read: archives, and what is extracted from them.

    Raises:
        DataError: Neither data nor archive is there and ``download`` is false.
    """
    for archive in archives:
        lacking = archive.lacking(folder)
        if lacking and not download and not (folder / archive.filename).exists():
            raise DataError(
                f"{folder} holds neither {', '.join(lacking)} nor {archive.filename}, and dataset.download=false. Set "
                "dataset.download=true, or set dataset.root to where the data are, or download "
                f"{archive.url} and put it at {folder / archive.filename} ({archive.algorithm} {archive.checksum}), "
                "where sfu extracts it."
            )
    return [folder / name for archive in archives for name in (*archive.entries, archive.filename)]


def obtain(archives: Sequence[Archive], folder: Path, download: bool, *, pause_s: float = 1.0) -> None:
    """Bring the archives' entries into ``folder``; those that are there already, and the archives, stay.

    One process at a time does this; others wait for it. A failed download is tried again after ``pause_s`` seconds,
    doubled after every further failure.

    Raises:
        DataError: An archive is missing, cannot be downloaded, or is not the published one.
        ArtifactError: No room, or no permission to write.
    """
    require_obtainable(archives, folder, download)
    for archive in archives:
        if not archive.lacking(folder):
            continue
        path = folder / archive.filename
        try:
            held = acquire_lock(
                folder / f".{archive.filename}.lock",
                partial(log.info, "waiting for another process that is getting %s", path),
            )
        except OSError as error:
            raise ArtifactError(
                f"{folder} cannot be written ({error.strerror or error}). Choose another folder by dataset.root."
            ) from error
        with held:
            if not archive.lacking(folder):  # another process has done it meanwhile
                continue
            if path.exists():
                _require_published(archive, path)
            else:
                _download(archive, folder, pause_s)
            extract(path, archive.entries, folder)


def _require_published(archive: Archive, path: Path) -> None:
    found = archive.checksum_of(path)
    if found != archive.checksum:
        size = path.stat().st_size
        short = f" It is cut short: {size} of {archive.size} bytes." if archive.size and size < archive.size else ""
        raise DataError(
            f"{path} has {archive.algorithm} {found}, but the archive at {archive.url} has {archive.checksum}.{short} "
            "Remove the file and run again, or put a complete one there."
        )


def _download(archive: Archive, folder: Path, pause_s: float) -> None:
    """Download an archive, or continue where an earlier try stopped."""
    if urllib.parse.urlsplit(archive.url).scheme not in ("http", "https"):
        raise ConfigError(f"{archive.url} is not an http or https address. sfu only downloads from these.")
    target = folder / archive.filename
    part = target.with_name(f"{target.name}.part")
    resumed = _size(part) > 0
    found = _transfer(archive, part, pause_s)
    if found != archive.checksum and resumed:
        log.warning("%s was resumed and its checksum is wrong; sfu downloads it once more from the start", target)
        part.unlink()
        found = _transfer(archive, part, pause_s)
    if found != archive.checksum:
        part.unlink()
        raise DataError(
            f"{archive.url} gave a file whose {archive.algorithm} is {found}, not {archive.checksum}. It was removed. "
            + archive.by_hand(folder)
        )
    part.replace(target)


def _transfer(archive: Archive, part: Path, pause_s: float) -> str:
    """Try until the whole file is there, and return its checksum."""
    furthest, failures = 0, 0
    with byte_progress(f"downloading {archive.url} to {part.parent}") as tick:
        while True:
            try:
                _try_once(archive, part, tick)
                return archive.checksum_of(part)
            except _FailedTryError as error:
                if error.is_foreign:
                    part.unlink(missing_ok=True)
                failures = 1 if _size(part) > furthest else failures + 1
                furthest = max(furthest, _size(part))
                if error.is_final or failures >= _TRIES:
                    raise DataError(
                        f"{archive.url} cannot be downloaded: {error}. {archive.by_hand(part.parent)}"
                    ) from error
                log.info("%s: %s; trying again", archive.filename, error)
                time.sleep(pause_s * 2 ** (failures - 1))


class _FailedTryError(Exception):
    """A try failed: for good (``is_final``), or since what was downloaded belongs to another file (``is_foreign``)."""

    def __init__(self, reason: str, *, is_final: bool = False, is_foreign: bool = False) -> None:
        super().__init__(reason)
        self.is_final, self.is_foreign = is_final, is_foreign


def _try_once(archive: Archive, part: Path, tick: Tick) -> None:
    """Ask for the bytes after those in ``part``, and append them."""
    import requests

    have = _size(part)
    if have and have == archive.size:
        return
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = requests.get(archive.url, headers=headers, stream=True, timeout=_TIMEOUT_S)
    except requests.RequestException as error:
        is_final = isinstance(error, requests.exceptions.InvalidSchema)  # a redirect to ftp and the like
        raise _FailedTryError(f"no connection ({error})", is_final=is_final) from error
    with response:
        code = response.status_code
        start, total = _content_range(response)
        nothing_after = code == _NO_SUCH_RANGE and have > 0
        if nothing_after and total in (None, have):
            return  # it is complete, as far as the server says
        if not (response.ok or nothing_after):
            is_final = code < 500 and code not in _TRY_AGAIN
            raise _FailedTryError(f"the server answers {code} {response.reason}", is_final=is_final)
        if archive.size and total and total != archive.size:
            raise _FailedTryError(
                f"the server offers {total} bytes, not {archive.size}", is_final=True, is_foreign=True
            )
        if nothing_after or start not in (0, have) or (total is not None and total < have):
            raise _FailedTryError("the part that was downloaded belongs to another file", is_foreign=True)
        _append(response, part, start, total, tick)


def _append(response: Response, part: Path, start: int, total: int | None, tick: Tick) -> None:
    position = start
    try:
        with part.open("ab" if start else "wb") as file:
            for chunk in _chunks(response):
                file.write(chunk)
                position += len(chunk)
                tick(position, total)
    except OSError as error:
        remedy = "Free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Set dataset.root"
        raise ArtifactError(
            f"{part} cannot be written ({error.strerror}). {remedy} and run again; what was downloaded stays."
        ) from error
    if total is not None and position < total:
        raise _FailedTryError(f"the connection ended at byte {position} of {total}")


def _chunks(response: Response) -> Iterator[bytes]:
    """Yield bytes as they come, so that a broken connection loses none of them."""
    import urllib3

    try:
        while chunk := response.raw.read1(_CHUNK):
            yield chunk
    except (OSError, urllib3.exceptions.HTTPError) as error:
        raise _FailedTryError(f"the connection broke off ({error})") from error


def _content_range(response: Response) -> tuple[int, int | None]:
    """Return the first byte and the length of the whole file, from ``bytes 5-9/10`` or ``bytes */10``."""
    found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if found is None:
        length = response.headers.get("Content-Length", "")
        return 0, int(length) if response.status_code == _WHOLE and length.isdecimal() else None
    first, total = found.groups()
    return int(first or 0), None if total == "*" else int(total)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
