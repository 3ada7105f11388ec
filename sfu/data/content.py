"""Digests of what a dataset holds, taken without loading it; the keys of all cached results build on them."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sfu.data.backbones.backbone import NO_BACKBONE
from sfu.data.features.extract import Extractor
from sfu.data.images.files import file_digests
from sfu.data.load import load_images, source_files

if TYPE_CHECKING:
    from sfu.settings import BackboneConfig, DatasetConfig

_PLACES = ("path", "root", "download", "labels_csv")
"""Settings that say where a dataset is, not what is in it."""


def dataset_content(config: DatasetConfig, backbone: BackboneConfig) -> dict[str, object]:
    """Return everything that decides the feature rows and labels of a dataset, as JSON.

    Files are read once, and their digests are cached. The key of their features stands for images.

    Raises:
        ConfigError: A setting cannot work.
        DataError: A file is missing.
    """
    settings = {key: value for key, value in asdict(config).items() if key not in _PLACES}
    settings["damaged"] = config.damaged.value
    if backbone.name == NO_BACKBONE:
        return {"settings": settings, "files": file_contents(source_files(config))}
    images = load_images(config)
    labels = hashlib.sha256(images.labels_N.tobytes())
    if images.is_test_N is not None:
        labels.update(images.is_test_N.tobytes())
    return {
        "settings": settings,
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
