"""A public dataset on disk: already there, in an archive that lies there, or downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sfu.data.download.archive import Archive
from sfu.data.download.extract import extract
from sfu.data.download.fetch import fetch
from sfu.data.download.lock import alone
from sfu.errors import DataError


def require_obtainable(archives: Sequence[Archive], folder: Path, download: bool) -> list[Path]:
    """Check, without a look inside, that :func:`obtain` has something to work from.

    Returns:
        What it may read: the folders and files extracted or to be extracted, and the archives.

    Raises:
        DataError: Neither data nor archive is there and ``download`` is false.
    """
    for archive in archives:
        if not (download or archive.is_extracted(folder) or (folder / archive.filename).exists()):
            lacking = ", ".join(entry for entry in archive.entries if not (folder / entry).exists())
            raise DataError(
                f"{folder} holds neither {lacking} nor {archive.filename}, and dataset.download=false. Set "
                f"dataset.download=true, set dataset.root to where the data lies, or fetch {archive.url} and put it at "
                f"{folder / archive.filename} ({archive.algorithm} {archive.checksum}); sfu extracts it."
            )
    return [folder / name for archive in archives for name in (*archive.entries, archive.filename)]


def obtain(archives: Sequence[Archive], folder: Path, download: bool) -> None:
    """Bring the archives' entries into ``folder``; those already there are left alone. Archives are kept.

    Raises:
        DataError: An archive is missing, cannot be fetched, or is not the published one.
        ArtifactError: No room, or no permission to write.
    """
    require_obtainable(archives, folder, download)
    for archive in archives:
        if archive.is_extracted(folder):
            continue
        path = folder / archive.filename
        with alone(path):
            if archive.is_extracted(folder):  # another process has done it meanwhile
                continue
            if path.exists():
                _require_published(archive, path)
            else:
                fetch(archive, folder)
            extract(path, archive.entries, folder)


def _require_published(archive: Archive, path: Path) -> None:
    found = archive.checksum_of(path)
    if found != archive.checksum:
        size = path.stat().st_size
        short = f" It is cut short: {size} of {archive.size} bytes." if archive.size and size < archive.size else ""
        raise DataError(
            f"{path} has {archive.algorithm} {found}, but what {archive.url} publishes has {archive.checksum}.{short} "
            "Remove the file and run again, or put a whole one there."
        )
