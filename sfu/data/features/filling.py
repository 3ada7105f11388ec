"""Fill a store: extract the chunks that are not there, one after the other, alone or as one of several ranks.

Shapes: M images of a chunk that can be decoded, D features.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfu.data.features.decoding import Batch, decode_batch, find_damage
from sfu.data.features.store import READERS, Chunk, FeatureStore
from sfu.data.features.thread_pools import ThreadPools, thread_pools
from sfu.data.images.decode import ImageError
from sfu.data.images.images import Images
from sfu.errors import ArtifactError, DataError

if TYPE_CHECKING:
    from sfu.data.features.extract import Extractor


@dataclass
class Filling:
    """One extraction under way.

    Attributes:
        extractor: Backbone, settings, progress and ranks.
        store: What to fill.
        images: All images.
        fail_on_damage: Stop at images that cannot be decoded.
        shown: What to tell people of the store.
    """

    extractor: Extractor
    store: FeatureStore
    images: Images
    fail_on_damage: bool
    shown: Mapping[str, object]

    def run(self) -> dict[int, str]:
        """Extract what is missing; memory is bounded by one chunk and a few batches, not by N.

        Returns:
            What is wrong with the images that cannot be decoded, of this rank's share.

        Raises:
            DataError: An image cannot be decoded or does not fit the backbone, or the ranks do not agree.
            ArtifactError: The cache cannot be written, or is not one for all ranks.
        """
        ranks = self.extractor.ranks
        if len(set(ranks.gathered(self.store.key))) > 1:
            raise DataError("the processes see different images, weights or settings; start all of them alike.")
        if ranks.rank != 0:
            ranks.barrier()
            damaged = self._run_locked()
            ranks.barrier()
            return damaged
        with self.store.locked(lambda: self.extractor.say("waiting for another run that extracts the same features")):
            self.store.tidy()
            ranks.barrier()
            damaged = self._run_locked()
            ranks.barrier()
        lacking = [index for index in range(self.store.n_chunks) if not self.store.path(index).is_file()]
        if lacking:
            raise ArtifactError(
                f"{len(lacking)} of {self.store.n_chunks} chunks are not in {self.store.folder}; all processes must "
                "share that folder (backbone.cache)."
            )
        return damaged

    def _run_locked(self) -> dict[int, str]:
        store, ranks = self.store, self.extractor.ranks
        if ranks.rank == 0:
            store.write_about({**self.shown, "device": str(self.extractor.device), "chunks": store.n_chunks})
        mine = range(ranks.rank, store.n_chunks, ranks.size)
        damaged: dict[int, str] = {}
        missing = []
        with ThreadPoolExecutor(READERS) as pool:
            for index, found in zip(mine, pool.map(self._damage_of, mine), strict=True):
                if found is None:
                    missing.append(index)
                else:
                    damaged |= found
        if damaged and self.fail_on_damage:
            raise damage_error(damaged, self.store)
        if missing:
            damaged |= self._extract_chunks(missing, sum(len(store.rows(index)) for index in mine))
        return damaged

    def _damage_of(self, index: int) -> dict[int, str] | None:
        chunk = self.store.read(index)
        return None if chunk is None else chunk.damaged

    def _extract_chunks(self, missing: list[int], total: int) -> dict[int, str]:
        self.extractor.require_remembered()
        done = total - sum(len(self.store.rows(index)) for index in missing)
        self.extractor.say(
            f"extracting features of {len(self.images):,} images with {self.extractor.config.name} on "
            f"{self.extractor.device}" + (f" ({done:,} are there)" if done else "")
        )
        damaged: dict[int, str] = {}
        with thread_pools(self.extractor.device, self.extractor.config.workers) as pools:
            for index in missing:
                chunk = self._extract_chunk(pools, index, done, total)
                damaged |= chunk.damaged
                if damaged and self.fail_on_damage:
                    todo = [row for other in missing if other > index for row in self.store.rows(other)]
                    raise damage_error(damaged | find_damage(self.images, todo, pools.decoders), self.store)
                if index == missing[0] and chunk.rows_M.numel():
                    self.store.require_space(chunk.features_MD[0].nbytes, total - done)
                self.store.write(index, chunk)
                done += len(self.store.rows(index))
        return damaged

    def _extract_chunk(self, pools: ThreadPools, index: int, done: int, total: int) -> Chunk:
        rows, size = self.store.rows(index), self.extractor.config.batch_size
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        features: list[Tensor] = []
        kept: list[int] = []
        damaged: dict[int, str] = {}
        for batch, found in pools.batches.map(lambda numbers: self._extract_batch(pools, numbers), batches):
            damaged |= batch.damaged
            kept += batch.rows
            if found is not None:
                features.append(found)
            self.extractor.progress(done + len(kept) + len(damaged), total)
        joined = torch.cat(features) if features else torch.empty(0, 0)
        return Chunk(joined, torch.tensor(kept, dtype=torch.int64), damaged)

    def _extract_batch(self, pools: ThreadPools, numbers: range) -> tuple[Batch, Tensor | None]:
        backbone = self.extractor.backbone
        batch = decode_batch(self.images, numbers, backbone.transform, pools.decoders, pools.workers)
        if not batch.rows:
            return batch, None
        found = backbone.features(batch.pixels).cpu()
        self._require_finite(batch.rows, found)
        return batch, found

    def _require_finite(self, rows: list[int], features_MD: Tensor) -> None:
        finite_M = torch.isfinite(features_MD).all(1).tolist()
        bad = [row for row, finite in zip(rows, finite_M, strict=True) if not finite]
        if bad:
            config = self.extractor.config
            raise DataError(
                f"backbone.name={config.name} gives NaN or infinite features for {len(bad)} images (first: "
                f"{self.images.name(bad[0])}); try backbone.dtype=float32 (it is {config.dtype}), or other weights."
            )


def damage_error(damaged: Mapping[int, str], store: FeatureStore) -> ImageError:
    """What to say of images that cannot be decoded; all of them are listed in the store's ``damaged.txt``."""
    messages = [what for _, what in sorted(damaged.items())]
    place = store.write_damaged(messages)
    shown = "; ".join(messages[:3])
    more = f"; and {len(messages) - 3} more, listed in {place}" if len(messages) > 3 else ""
    return ImageError(
        f"{len(messages)} of {store.n_images} images cannot be decoded: {shown}{more}. Repair or remove them (then "
        "features are extracted anew), or set dataset.damaged=skip to go on from here without them."
    )
