"""Extract features chunk by chunk, alone or as one of several ranks, and read them from the cache ever after.

Shapes: M images of a chunk that can be decoded, D features.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfu.data.backbones.backbone import Backbone, build_backbone
from sfu.data.backbones.memo import recall, remember
from sfu.data.examples import image_digests
from sfu.data.features.ranks import Ranks
from sfu.data.features.store import CHUNK_ROWS, READERS, Features, FeatureStore, cache_root
from sfu.data.features.thread_pools import DecodedBatch, ThreadPools, thread_pools
from sfu.data.images.decode import ImageError
from sfu.data.images.images import Images
from sfu.errors import ArtifactError, DataError
from sfu.files import write_text

if TYPE_CHECKING:
    from sfu.data.settings import BackboneSettings

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
_MANY_FILES = 10_000


class Extractor:
    """Turns images into features with one backbone, through the cache."""

    def __init__(
        self,
        config: BackboneSettings,
        device: torch.device,
        *,
        progress: Progress | None = None,
        say: Callable[[str], None] | None = None,
        ranks: Ranks | None = None,
        backbone: Backbone | None = None,
        chunk_rows: int = CHUNK_ROWS,
    ) -> None:
        """Keep the settings; the backbone is built when it is first needed.

        Args:
            config: The group ``backbone``.
            device: Where to run it.
            progress: Called with (images done, images in all).
            say: Called with a sentence when long work begins, or when another run is waited for.
            ranks: This process among those that share the work; alone by default.
            backbone: A backbone that is built already, on ``device``; by default the one that ``config`` names.
            chunk_rows: Images in a chunk of the cache.
        """
        self.config, self.device = config, device
        self.progress, self.say = progress or (lambda done, total: None), say or log.info
        self.ranks, self._chunk_rows = ranks or Ranks(), chunk_rows
        self._backbone, self._is_configured = backbone, backbone is None

    @property
    def backbone(self) -> Backbone:
        """The backbone, on the device."""
        if self._backbone is None:
            self._backbone = build_backbone(self.config).to(self.device)
        return self._backbone

    @property
    def record(self) -> dict[str, object]:
        """What decides the backbone's features; remembered if it was built before."""
        if self._backbone is None and (known := recall(self.config)) is not None:
            return known
        record = self.backbone.record()
        if self._is_configured:
            remember(self.config, record)
        return record

    def _require_remembered(self) -> None:
        """Refuse a backbone whose weights changed behind an unchanged file, so that its record is another's."""
        record, known = self.backbone.record(), recall(self.config) if self._is_configured else None
        if known is not None and known != json.loads(json.dumps(record)):
            remember(self.config, record)
            raise DataError(
                f"backbone.name={self.config.name} is not the network it was when it was last built; its weights have "
                "changed. Run again to use it as it is now."
            )

    def store(self, images: Images, folder: str = "") -> FeatureStore:
        """Return where the features of ``images`` are cached: in the cache folder, or in a ``folder`` below it."""

        def reading(n_files: int) -> None:
            if n_files >= _MANY_FILES:
                self.say(f"reading {n_files:,} image files once to compute their digests")

        record = {**self.record, "images": images.fingerprint(reading)}
        return FeatureStore(cache_root(self.config) / folder, record, len(images), self._chunk_rows)

    def extract(
        self,
        images: Images,
        *,
        fail_on_damage: bool = True,
        shown: Mapping[str, object] | None = None,
        folder: str = "",
    ) -> Features:
        """Return the features of ``images``, from the cache as far as they are there.

        Args:
            images: The images, in an order that stays.
            fail_on_damage: Stop at images that cannot be decoded; otherwise leave them out and list them.
            shown: What ``sfu-features ls`` shows of the cached entry, such as the dataset's name.
            folder: A folder below the cache folder.

        Raises:
            DataError: An image cannot be decoded, or does not fit the backbone.
            ArtifactError: The cache cannot be written; chunks that were finished stay.
        """
        store = self.store(images, folder)
        found = store.load()
        if found is None or not store.touch():
            self.fill(store, images, fail_on_damage=fail_on_damage, shown=shown or {})
            found = found or store.load()
            if found is None:
                raise ArtifactError(f"{store.folder} was removed while the features were extracted. Run again.")
        if found.damaged and fail_on_damage:
            raise _damage_error(found.damaged, store)
        if not found.rows_M.numel():
            first = next(iter(found.damaged.values()))
            raise DataError(f"none of the {len(images)} images can be decoded. The first one: {first}.")
        return found

    def fill(
        self, store: FeatureStore, images: Images, *, fail_on_damage: bool, shown: Mapping[str, object]
    ) -> dict[int, str]:
        """Extract the chunks that are missing; memory holds one chunk and a few batches, however many images.

        Returns:
            What is wrong with the images of this rank's share that cannot be decoded.

        Raises:
            DataError: An image cannot be decoded or does not fit the backbone, or the ranks do not agree.
            ArtifactError: The cache cannot be written, or the ranks do not share it.
        """
        ranks = self.ranks
        if len(set(ranks.gathered(store.key))) > 1:
            raise DataError("the processes see different images, weights or settings. Start all of them alike.")
        waiting = "waiting for another run that extracts the same features"
        with store.locked(lambda: self.say(waiting)) if ranks.rank == 0 else nullcontext():
            if ranks.rank == 0:
                examples = [digest for one in image_digests(images) for digest in one]
                store.begin({**shown, "device": str(self.device)}, examples)
            ranks.barrier()
            damaged = self._fill_share(store, images, fail_on_damage)
            ranks.barrier()
        missing = [index for index in range(store.n_chunks) if not store.has(index)]
        if missing and ranks.rank == 0:
            raise ArtifactError(
                f"{len(missing)} of {store.n_chunks} chunks are missing in {store.folder}. All processes must share "
                "that folder: set backbone.cache to one that they do."
            )
        return damaged

    def _fill_share(self, store: FeatureStore, images: Images, fail_on_damage: bool) -> dict[int, str]:
        share = range(self.ranks.rank, store.n_chunks, self.ranks.size)
        with ThreadPoolExecutor(READERS) as pool:
            found = dict(zip(share, pool.map(store.damaged, share), strict=True))
        missing = [index for index, damaged in found.items() if damaged is None]
        damaged = {row: what for some in found.values() if some for row, what in some.items()}
        if damaged and fail_on_damage:
            raise _damage_error(damaged, store)
        if missing:
            n_cached = sum(len(store.rows(index)) for index in share if index not in missing)
            damaged |= self._extract_chunks(store, images, missing, n_cached, fail_on_damage)
        return damaged

    def _extract_chunks(
        self, store: FeatureStore, images: Images, missing: list[int], done: int, fail_on_damage: bool
    ) -> dict[int, str]:
        self._require_remembered()
        total = done + sum(len(store.rows(index)) for index in missing)
        self.say(
            f"extracting features of {len(images):,} images with {self.config.name} on {self.device}"
            + (f" ({done:,} are cached)" if done else "")
        )
        damaged: dict[int, str] = {}
        with thread_pools(self.device, self.config.workers) as pools:
            for index in missing:
                chunk = self._extract_chunk(pools, images, store.rows(index), done, total)
                damaged |= chunk.damaged
                if damaged and fail_on_damage:
                    rest = [row for other in missing if other > index for row in store.rows(other)]
                    raise _damage_error(damaged | pools.find_damage(images, rest), store)
                if index == missing[0] and chunk.rows_M.numel():
                    store.require_space(chunk.features_MD[0].nbytes, total - done)
                store.write(index, chunk)
                done += len(store.rows(index))
        return damaged

    def _extract_chunk(self, pools: ThreadPools, images: Images, rows: range, done: int, total: int) -> Features:
        size = self.config.batch_size
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        features: list[Tensor] = []
        decoded: list[int] = []
        damaged: dict[int, str] = {}
        for batch, found in pools.batches.map(lambda some: self._extract_batch(pools, images, some), batches):
            damaged |= batch.damaged
            decoded += batch.rows
            features += found
            self.progress(done + len(decoded) + len(damaged), total)
        features_MD = torch.cat(features) if features else torch.empty(0, 0)
        return Features(features_MD, torch.tensor(decoded, dtype=torch.int64), damaged)

    def _extract_batch(self, pools: ThreadPools, images: Images, rows: range) -> tuple[DecodedBatch, list[Tensor]]:
        batch = pools.decode(images, rows, self.backbone.transform)
        if not batch.rows:
            return batch, []
        features_MD = self.backbone.features(batch.pixels).cpu()
        finite_M = torch.isfinite(features_MD).all(1).tolist()
        bad = [row for row, finite in zip(batch.rows, finite_M, strict=True) if not finite]
        if bad:
            raise DataError(
                f"backbone.name={self.config.name} gives NaN or infinite features for {len(bad)} images (first: "
                f"{images.name(bad[0])}). Try backbone.dtype=float32 (it is {self.config.dtype}), or other weights."
            )
        return batch, [features_MD]


def _damage_error(damaged: Mapping[int, str], store: FeatureStore) -> ImageError:
    messages = [what for _, what in sorted(damaged.items())]
    path = store.folder / "damaged.txt"
    write_text(path, "\n".join(messages) + "\n")
    more = f"; and {len(messages) - 3} more, listed in {path}" if len(messages) > 3 else ""
    return ImageError(
        f"{len(messages)} of {store.n_images} images cannot be decoded: {'; '.join(messages[:3])}{more}. Repair or "
        "remove them, after which the features are extracted anew, or set dataset.damaged=skip to leave them out."
    )
