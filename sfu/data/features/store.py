"""The cache of extracted features: one entry for each content, which is itself a store of chunks.

The key covers everything that decides which features come out (weights, transform, dtype, pooling, images). Chunks are
written one by one, so an interrupted extraction continues at the first chunk that is missing or damaged.

Shapes: N images, M of them (of a chunk) that can be decoded, D features.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfu.data.examples import EXAMPLES, write_digests
from sfu.errors import ArtifactError
from sfu.files import replacing, write_tensors, write_text
from sfu.readers import Count, Record, floats, read_json, read_tensors, refusing
from sfu.store import Entry, Store, cache_dir, key_of

if TYPE_CHECKING:
    from sfu.data.settings import BackboneSettings

VIEWS = "forget-sets"
CHUNK_ROWS = 2048
READERS = 4  # threads that read chunks
_SCHEMA = 2
_FEATURES, _DAMAGED = "features.safetensors", "damaged.json"
_EXTRA_SPACE = 1.05
_REMEDY = "Remove it with sfu-features rm, and it is extracted again."


def cache_root(config: BackboneSettings) -> Path:
    """Return ``backbone.cache``, or ``features`` in sfu's cache folder."""
    return Path(config.cache).expanduser() if config.cache else cache_dir("features")


def views_folder(config: BackboneSettings) -> Path:
    """Return the folder for features of augmented forget images, the only one that source-free methods may open."""
    return cache_root(config) / VIEWS


@dataclass(frozen=True)
class Features:
    """Features of a sequence of images, or of one chunk of it.

    Attributes:
        features_MD: Those of the images that could be decoded, float32 (float64 from a float64 backbone), on the CPU.
        rows_M: Their numbers among all images, ascending, int64.
        damaged: What is wrong with each of the others, by number.
        folder: Where they are cached; ``None`` for a chunk.
    """

    features_MD: Tensor
    rows_M: Tensor
    damaged: dict[int, str]
    folder: Path | None = None


