"""What a dataset holds, told from its files without loading it: the base of every key of a kept result."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sfu.data.backbones.backbone import NO_BACKBONE
from sfu.data.images.fingerprint import file_digests
from sfu.data.load import load_images

if TYPE_CHECKING:
    from sfu.settings import BackboneConfig, DatasetConfig


def dataset_content(config: DatasetConfig, backbone: BackboneConfig) -> dict[str, object]:
    """Everything that decides the feature rows and labels of a dataset, as JSON.

    Files are read once and their digests remembered; images are told by what their features are kept under.

    Raises:
        ConfigError: A setting cannot work.
        DataError: A file is missing.
    """
    if backbone.name == NO_BACKBONE:
        return {"files": file_contents(config.source_files())}
    from sfu.data.features.extract import Extractor

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
    """SHA-256 of each file, in hex.

    Raises:
        DataError: A file is missing.
    """
    return [digest.hex() for digest in file_digests([str(path) for path in paths])]
