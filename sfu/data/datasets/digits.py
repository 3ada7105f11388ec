"""scikit-learn's embedded 8x8 digits: 1,797 real images, 64 pixels, 10 classes (Alpaydin & Kaynak, UCI 1998)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sfu.data.raw_arrays import RawArrays, stratified_test_split
from sfu.errors import ConfigError

if TYPE_CHECKING:
    from sfu.settings import DatasetConfig


def load(config: DatasetConfig, seed: int) -> RawArrays:
    """Pixels scaled to 0..1, with a seeded stratified test part of ``dataset.test_fraction``."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    features = (pixels / 16.0).astype("float32")
    return stratified_test_split(
        features, labels, test_fraction=config.test_fraction, seed=seed, source="dataset=digits"
    )


def source_files(config: DatasetConfig) -> list[Path]:
    """The file inside scikit-learn that holds the digits.

    Raises:
        ConfigError: A ``dataset.path`` was given, which digits would ignore.
    """
    if config.path is not None:
        raise ConfigError(f"dataset.path={config.path} means nothing to dataset=digits; did you mean dataset=features?")
    import sklearn.datasets

    return [Path(sklearn.datasets.__file__).parent / "data" / "digits.csv.gz"]
