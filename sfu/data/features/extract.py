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

from sfu.data.backbones.backbone import Backbone, build_backbone
from sfu.data.backbones.memo import recall, remember
from sfu.data.features.filling import Filling, damage_error
from sfu.data.features.place import cache_root
from sfu.data.features.ranks import Ranks
from sfu.data.features.store import READERS, FeatureStore
from sfu.data.images.images import Images
from sfu.errors import ArtifactError, DataError

if TYPE_CHECKING:
    from sfu.settings import BackboneConfig

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
_MANY_FILES = 10_000


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
        backbone: Backbone | None = None,
    ) -> None:
        """Keep the settings; the backbone is built when it is first needed.

        Args:
            config: The group ``backbone``.
            device: Where to run it.
            progress: Called with (images done, images in all).
            say: Called with a sentence when long work begins or is waited for.
            ranks: This process among those that share the work; alone by default.
            backbone: A backbone that is built already, on ``device``; by default the one that ``config`` names.
        """
        self.config, self.device = config, device
        self.progress, self.say = progress or (lambda done, total: None), say or log.info
        self.ranks = ranks or Ranks()
        self._backbone, self._is_configured = backbone, backbone is None

    @property
    def backbone(self) -> Backbone:
        """The backbone, on the device."""
        if self._backbone is None:
            self._backbone = build_backbone(self.config).to(self.device)
        return self._backbone

    def require_remembered(self) -> None:
        """Make sure that the backbone as built is the one that was remembered.

        Raises:
            DataError: It is not: its weights changed behind an unchanged file.
        """
        if not self._is_configured:
            return
        record = self.backbone.record()
        known = recall(self.config)
        if known is not None and known != json.loads(json.dumps(record)):
            remember(self.config, record)
            raise DataError("the backbone is not what it was when it was last built (other weights?); run again.")

    @property
    def record(self) -> dict[str, object]:
        """What decides the backbone's features; from memory, if it was built before."""
        if not self._is_configured:
            return self.backbone.record()
        if self._backbone is None and (known := recall(self.config)) is not None:
            return known
        record = self.backbone.record()
        remember(self.config, record)
        return record

    def store(self, images: Images, folder: str = "") -> FeatureStore:
        """Where the features of ``images`` are kept: in the cache, or in a ``folder`` of it."""
        root = cache_root(self.config) / folder
        return FeatureStore(root, {**self.record, "images": images.fingerprint(self._reading)}, len(images))

    def _reading(self, n_files: int) -> None:
        if n_files >= _MANY_FILES:
            self.say(f"reading {n_files:,} image files once, to know them again")

    def extract(
        self,
        images: Images,
        *,
        fail_on_damage: bool = True,
        shown: Mapping[str, object] | None = None,
        folder: str = "",
    ) -> Features:
        """Features of ``images``, read if they are kept, else extracted and kept.

        Args:
            images: The images, in an order that stays.
            fail_on_damage: Stop at images that cannot be decoded; otherwise leave them out and list them.
            shown: What to tell people of the store (the dataset's name).
            folder: A folder of the cache to keep them in.

        Raises:
            DataError: An image cannot be decoded, or does not fit the backbone.
            ArtifactError: The cache cannot be written; what was extracted before is kept.
        """
        store = self.store(images, folder)
        found = _load(store)
        if found is None or not store.touch():
            self.fill(store, images, fail_on_damage=fail_on_damage, shown=shown or {})
            found = found or _load(store)
            if found is None:
                raise ArtifactError(f"{store.folder} was removed while it was written; run again.")
        if found.damaged and fail_on_damage:
            raise damage_error(found.damaged, store)
        if not found.rows_M.numel():
            first = next(iter(found.damaged.values()))
            raise DataError(f"none of the {len(images)} images can be decoded; the first: {first}.")
        return found

    def fill(
        self, store: FeatureStore, images: Images, *, fail_on_damage: bool, shown: Mapping[str, object]
    ) -> dict[int, str]:
        """Extract what is not there, without loading what is; see :meth:`Filling.run`."""
        return Filling(self, store, images, fail_on_damage, shown).run()


def _load(store: FeatureStore) -> Features | None:
    """All chunks as one, or ``None`` if one is not there."""
    damaged: dict[int, str] = {}
    features_ND = torch.empty(0, 0)
    whole_N = torch.zeros(store.n_images, dtype=torch.bool)
    with ThreadPoolExecutor(READERS) as pool:
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
