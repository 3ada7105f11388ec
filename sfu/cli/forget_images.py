"""Images to forget, from folders, as the inputs of a head; nothing of them is cached.

Shapes: F images, D features.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from sfu.cli.commands import compose_settings
from sfu.data.datasets.image_folder import class_folders, labelled
from sfu.data.images.files import Walk, endings
from sfu.data.images.images import FileImages
from sfu.errors import ConfigError, DataError
from sfu.progress import ProgressDisplay

if TYPE_CHECKING:
    from sfu.experiment.config import RunConfig
    from sfu.records.head_folder import Source

_GROUPS = ("backbone", "device")
_DEFAULT = "default"


class _Unknown(FileImages):
    """Images whose digests are not cached, because they are to be forgotten."""

    def fingerprint(self, reading: Callable[[int], None] | None = None) -> str:
        return secrets.token_hex()


def read_images(folders: Sequence[Path], backbone: Sequence[str], source: Source) -> dict[str, np.ndarray]:
    """Return ``features`` [F, D] and ``labels`` [F] of the images in folders, one folder below them for each class.

    A label is the name of its folder, or that number if the head does not know the names of its classes.

    Args:
        folders: The folders.
        backbone: Name of the backbone, and further settings of it.
        source: The head, and the checkpoint that has the backbone's weights, if there is one.

    Raises:
        ConfigError: A setting is unknown, or is none of the backbone.
        DataError: A folder holds no images, one cannot be decoded, or the weights do not fit the backbone.
    """
    from sfu.data.features.extract import Extractor
    from sfu.experiment.validate import resolve_device

    config = _config(backbone, source.model)
    paths, names = list[str](), list[str]()
    for folder in folders:
        found = class_folders(folder, walk := Walk(folder))
        left_out = list[str]()
        samples = labelled(folder, found, list(found), walk, left_out)
        if left_out:
            raise DataError(f"FORGET={folder} holds {endings(left_out)}, which are no images. Convert or remove them.")
        paths += [path for path, _ in samples]
        names += [list(found)[label] for _, label in samples]
    with TemporaryDirectory() as cache, ProgressDisplay() as display:
        config.backbone.cache = cache
        with display.stage("extracting features") as tick:
            extractor = Extractor(config.backbone, resolve_device(config.device), progress=tick, say=display.say)
            features_FD = extractor.extract(_Unknown(paths)).features_MD
    numbers = source.head.recipe.classes is None and all(name.isdecimal() for name in names)
    return {"features": features_FD.numpy(), "labels": np.array([int(name) for name in names] if numbers else names)}


def _config(backbone: Sequence[str], checkpoint: Path | None) -> RunConfig:
    name, *further = backbone
    for one in further:
        if one.partition("=")[0].partition(".")[0] not in _GROUPS or "=" not in one:
            raise ConfigError(
                f"--backbone {name} is followed by {one}, which is no setting of it. Give backbone.KEY=VALUE or "
                "device=VALUE, and put FORGET and other options before --backbone."
            )
    config = compose_settings([f"backbone={name}", *further])
    if checkpoint is not None and config.backbone.weights == _DEFAULT:
        config.backbone.weights = str(checkpoint)
    return config
