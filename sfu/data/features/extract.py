"""Extract features once, chunk by chunk, and read them back ever after.

Shapes: N images, M of them decodable, D features.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfu.cache_dir import cache_dir
from sfu.data.backbones.backbone import Backbone, build_backbone
from sfu.data.backbones.memo import recall, remember
from sfu.data.features.decoding import decoded
from sfu.data.features.ranks import Ranks
from sfu.data.features.store import Chunk, FeatureStore, is_finite
from sfu.data.images.decode import ImageError
from sfu.data.images.images import Images
from sfu.errors import ArtifactError, DataError

if TYPE_CHECKING:
    from sfu.settings import BackboneConfig

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
_READERS = 4


@dataclass(frozen=True)
class Features:
    """Features of a sequence of images.

    Attributes:
        features_MD: Those of the images that could be decoded, float32 (float64 from a float64 backbone), on the CPU.
        rows_M: Their numbers, ascending.
        damaged: What is wrong with each of the others, by number.
        folder: Where they are kept.
    """

    features_MD: Tensor
    rows_M: Tensor
    damaged: dict[int, str]
    folder: Path


class Extractor:
    """Turns images into features with one backbone, through the cache."""

    def __init__(
        self,
        config: BackboneConfig,
        device: torch.device,
        *,
        progress: Progress | None = None,
        say: Callable[[str], None] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Keep the settings; the backbone is built when it is first needed.

        Args:
            config: The group ``backbone``.
            device: Where to run it.
            progress: Called with (images done, images in all).
            say: Called with a sentence when long work begins or is waited for.
            ranks: This process among those that share the work; alone by default.
        """
        self.config, self.device = config, device
        self._progress, self._say = progress or (lambda done, total: None), say or log.info
        self._ranks = ranks or Ranks()
        self._backbone: Backbone | None = None

    @property
    def backbone(self) -> Backbone:
        """The backbone, on the device."""
        if self._backbone is None:
            self._backbone = build_backbone(self.config).to(self.device)
        return self._backbone

    def _require_same(self, store: FeatureStore) -> None:
        """Make sure that the backbone as built is the one that was remembered.

        Raises:
            DataError: It is not: its weights changed behind an unchanged file.
        """
        record = self.backbone.record()
        if any(store.record[key] != json.loads(json.dumps(value)) for key, value in record.items()):
            remember(self.config, record)
            raise DataError("the backbone is not what it was when it was last built (other weights?); run again.")

    @property
    def record(self) -> dict[str, object]:
        """What decides the backbone's features; from memory, if it was built before."""
        if self._backbone is None and (known := recall(self.config)) is not None:
            return known
        record = self.backbone.record()
        remember(self.config, record)
        return record

    def store(self, images: Images, changes: Mapping[str, object] | None = None) -> FeatureStore:
        """Where the features of ``images`` are kept; ``changes`` names what was done to them before the transform."""
        root = Path(self.config.cache).expanduser() if self.config.cache else cache_dir("features")
        return FeatureStore(root, {**self.record, "images": images.fingerprint(), **(changes or {})}, len(images))

    def extract(
        self,
        images: Images,
        *,
        fail_on_damage: bool = True,
        shown: Mapping[str, object] | None = None,
        changes: Mapping[str, object] | None = None,
    ) -> Features:
        """Features of ``images``, read if they are kept, else extracted and kept.

        Args:
            images: The images, in an order that stays.
            fail_on_damage: Stop at images that cannot be decoded; otherwise leave them out and list them.
            shown: What to tell people of the store (the dataset's name).
            changes: Belongs to the key: what ``images`` does to the pixels beyond decoding them.

        Raises:
            DataError: An image cannot be decoded, or does not fit the backbone.
            ArtifactError: The cache cannot be written; what was extracted before is kept.
        """
        store = self.store(images, changes)
        found = _load(store)
        if found is None:
            self.fill(store, images, fail_on_damage=fail_on_damage, shown=shown or {})
            found = _load(store)
            if found is None:
                raise ArtifactError(f"{store.folder} was removed while it was written; run again.")
        store.touch()
        if found.damaged and fail_on_damage:
            raise _damaged(list(found.damaged.values()))
        if not found.rows_M.numel():
            first = next(iter(found.damaged.values()))
            raise DataError(f"none of the {len(images)} images can be decoded; the first: {first}.")
        return found

    def fill(self, store: FeatureStore, images: Images, *, fail_on_damage: bool, shown: Mapping[str, object]) -> None:
        """Extract the chunks that are not there; with several ranks, this one's share of them.

        Memory is bounded by one chunk, not by N. The errors are those of :meth:`extract`.
        """
        if self._ranks.rank == 0:
            with store.locked(lambda: self._say("waiting for another run that extracts the same features")):
                self._ranks.barrier()
                self._fill_locked(store, images, fail_on_damage, shown)
                self._ranks.barrier()
        else:
            self._ranks.barrier()
            self._fill_locked(store, images, fail_on_damage, shown)
            self._ranks.barrier()

    def _fill_locked(
        self, store: FeatureStore, images: Images, fail_on_damage: bool, shown: Mapping[str, object]
    ) -> None:
        mine = range(self._ranks.rank, store.n_chunks, self._ranks.size)
        with ThreadPoolExecutor(_READERS) as pool:
            there = list(pool.map(lambda index: store.read(index) is not None, mine))
        missing = [index for index, found in zip(mine, there, strict=True) if not found]
        if self._ranks.rank == 0:
            store.write_about({**shown, "device": str(self.device), "chunks": store.n_chunks})
        if not missing:
            return
        self._require_same(store)
        total = sum(len(store.rows(index)) for index in mine)
        done = total - sum(len(store.rows(index)) for index in missing)
        self._say(
            f"extracting features of {len(images):,} images with {self.config.name} on {self.device}"
            + (f" ({done:,} are there)" if done else "")
        )
        for index in missing:
            chunk = self._extract_chunk(store, images, index, done, total, missing)
            if chunk.damaged and fail_on_damage:
                raise _damaged(list(chunk.damaged.values()))
            store.write(index, chunk)
            done += len(store.rows(index))

    def _extract_chunk(
        self, store: FeatureStore, images: Images, index: int, done: int, total: int, missing: list[int]
    ) -> Chunk:
        rows, size = store.rows(index), self.config.batch_size
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        ahead = 2 if self.device.type == "cuda" else 0
        features: list[Tensor] = []
        kept: list[int] = []
        damaged: dict[int, str] = {}
        for batch in decoded(images, batches, self.backbone.transform, workers=self.config.workers, ahead=ahead):
            damaged |= batch.damaged
            if batch.images:
                found = self.backbone.features(batch.images).cpu()
                if not features and index == missing[0]:
                    store.require_space(found[0].nbytes, total - done)
                if not is_finite(found):
                    raise DataError(_not_finite(self.config, images, batch.rows, found))
                features.append(found)
                kept += batch.rows
            self._progress(done + len(kept) + len(damaged), total)
        joined = torch.cat(features) if features else torch.empty(0, 0)
        return Chunk(joined, torch.tensor(kept, dtype=torch.int64), damaged)


