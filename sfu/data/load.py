"""Load a dataset by its configured name: feature rows as they are, images through a backbone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sfu.data.datasets.base import Dataset, FeatureDataset, ImageDataset
from sfu.data.feature_data import FeatureData, ImageRows, make_feature_data
from sfu.data.images.decode import ImageError
from sfu.data.images.image_set import ImageSet
from sfu.data.raw_arrays import stratified_rows
from sfu.data.seal import require_open
from sfu.errors import ConfigError, DataError

if TYPE_CHECKING:
    from sfu.data.features.extract import Extractor, Features

log = logging.getLogger(__name__)


LabelCheck = Callable[[Tensor, int, tuple[str, ...], list[str]], object]


def load_dataset(
    config: Dataset, seed: int, extractor: Extractor | None = None, check: LabelCheck | None = None
) -> FeatureData:
    """Load and check the dataset ``config.name``.

    Args:
        config: The ``dataset`` group.
        seed: Seed of the test split, where the dataset has no test part of its own.
        extractor: Turns images into features; ``None`` for a dataset of features.
        check: Called before images are turned into features, with the training labels, their number of classes, the
            class names and the images' names; may refuse what could not work afterwards.

    Raises:
        ConfigError: Unknown dataset, or one of images without a backbone.
        DataError: The data cannot be used.
        SourceFreeError: Called while a source-free method runs.
    """
    require_open(f"The dataset '{config.name}'")
    if extractor is not None:
        return _load_images(config, seed, load_images(config), extractor, check)
    assert isinstance(config, FeatureDataset)
    return make_feature_data(
        config.name,
        *config.load(seed),
        n_classes=config.n_classes,
        normalize_rows=config.normalize_rows,
        source=config.source,
    )


def load_images(config: Dataset) -> ImageSet:
    """The images of a dataset, before features are extracted, cut down to ``dataset.limit_per_class``.

    Raises:
        ConfigError: The dataset holds no images.
        DataError: They cannot be had.
    """
    assert isinstance(config, ImageDataset)
    return config.images().limited(config.limit_per_class)


def source_files(config: Dataset) -> list[Path]:
    return config.source_files()


def _load_images(
    config: Dataset, seed: int, images: ImageSet, extractor: Extractor, check: LabelCheck | None
) -> FeatureData:
    from sfu.data.datasets.base import Damaged

    n_classes = len(images.class_names)
    if config.n_classes is not None and config.n_classes < n_classes:
        raise ConfigError(f"dataset.n_classes={config.n_classes} but {config.source} has {n_classes} classes.")
    n_classes = config.n_classes or n_classes
    train, test = _parts(config, images, seed)
    public = public_rows(config, images.labels_N, train)
    train = np.setdiff1d(train, public)
    if check is not None:
        names = [images.images.name(row) for row in train.tolist()]
        check(torch.from_numpy(images.labels_N[train]), n_classes, images.class_names, names)
    extractor.prepare(
        images.images.take(public.tolist()), torch.from_numpy(images.labels_N[public]), n_classes,
        lambda: _first_image(images, train),
    )  # fmt: skip
    features = extractor.extract(
        images.images,
        fail_on_damage=config.damaged is Damaged.fail,
        shown={"dataset": config.name, "path": config.path},
    )
    if features.damaged:
        log.warning("%d of %d images cannot be decoded and are left out", len(features.damaged), len(images.images))
    kept = features.rows_M.numpy()
    whole = images.rows(kept) if features.damaged else images
    if features.damaged:
        train, test = _parts(config, whole, seed)
    train, test = (part[~np.isin(kept[part], public)] for part in (train, test))
    rows, labels = features.features_MD.numpy(), whole.labels_N
    data = make_feature_data(
        config.name, rows[train], labels[train], rows[test], labels[test],
        n_classes=n_classes, normalize_rows=config.normalize_rows, source=config.source,
    )  # fmt: skip
    return replace(
        data,
        class_names=images.class_names,
        train_images=ImageRows(images.images, kept[train]),
        about_images={**extractor.record, **_about(features, len(images.images)), "n_public": len(public)},
    )


def _first_image(images: ImageSet, rows: np.ndarray) -> Tensor:
    """The pixels of the first image that can be decoded.

    Raises:
        DataError: None can.
    """
    for row in rows.tolist():
        try:
            return images.images.decode(row)
        except ImageError:
            continue
    raise DataError(f"none of the {len(rows)} training images can be decoded.")


def public_rows(config: Dataset, labels_N: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Rows of the training part that are public (``dataset.core_fraction``, every class in proportion), ascending.

    Raises:
        ConfigError: A class would have no public image, or no user's.
    """
    fraction = config.core_fraction
    if fraction == 0:
        return train[:0]
    draw = np.random.default_rng(config.core_seed)
    chosen = []
    for label in np.unique(labels_N[train]):
        members = train[labels_N[train] == label]
        count = round(fraction * len(members))
        if not 0 < count < len(members):
            raise ConfigError(
                f"dataset.core_fraction={fraction:g} of the {len(members)} training images of class {label} are "
                f"{count}; the core and the users need at least one each."
            )
        chosen.append(draw.permutation(members)[:count])
    return np.sort(np.concatenate(chosen))


def _parts(config: Dataset, images: ImageSet, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the training and of the test part: as published, or drawn."""
    if images.is_test_N is not None:
        return np.flatnonzero(~images.is_test_N), np.flatnonzero(images.is_test_N)
    return stratified_rows(
        images.labels_N, test_fraction=getattr(config, "test_fraction", 0.0), seed=seed, source=config.source
    )


def _about(features: Features, n_images: int) -> dict[str, object]:
    return {
        "n_images": n_images,
        "cache": str(features.folder),
        "n_damaged": len(features.damaged),
        "damaged": [what for _, what in sorted(features.damaged.items())][:100],
    }
