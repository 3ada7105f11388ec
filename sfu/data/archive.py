"""Extract a tar archive: nothing lands outside its folder, and a half-extracted entry is never used."""

from __future__ import annotations

import errno
import gzip
import logging
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath

from rich.console import Console
from rich.errors import LiveError
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from sfu.errors import ArtifactError, DataError
from sfu.names import visible

log = logging.getLogger(__name__)

Tick = Callable[[int, int | None], None]
_GZIP = b"\x1f\x8b"


@contextmanager
def byte_progress(description: str) -> Iterator[Tick]:
    """Show ``description`` until the block ends: a bar on a terminal, one line in the log elsewhere.

    The value is called with the bytes done and, if known, the bytes in all.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        DownloadColumn(binary_units=True),
    )
    bar = Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console, transient=True)
    task = bar.add_task(visible(description), total=None)
    with ExitStack() as stack:
        with suppress(LiveError):  # something else is drawing on this terminal
            if console.is_terminal:
                stack.enter_context(bar)
        if not bar.live.is_started:
            log.info("%s", description)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def extract(archive: Path, entries: Sequence[str], folder: Path) -> None:
    """Put the ``entries`` at the top of a tar file into ``folder``; those that are there already stay as they are.

    Everything is extracted into a hidden folder first, and moved once the last byte has been read.

    Raises:
        DataError: The archive is damaged, lacks an entry, or holds a member that would land outside.
        ArtifactError: There is no room for it.
    """
    if not hasattr(tarfile, "data_filter"):
        raise DataError("this Python cannot extract archives safely (no tarfile.data_filter). Use 3.11.4 or later.")
    needed = _extracted_size(archive)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ArtifactError(
            f"extracting {archive} takes {needed / 2**20:,.0f} MiB, but {folder} has {free / 2**20:,.0f} MiB free. "
            "Free some space, or choose another folder by dataset.root."
        )
    temporary = folder / f".{archive.name}.extracting"
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    try:
        _extract_all(archive, temporary, needed)
        lacking = [entry for entry in entries if not (temporary / entry).exists()]
        if lacking:
            raise DataError(f"{archive} holds no {' and no '.join(lacking)}, so it is not the published archive.")
        for entry in entries:
            if not (folder / entry).exists():
                (temporary / entry).replace(folder / entry)
    except OSError as error:
        remedy = "Free some space" if error.errno == errno.ENOSPC else "Choose another folder by dataset.root"
        raise ArtifactError(f"{archive} cannot be extracted to {folder} ({error}). {remedy} and run again.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _extract_all(archive: Path, folder: Path, size: int) -> None:
    links: set[PurePosixPath] = set()
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
        raise DataError(f"{archive} is cut short or damaged ({error}). Remove it and run again.") from error


def _refuse_outsiders(member: tarfile.TarInfo, links: set[PurePosixPath], archive: Path) -> None:
    """Refuse what tarfile's ``data`` filter allows: absolute names, which it shortens, and paths through links."""
    name = PurePosixPath(member.name)
    places = [name]
    if member.issym():
        places.append(name.parent / member.linkname)
    elif member.islnk():
        places.append(PurePosixPath(member.linkname))
    for place in places:
        if place.is_absolute() or ".." in place.parts or not links.isdisjoint((place, *place.parents)):
            raise DataError(
                f"{archive} is not safe to extract: its member {member.name!r} leads outside or through a link. "
                "Remove it."
            )
    links.update(places[: len(places) - 1])


def _extracted_size(archive: Path) -> int:
    """Return the bytes of the tar file itself; a gzip stream ends with its uncompressed size (modulo 4 GiB)."""
    try:
        with archive.open("rb") as file:
            if file.read(2) != _GZIP:
                return archive.stat().st_size
            file.seek(-4, os.SEEK_END)
            return int.from_bytes(file.read(4), "little")
    except OSError as error:
        raise DataError(f"{archive} cannot be read ({error.strerror}).") from error
