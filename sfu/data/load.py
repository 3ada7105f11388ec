"""Load a dataset by its configured name: feature rows as they are, or images divided into parts.

Loading never runs a network. :func:`extract_features` turns divided images into a :class:`FeatureData` afterwards.
Shapes: N images of all parts together.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sfu.data.datasets.base import Damaged, Dataset, FeatureDataset, ImageDataset
from sfu.data.examples import image_digests, row_digests
from sfu.data.feature_data import FeatureData, Groups, ImageRows, make_feature_data
from sfu.data.features.extract import Extractor
from sfu.data.images.decode import ImageError
from sfu.data.images.files import file_digests
from sfu.data.images.image_set import ImageSet
from sfu.data.raw_arrays import stratified_rows
from sfu.data.seal import require_open
from sfu.data.settings import NO_BACKBONE
from sfu.errors import ConfigError, DataError

if TYPE_CHECKING:
    from sfu.data.images.images import Images
    from sfu.data.settings import BackboneSettings

log = logging.getLogger(__name__)

_NAMED_IN_RECORD = 100  # damaged images


@dataclass(frozen=True)
class ImageParts:
    """The images of a dataset, divided into training, test and public images.

    Attributes:
        config: The ``dataset`` group.
        seed: Seed of the test part, where the dataset has none of its own.
        images: All images with their labels.
        train: Row numbers of the users' images, ascending.
        public: Row numbers of the training images that are public (``dataset.core_fraction``), ascending.
        n_classes: C.
    """

    config: ImageDataset
    seed: int
    images: ImageSet
    train: np.ndarray
    public: np.ndarray
    n_classes: int

    @property
    def train_labels_N(self) -> Tensor:
        """Labels of the users' images, int64."""
        return torch.from_numpy(self.images.labels_N[self.train])

    @property
    def groups(self) -> Groups | None:
        """Whose the users' images are, if the dataset says so."""
        return Groups.of(_some(self.images.groups_N, self.train))

    def public_images(self) -> tuple[Images, Tensor]:
        """The public images and their labels, int64."""
        return self.images.images.take(self.public.tolist()), torch.from_numpy(self.images.labels_N[self.public])

    def train_names(self) -> list[str]:
        """What the users' images are called (their paths, if they are files)."""
        return [self.images.images.name(row) for row in self.train.tolist()]

    def example(self) -> Tensor:
        """Return the pixels of the first of the users' images that can be decoded."""
        for row in self.train.tolist():
            try:
                return self.images.images.decode(row)
            except ImageError:
                continue
        raise DataError(f"None of the {len(self.train)} training images can be decoded.")


def load_dataset(config: FeatureDataset, seed: int) -> FeatureData:
    """Load and check a dataset of features; ``seed`` draws the test part where there is none.

    Raises:
        DataError: The data cannot be used.
        SourceFreeError: A source-free method is running.
    """
    require_open(f"The dataset '{config.name}'")
    return make_feature_data(
        config.name, *config.load(seed),
        n_classes=config.n_classes, normalize_rows=config.normalize_rows, source=config.source,
    )  # fmt: skip


def load_images(config: ImageDataset) -> ImageSet:
    """Load the images of a dataset, at most ``dataset.limit_per_class`` of each class and part."""
    return config.images().limited(config.limit_per_class)


def dataset_content(config: Dataset, backbone: BackboneSettings) -> dict[str, object]:
    """Return everything that decides the feature rows and labels of a dataset, as JSON.

    Files are read once, and their digests are cached. The key of their features stands for images.

    Raises:
        ConfigError: A setting cannot work.
        DataError: A file is missing.
    """
    if backbone.name == NO_BACKBONE:
        return {"files": file_contents(config.source_files())}
    assert isinstance(config, ImageDataset)
    images = load_images(config)
    parts = b"" if images.is_test_N is None else images.is_test_N.tobytes()
    return {
        "features": Extractor(backbone, torch.device("cpu")).store(images.images).key,
        "labels": hashlib.sha256(images.labels_N.tobytes() + parts).hexdigest(),
        "groups": None if images.groups_N is None else hashlib.sha256(images.groups_N.tobytes()).hexdigest(),
        "classes": list(images.class_names),
    }


