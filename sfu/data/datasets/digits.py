"""scikit-learn's embedded 8x8 digits: 1,797 real images, 64 pixels, 10 classes (Alpaydin & Kaynak, UCI 1998)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sfu.data.datasets.base import FeatureDataset, ImageDataset
from sfu.data.raw_arrays import RawArrays, stratified_test_split

if TYPE_CHECKING:
    from sfu.data.images.image_set import ImageSet


@dataclass
class Digits(FeatureDataset, ImageDataset, name="digits"):
    """Pixels scaled to 0..1 as feature rows, or greyscale images of 8 x 8 pixels with 0..16 scaled to 0..255."""

    def load(self, seed: int) -> RawArrays:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        features = (pixels / 16.0).astype("float32")
        return stratified_test_split(features, labels, self.test_fraction, seed, self.source)

    def images(self) -> ImageSet:
        import numpy as np
        from sklearn.datasets import load_digits

        from sfu.data.images.image_set import ImageSet
        from sfu.data.images.images import ArrayImages

        digits = load_digits()
        pixels_NHW = np.rint(digits.images * (255 / 16)).astype(np.uint8)
        names = tuple(str(digit) for digit in digits.target_names)
        return ImageSet(ArrayImages(pixels_NHW, self.source), digits.target.astype(np.int64), None, names)

    def source_files(self) -> list[Path]:
        package = find_spec("sklearn")  # importing it would take longer than a job whose results are cached
        assert package is not None
        assert package.origin is not None
        return [Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"]
