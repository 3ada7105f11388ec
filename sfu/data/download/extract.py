"""Extract a tar archive so that nothing lands outside its folder and nothing half extracted is ever believed."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from sfu.data.download.progress import byte_progress
from sfu.errors import ArtifactError, DataError

_GZIP = b"\x1f\x8b"
_Parts = tuple[str, ...]


def extract(archive: Path, entries: Sequence[str], folder: Path) -> None:
    """Put the ``entries`` at the top of a tar file into ``folder``; those already there stay as they are.

    Everything is extracted into a hidden folder beside them first, and moved when the last byte has been read.

    Raises:
        DataError: The archive is damaged, lacks an entry, or holds a member that would land outside.
        ArtifactError: There is no room for it.
    """
    if not hasattr(tarfile, "data_filter"):
        raise DataError("this Python cannot extract archives safely (no tarfile.data_filter); use 3.11.4 or later.")
    needed = _extracted_size(archive)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ArtifactError(
            f"extracting {archive} takes {needed / 2**20:,.0f} MiB and {folder} has {free / 2**20:,.0f} MiB free; "
            "free some space or choose another folder by dataset.root."
        )
    temporary = folder / f".{archive.name}.extracting"
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    try:
        _extract_all(archive, temporary, needed)
        lacking = [entry for entry in entries if not (temporary / entry).exists()]
        if lacking:
            raise DataError(f"{archive} holds no {' and no '.join(lacking)}; it is not the published archive.")
        for entry in entries:
            if not (folder / entry).exists():
                (temporary / entry).replace(folder / entry)
    except OSError as error:
        remedy = "free some space" if error.errno == errno.ENOSPC else "choose another folder by dataset.root"
        raise ArtifactError(f"cannot extract {archive} to {folder} ({error}); {remedy} and run again.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _extract_all(archive: Path, folder: Path, size: int) -> None:
    links: set[_Parts] = set()
    done = 0
    folder.mkdir(parents=True)
    try:
        with byte_progress(f"extracting {archive}") as tick, tarfile.open(archive) as tar:
            for member in tar:
                _refuse_outsiders(member, links, archive)
                tar.extract(member, folder, filter="data")
                done += member.size
                tick(done, size)
    except tarfile.FilterError as error:
        raise DataError(f"{archive} is not safe to extract: {error}.") from error
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{archive} is cut short or damaged ({error}); remove it and run again.") from error


def _refuse_outsiders(member: tarfile.TarInfo, links: set[_Parts], archive: Path) -> None:
    """Refuse what the ``data`` filter lets pass: absolute names it would shorten, and ways that lead through links."""
    name = _inside(member.name)
    places = [name]
    if name and member.issym():
        places.append(_inside(member.linkname, name[:-1]))
    elif name and member.islnk():
        places.append(_inside(member.linkname))
    if any(place is None or _starts_with_one_of(place, links) for place in places):
        raise DataError(
            f"{archive} is not safe to extract: its member {member.name!r} leads outside or through a link."
        )
    if name and len(places) > 1:
        links.add(name)


def _inside(path: str, start: _Parts = ()) -> _Parts | None:
    """Where a relative path leads from the folder ``start``; ``None`` if outside, or down and up again."""
    parts = PurePosixPath(path).parts
    ups = next((count for count, part in enumerate(parts) if part != ".."), len(parts))
    if path.startswith("/") or ".." in parts[ups:] or ups > len(start):
        return None
    return start[: len(start) - ups] + parts[ups:]


def _starts_with_one_of(place: _Parts, links: set[_Parts]) -> bool:
    return any(place[:length] in links for length in range(1, len(place) + 1))


def _extracted_size(archive: Path) -> int:
    """Bytes of the tar file itself; a gzip stream ends with its uncompressed size (modulo 4 GiB)."""
    try:
        with archive.open("rb") as file:
            if file.read(2) != _GZIP:
                return archive.stat().st_size
            file.seek(-4, os.SEEK_END)
            return int.from_bytes(file.read(4), "little")
    except OSError as error:
        raise DataError(f"{archive} cannot be read ({error.strerror}).") from error
