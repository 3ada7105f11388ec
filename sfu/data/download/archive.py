"""What is known of a published archive before a byte of it is read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from sfu.errors import DataError


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

    def is_extracted(self, folder: Path) -> bool:
        """Whether everything needed from it stands in ``folder``."""
        return all((folder / entry).exists() for entry in self.entries)

    def by_hand(self, folder: Path) -> str:
        """How to do without the network."""
        return (
            f"To place it by hand, fetch {self.url} on any machine and put it at {folder / self.filename} "
            f"({self.algorithm} {self.checksum}); dataset.download=false keeps sfu from trying."
        )

    def checksum_of(self, path: Path) -> str:
        """The same kind of digest of a file.

        Raises:
            DataError: It cannot be read.
        """
        try:
            with path.open("rb") as file:
                return hashlib.file_digest(file, lambda: hashlib.new(self.algorithm, usedforsecurity=False)).hexdigest()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}).") from error
