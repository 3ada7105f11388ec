"""The settings of group ``dataset`` that only some datasets take, and where public datasets lie."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from sfu.errors import ConfigError
from sfu.settings import DatasetConfig
from sfu.store import cache_dir

_SPECIAL = ("path", "root", "labels_csv", "clutter", "official_split")


def refuse_unused(config: DatasetConfig, *used: str) -> None:
    """Refuse a setting that was changed and would have no effect.

    Raises:
        ConfigError: One of the special settings is not in ``used`` and not at its default.
    """
    defaults = {field.name: field.default for field in fields(DatasetConfig)}
    for key in _SPECIAL:
        value = getattr(config, key)
        if key not in used and value != defaults[key]:
            hint = "; did you mean dataset=features or dataset=image_folder?" if key == "path" else "; leave it out."
            raise ConfigError(f"dataset.{key}={value} means nothing to dataset={config.name}{hint}")


def root_folder(config: DatasetConfig) -> Path:
    """``dataset.root``, or the datasets in sfu's cache folder.

    Raises:
        ConfigError: It is a file.
    """
    root = Path(config.root).expanduser() if config.root else cache_dir("datasets")
    if root.exists() and not root.is_dir():
        raise ConfigError(f"dataset.root={root} is no folder.")
    return root
