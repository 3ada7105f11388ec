"""scikit-learn's embedded 8x8 digits: 1,797 real images, 64 pixels, 10 classes (Alpaydin & Kaynak, UCI 1998)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sfu.data.dataset_settings import refuse_unused
from sfu.data.raw_arrays import RawArrays, stratified_test_split

if TYPE_CHECKING:
    from sfu.data.images.image_set import ImageSet
    from sfu.settings import DatasetConfig


def load(config: DatasetConfig, seed: int) -> RawArrays:
    """Pixels scaled to 0..1, with a seeded stratified test part of ``dataset.test_fraction``."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    features = (pixels / 16.0).astype("float32")
    return stratified_test_split(
        features, labels, test_fraction=config.test_fraction, seed=seed, source="dataset=digits"
    )


def images(config: DatasetConfig) -> ImageSet:
    """The same digits as greyscale images of 8 x 8 pixels: 0..16 becomes 0..255. The test part is yet to be drawn."""
    import numpy as np
    from sklearn.datasets import load_digits

    from sfu.data.images.image_set import ImageSet
    from sfu.data.images.images import ArrayImages

    digits = load_digits()
    pixels_NHW = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    names = tuple(str(digit) for digit in digits.target_names)
    return ImageSet(ArrayImages(pixels_NHW, "dataset=digits"), digits.target.astype(np.int64), None, names)


def source_files(config: DatasetConfig) -> list[Path]:
    """The file inside scikit-learn that holds the digits.

    Raises:
        ConfigError: A ``dataset.path`` or the like was given, which digits would ignore.
    """
    refuse_unused(config)
    package = find_spec("sklearn")  # imported, it would take longer than a job whose results are kept
    assert package is not None
    assert package.origin is not None
    return [Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"]