class FeatureStore:
    """The cached features of one sequence of images under one backbone."""

    def __init__(self, root: Path, record: Mapping[str, object], n_images: int, chunk_rows: int = CHUNK_ROWS) -> None:
        """Name the entry in a feature cache; ``record`` is everything that decides the features."""
        self.record = {"schema": _SCHEMA, **record, "n_images": n_images}
        self.key, self.n_images, self._chunk_rows = key_of(self.record), n_images, chunk_rows
        self.folder = root / self.key
        advice = "Set backbone.cache to a folder you can write to, or free some space."
        self._entries, self._chunks = Store(root, advice=advice), Store(self.folder, advice=advice)

    @property
    def n_chunks(self) -> int:
        """Number of chunks."""
        return -(-self.n_images // self._chunk_rows)

    def rows(self, index: int) -> range:
        """Return the numbers of the images of a chunk."""
        return range(index * self._chunk_rows, min((index + 1) * self._chunk_rows, self.n_images))

    def locked(self, waiting: Callable[[], object]) -> AbstractContextManager[None]:
        """Hold the entry's lock: one run extracts while the others wait, on one machine or a shared disk."""
        return self._entries.locked(self.key, waiting)

    def begin(self, shown: Mapping[str, object], examples: Iterable[bytes] = ()) -> None:
        """Describe the entry, with ``shown`` for people, and clear leftovers of killed runs; only while locked.

        ``examples`` are digests by which the entry is found when one of its images is to be forgotten.
        """
        self._chunks.remove_leftovers(older_than=0.0)
        shown = {**shown, "chunks": self.n_chunks}
        self._entries.describe(self.key, {"record": self.record, "shown": shown})
        with replacing(self.folder / EXAMPLES) as temporary:
            write_digests(temporary, examples)

    def touch(self) -> bool:
        """Mark the entry as used now, and return whether it is there."""
        return self._entries.touch(self.key)

    def load(self) -> Features | None:
        """Return all chunks as one, or ``None`` if one is missing or damaged."""
        damaged: dict[int, str] = {}
        features_ND = torch.empty(0, 0)
        decoded_N = torch.zeros(self.n_images, dtype=torch.bool)
        with ThreadPoolExecutor(READERS) as pool:
            for chunk in pool.map(self.read, range(self.n_chunks)):
                if chunk is None:
                    pool.shutdown(cancel_futures=True)
                    return None
                damaged |= chunk.damaged
                if chunk.rows_M.numel():
                    if not decoded_N.any():
                        features_ND = chunk.features_MD.new_empty(self.n_images, chunk.features_MD.shape[1])
                    features_ND[chunk.rows_M] = chunk.features_MD
                    decoded_N[chunk.rows_M] = True
        features_MD = features_ND[decoded_N] if damaged and decoded_N.any() else features_ND
        return Features(features_MD, decoded_N.nonzero().squeeze(1), damaged, self.folder)

    def read(self, index: int) -> Features | None:
        """Return a chunk, or ``None`` if it is missing or damaged."""
        return self._chunks.read(self._chunk_key(index), lambda folder: _read_chunk(folder, self.rows(index)))

    def damaged(self, index: int) -> dict[int, str] | None:
        """Return what is wrong with images of a chunk, or ``None`` if the chunk is missing or damaged."""
        chunk = self.read(index)
        return None if chunk is None else chunk.damaged

    def has(self, index: int) -> bool:
        """Return whether a chunk is there, without checking its content."""
        return self._chunks.has(self._chunk_key(index))

    def write(self, index: int, chunk: Features) -> None:
        """Write a chunk; if that fails with :class:`ArtifactError`, the chunks before it stay."""

        def files(folder: Path) -> None:
            write_tensors(folder / _FEATURES, {"features": chunk.features_MD, "rows": chunk.rows_M})
            write_text(folder / _DAMAGED, json.dumps(chunk.damaged, sort_keys=True) + "\n")

        self._chunks.put(self._chunk_key(index), files)

    def require_space(self, bytes_per_row: int, n_rows: int) -> None:
        """Raise :class:`ArtifactError` if the disk has too little room for ``n_rows`` more rows."""
        free, needed = shutil.disk_usage(self.folder).free, int(bytes_per_row * n_rows * _EXTRA_SPACE)
        if needed > free:
            raise ArtifactError(
                f"the features need {needed / 2**20:.1f} MiB, but {self.folder.parent} has {free / 2**20:.1f} MiB "
                "free. Make room (sfu-features ls, sfu-features rm), or set backbone.cache to another disk."
            )

    def _chunk_key(self, index: int) -> str:
        rows = self.rows(index)
        return key_of([self.key, rows.start, rows.stop])


def _read_chunk(folder: Path, rows: range) -> Features:
    """Read a chunk of these rows.

    Raises:
        ArtifactError: It is not what :meth:`FeatureStore.write` writes.
    """
    with refusing(folder, _REMEDY):
        known = read_json(folder / _DAMAGED, dict[str, str])
        damaged = {int(row): what for row, what in known.items()}
        tensors = read_tensors(folder / _FEATURES, _REMEDY)
        features_MD, rows_M = floats(tensors, "features", 2), tensors["rows"]
        wanted = [row for row in rows if row not in damaged]
        if rows_M.dtype != torch.int64 or rows_M.tolist() != wanted or len(wanted) != len(features_MD):
            raise ValueError(f"its rows are not those of {rows.start} .. {rows.stop - 1} that can be decoded")
        return Features(features_MD, rows_M, damaged)


class _Transform(Record):
    crop: Count | None = None


class _Record(Record):
    backbone: str = "?"
    n_images: Count | None = None
    transform: _Transform = _Transform()


class _Shown(Record):
    dataset: str = "?"
    chunks: Count | None = None


class AboutFeatures(Record):
    """What ``entry.json`` says of cached features to people."""

    record: _Record = _Record()
    shown: _Shown = _Shown()


def about_features(entry: Entry) -> AboutFeatures:
    """Return what an entry says of itself; nothing if that is missing or damaged."""
    try:
        return AboutFeatures.model_validate(entry.about)
    except ValueError:
        return AboutFeatures()


def cached_features(root: Path) -> list[Entry]:
    """Return the entries of a feature cache, the last used first."""
    entries = [*Store(root).entries(), *Store(root / VIEWS).entries()]
    return sorted(entries, key=lambda entry: entry.used, reverse=True)


def chunks_of(entry: Entry) -> Iterator[Tensor]:
    """Yield the features of each chunk of an entry that is there, ``[M, D]``.

    Raises:
        ArtifactError: A chunk cannot be read.
        ValueError: A chunk holds something else.
    """
    for chunk in Store(entry.folder).entries():
        yield floats(read_tensors(chunk.folder / _FEATURES, _REMEDY), "features", 2)


def count_chunks(entry: Entry) -> tuple[int, int]:
    """Return how many chunks of an entry are there and how many it needs (0 if that is unknown)."""
    return len(Store(entry.folder).entries()), about_features(entry).shown.chunks or 0


def is_unfinished(entry: Entry) -> bool:
    """Return whether a chunk is known to be missing; their contents are checked when they are read."""
    there, needed = count_chunks(entry)
    return there < needed