def dataset_digests(config: Dataset, backbone: str, seed: int) -> list[bytes]:
    """Return the digests of all examples of a dataset, of every part, as they are read under this backbone.

    Raises:
        DataError: The data cannot be used.
    """
    if backbone != NO_BACKBONE:
        assert isinstance(config, ImageDataset)
        return [digest for one in image_digests(load_images(config).images) for digest in one]
    assert isinstance(config, FeatureDataset)
    arrays = config.load(seed)
    return [*row_digests(arrays.train_features), *row_digests(arrays.test_features)]


def file_contents(paths: list[Path]) -> list[str]:
    """Return the SHA-256 of each file, in hex; a missing file raises :class:`DataError`."""
    return [digest.hex() for digest in file_digests([str(path) for path in paths])]


def load_image_parts(config: ImageDataset, seed: int) -> ImageParts:
    """Load the images of a dataset and divide them into training, test and public images.

    Raises:
        ConfigError: ``dataset.n_classes`` is too small, or ``dataset.core_fraction`` leaves a class without public
            images or without users' images.
        DataError: The images cannot be found, downloaded or divided.
        SourceFreeError: A source-free method is running.
    """
    require_open(f"The dataset '{config.name}'")
    images = load_images(config)
    n_classes = len(images.class_names)
    if config.n_classes is not None and config.n_classes < n_classes:
        raise ConfigError(
            f"dataset.n_classes={config.n_classes} is too small: {config.source} has {n_classes} classes. "
            "Raise it, or leave it out."
        )
    train, _ = _divide(config, images.labels_N, images.is_test_N, seed)
    public = _public_rows(config, images.labels_N, train)
    return ImageParts(config, seed, images, np.setdiff1d(train, public), public, config.n_classes or n_classes)


def extract_features(parts: ImageParts, extractor: Extractor) -> FeatureData:
    """Turn divided images into features; public images are left out.

    Raises:
        DataError: An image cannot be decoded or does not fit the backbone.
        ArtifactError: The feature cache cannot be written.
    """
    config, images = parts.config, parts.images
    features = extractor.extract(
        images.images,
        fail_on_damage=config.damaged is Damaged.fail,
        shown={"dataset": config.name, "path": config.path},
    )
    damaged, decoded = features.damaged, features.rows_M.numpy()
    if damaged:
        log.warning("%d of %d images cannot be decoded and are left out", len(damaged), len(images.images))
    labels = images.labels_N[decoded]
    is_test = None if images.is_test_N is None else images.is_test_N[decoded]
    both = _divide(config, labels, is_test, parts.seed)  # without the damaged images, the test part is drawn anew
    train, test = (rows[~np.isin(decoded[rows], parts.public)] for rows in both)
    values = features.features_MD.numpy()
    data = make_feature_data(
        config.name, values[train], labels[train], values[test], labels[test],
        _some(images.groups_N, decoded[train]),
        n_classes=parts.n_classes, normalize_rows=config.normalize_rows, source=config.source,
    )  # fmt: skip
    about = {
        "n_images": len(images.images),
        "cache": str(features.folder),
        "n_damaged": len(damaged),
        "damaged": [what for _, what in sorted(damaged.items())][:_NAMED_IN_RECORD],
        "n_public": len(parts.public),
    }
    return replace(
        data,
        class_names=images.class_names,
        train_images=ImageRows(images.images, decoded[train]),
        about_images={**extractor.record, **about},
    )


def _some(groups_N: np.ndarray | None, rows: np.ndarray) -> np.ndarray | None:
    return None if groups_N is None else groups_N[rows]


def _public_rows(config: ImageDataset, labels_N: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Draw the public rows of the training part: ``dataset.core_fraction`` of every class, ascending.

    The draw depends on ``dataset.core_seed`` and on no other seed, so that the same images stay public.
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
                f"{count}. The core and the users need at least one each."
            )
        chosen.append(draw.permutation(members)[:count])
    return np.sort(np.concatenate(chosen))


def _divide(
    config: ImageDataset, labels: np.ndarray, is_test: np.ndarray | None, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers of the training and of the test part: as published, or drawn."""
    if is_test is not None:
        return np.flatnonzero(~is_test), np.flatnonzero(is_test)
    return stratified_rows(labels, config.test_fraction, seed, config.source)
