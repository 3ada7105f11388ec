"""Digests of what a dataset holds, taken without loading it; the keys of all cached results build on them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sfu.data.datasets.base import Dataset, ImageDataset
from sfu.data.features.extract import Extractor
from sfu.data.images.files import file_digests
from sfu.data.load import load_images
from sfu.data.settings import NO_BACKBONE

if TYPE_CHECKING:
    from sfu.data.settings import BackboneSettings


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
    labels = hashlib.sha256(images.labels_N.tobytes())
    if images.is_test_N is not None:
        labels.update(images.is_test_N.tobytes())
    return {
        "features": Extractor(backbone, torch.device("cpu")).store(images.images).key,
        "labels": labels.hexdigest(),
        "classes": list(images.class_names),
    }


def file_contents(paths: list[Path]) -> list[str]:
    """Return the SHA-256 of each file, in hex.

    Raises:
        DataError: A file is missing.
    """
    return [digest.hex() for digest in file_digests([str(path) for path in paths])]