def _load(store: FeatureStore) -> Features | None:
    """All chunks as one, or ``None`` if one is not there."""
    damaged: dict[int, str] = {}
    features_ND = torch.empty(0, 0)
    whole_N = torch.zeros(store.n_images, dtype=torch.bool)
    with ThreadPoolExecutor(_READERS) as pool:
        for chunk in pool.map(store.read, range(store.n_chunks)):
            if chunk is None:
                pool.shutdown(cancel_futures=True)
                return None
            damaged |= chunk.damaged
            if chunk.rows_M.numel():
                if not whole_N.any():
                    features_ND = chunk.features_MD.new_empty(store.n_images, chunk.features_MD.shape[1])
                features_ND[chunk.rows_M] = chunk.features_MD
                whole_N[chunk.rows_M] = True
    kept = features_ND[whole_N] if damaged and whole_N.any() else features_ND
    return Features(kept, whole_N.nonzero().squeeze(1), damaged, store.folder)


def _damaged(messages: list[str]) -> ImageError:
    shown = "; ".join(messages[:3]) + ("" if len(messages) <= 3 else f"; and {len(messages) - 3} more")
    return ImageError(f"{shown}. Repair or remove what is damaged, or set dataset.damaged=skip to leave it out.")


def _not_finite(config: BackboneConfig, images: Images, rows: list[int], features: Tensor) -> str:
    bad = [row for row, good in zip(rows, torch.isfinite(features).all(1).tolist(), strict=True) if not good]
    return (
        f"backbone.name={config.name} gives NaN or infinite features for {len(bad)} images (first: "
        f"{images.name(bad[0])}); try backbone.dtype=float32 (it is {config.dtype}), or other weights."
    )
