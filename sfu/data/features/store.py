"""Extracted features on disk: one folder for each content, in chunks that are each whole or absent.

A folder is named by the SHA-256 of everything that decides what features come out (weights, transform, dtype,
pooling, images), so nothing in it is ever out of date. Inside lie ``about.json`` (that record, and what to show to
people) and one safetensors file a chunk, with the digest of its content. A chunk that is damaged, or belongs elsewhere,
is not believed.

Shapes: M rows of a chunk, D features.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from sfu.errors import ArtifactError
from sfu.files import acquire_lock, write_tensors, write_text

SCHEMA = 1
CHUNK_ROWS = 2048
READERS = 4  # threads that read chunks
_ABOUT = "about.json"
_EXTRA_SPACE = 1.05


@dataclass(frozen=True)
class Chunk:
    """Features of some consecutive images.

    Attributes:
        features_MD: Those of the images that could be decoded.
        rows_M: Their numbers among all images, int64.
        damaged: What was wrong with each of the others, by number.
    """

    features_MD: Tensor
    rows_M: Tensor
    damaged: dict[int, str] = field(default_factory=dict)

    def digest(self) -> str:
        """SHA-256 over everything."""
        digest = hashlib.sha256(json.dumps(_by_text(self.damaged), sort_keys=True).encode())
        for tensor in (self.features_MD, self.rows_M):
            values = tensor.contiguous().numpy()
            digest.update(f"{values.dtype} {values.shape}\n".encode())
            digest.update(values.reshape(-1).view("uint8").data)
        return digest.hexdigest()


class FeatureStore:
    """The folder of one content."""

    def __init__(self, root: Path, record: Mapping[str, object], n_images: int) -> None:
        """Name the folder; nothing is written yet.

        Args:
            root: Folder of all stores.
            record: Everything that decides the features.
            n_images: How many images there are.
        """
        self.record = json.loads(json.dumps({"schema": SCHEMA, **record, "n_images": n_images}))
        self.key = hashlib.sha256(json.dumps(self.record, sort_keys=True).encode()).hexdigest()[:32]
        self.folder = root / self.key
        self.n_images = n_images

    @property
    def n_chunks(self) -> int:
        """Number of chunks."""
        return -(-self.n_images // CHUNK_ROWS)

    def rows(self, index: int) -> range:
        """Numbers of the images of a chunk."""
        return range(index * CHUNK_ROWS, min((index + 1) * CHUNK_ROWS, self.n_images))

    @contextmanager
    def locked(self, waiting: Any = None) -> Iterator[None]:
        """Alone on this content: one process extracts, the others wait, on one machine or a shared disk.

        The lock goes with the process that holds it, however that ends. ``waiting()`` is called if there is a wait.

        Raises:
            ArtifactError: The folder cannot be written.
        """
        try:
            lock = acquire_lock(lock_path(self.folder), waiting)
        except OSError as error:
            raise ArtifactError(
                f"cannot use the feature cache {self.folder.parent} ({error}); set backbone.cache to a folder you can "
                "write to."
            ) from error
        try:
            yield
        finally:
            lock.release()

    def write_about(self, shown: Mapping[str, object]) -> None:
        """Write ``about.json``: the record, and ``shown`` for people. Its time of change is that of its last use."""
        write_text(self.folder / _ABOUT, json.dumps({**self.record, "shown": dict(shown)}, indent=2) + "\n")

    def touch(self) -> bool:
        """Note that the store was used now; ``False`` if ``about.json`` is not there."""
        try:
            os.utime(self.folder / _ABOUT)
        except FileNotFoundError:
            return False
        except OSError:
            pass  # a read-only cache can be used, too
        return True

    def tidy(self) -> None:
        """Remove what a process that was killed while writing left behind; only while :meth:`locked`."""
        for path in self.folder.glob(".*"):
            path.unlink(missing_ok=True)

    def write_damaged(self, messages: Sequence[str]) -> Path:
        """List the images that cannot be decoded, one a line."""
        path = self.folder / "damaged.txt"
        write_text(path, "\n".join(messages) + "\n")
        return path

    def read(self, index: int) -> Chunk | None:
        """A chunk, or ``None`` if it is absent, damaged or foreign."""
        from safetensors import safe_open

        path = self.path(index)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["chunk"])
                chunk = Chunk(
                    file.get_tensor("features"),
                    file.get_tensor("rows"),
                    {int(row): what for row, what in about["damaged"].items()},
                )
            believed = about["key"] == self.key and about["sha256"] == chunk.digest() and self._covers(chunk, index)
        except Exception:  # safetensors, JSON and missing keys raise many kinds; each means the same
            return None
        return chunk if believed else None

    def write(self, index: int, chunk: Chunk) -> None:
        """Write a chunk.

        Raises:
            ArtifactError: It cannot be written (full disk); the chunks before it are kept.
        """
        about = {"key": self.key, "sha256": chunk.digest(), "damaged": _by_text(chunk.damaged)}
        tensors = {"features": chunk.features_MD, "rows": chunk.rows_M}
        write_tensors(self.path(index), tensors, {"chunk": json.dumps(about)})  # one entry: their order is not fixed

    def require_space(self, bytes_per_row: int, n_rows: int) -> None:
        """Refuse to begin what cannot be finished.

        Raises:
            ArtifactError: The disk has too little room for ``n_rows`` more rows.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        free, needed = shutil.disk_usage(self.folder).free, int(bytes_per_row * n_rows * _EXTRA_SPACE)
        if needed > free:
            raise ArtifactError(
                f"the features need {needed / 2**20:.1f} MiB but {self.folder.parent} has {free / 2**20:.1f} MiB free; "
                "make room (sfu-features ls, sfu-features rm), or set backbone.cache to another disk."
            )

    def path(self, index: int) -> Path:
        """The file of a chunk."""
        return self.folder / f"chunk-{index:05d}.safetensors"

    def _covers(self, chunk: Chunk, index: int) -> bool:
        numbers = sorted([*chunk.rows_M.tolist(), *chunk.damaged])
        return numbers == list(self.rows(index)) and chunk.features_MD.shape[0] == chunk.rows_M.shape[0]


def lock_path(folder: Path) -> Path:
    """The lock of the store in ``folder``."""
    return folder.with_suffix(".lock")


def _by_text(damaged: Mapping[int, str]) -> dict[str, str]:
    return {str(row): what for row, what in sorted(damaged.items())}
