"""Load a dataset by its configured name."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from sfu.data import datasets
from sfu.data.feature_data import FeatureData, make_feature_data
from sfu.data.seal import require_open
from sfu.discovery import module_names
from sfu.errors import ConfigError

if TYPE_CHECKING:
    from sfu.settings import DatasetConfig


def dataset_names() -> list[str]:
    """Names of the datasets sfu has, one for each file in ``sfu/data/datasets``."""
    return module_names(datasets.__name__)


def load_dataset(config: DatasetConfig, seed: int) -> FeatureData:
    """Load and check the dataset ``config.name``.

    Args:
        config: The ``dataset`` group.
        seed: Seed of the test split, where the dataset has no test part of its own.

    Raises:
        ConfigError: Unknown dataset.
        DataError: The data cannot be used.
        SourceFreeError: Called while a source-free method runs.
    """
    require_open(f"The dataset '{config.name}'")
    raw = _module(config).load(config, seed)
    return make_feature_data(
        config.name,
        *raw,
        n_classes=config.n_classes,
        normalize_rows=config.normalize_rows,
        source=f"dataset.path={config.path}" if config.path else f"dataset={config.name}",
    )


def source_files(config: DatasetConfig) -> list[Path]:
    """Files from which :func:`load_dataset` reads."""
    return _module(config).source_files(config)


def _module(config: DatasetConfig) -> ModuleType:
    if config.name not in dataset_names():
        raise ConfigError(f"dataset.name={config.name} is unknown; sfu has {', '.join(dataset_names())}.")
    return importlib.import_module(f"{datasets.__name__}.{config.name}")
