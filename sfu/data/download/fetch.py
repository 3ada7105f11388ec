"""Get one archive: a ``.part`` file that is resumed after an interruption and renamed when its checksum is right."""

from __future__ import annotations

import errno
import logging
import time
from pathlib import Path

from sfu.data.download.archive import Archive
from sfu.data.download.http import DroppedError, Stream, stream
from sfu.data.download.progress import Tick, byte_progress
from sfu.errors import ArtifactError, DataError

log = logging.getLogger(__name__)

_TRIES = 4  # in a row without a new byte
_FIRST_PAUSE_S = 1.0  # doubled after every failure
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def fetch(archive: Archive, folder: Path) -> None:
    """Download ``archive`` into ``folder``, or go on where an earlier try stopped. One process at a time.

    Raises:
        DataError: No network, or the file is not the published one; it says how to place it by hand.
        ArtifactError: It cannot be written; what has come is kept.
    """
    target = folder / archive.filename
    part = target.with_name(f"{target.name}.part")
    resumed = _size(part) > 0
    found = _transferred(archive, part, folder)
    if found != archive.checksum and resumed:
        log.warning("%s was resumed and came out wrong; it is fetched once more from the start", target)
        part.unlink()
        found = _transferred(archive, part, folder)
    if found != archive.checksum:
        part.unlink()
        raise DataError(
            f"{archive.url} gave a file whose {archive.algorithm} is {found}, not {archive.checksum}; it was removed. "
            + archive.by_hand(folder)
        )
    part.replace(target)


def _transferred(archive: Archive, part: Path, folder: Path) -> str:
    """The checksum of the whole file, once it is there."""
    furthest, failures = 0, 0
    with byte_progress(f"downloading {archive.url} to {folder}") as tick:
        while True:
            try:
                _try_once(archive, part, tick)
                return archive.checksum_of(part)
            except DroppedError as error:
                failures = 1 if _size(part) > furthest else failures + 1
                furthest = max(furthest, _size(part))
                if error.hopeless or failures >= _TRIES:
                    raise DataError(f"{archive.url} cannot be fetched: {error}. {archive.by_hand(folder)}") from error
                log.info("%s: %s; trying again", archive.filename, error)
                time.sleep(_FIRST_PAUSE_S * 2 ** (failures - 1))


def _try_once(archive: Archive, part: Path, tick: Tick) -> None:
    have = _size(part)
    if have and have == archive.size:
        return
    with stream(archive.url, have) as rest:
        if archive.size and rest.total and rest.total != archive.size:
            part.unlink(missing_ok=True)
            raise DroppedError(f"the server offers {rest.total} bytes, not {archive.size}", hopeless=True)
        if rest.start not in (0, have) or (rest.total is not None and rest.total < have):
            part.unlink()
            raise DroppedError("the part that is here belongs to another file")
        _append(rest, part, tick)


def _append(rest: Stream, part: Path, tick: Tick) -> None:
    try:
        with part.open("ab" if rest.start else "wb") as file:
            position = rest.start
            for chunk in rest.chunks():
                file.write(chunk)
                position += len(chunk)
                tick(position, rest.total)
    except OSError as error:
        remedy = "free some space" if error.errno in _NO_SPACE else "choose another folder by dataset.root"
        raise ArtifactError(
            f"cannot write {part} ({error.strerror}); {remedy} and run again: what has come is kept."
        ) from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
