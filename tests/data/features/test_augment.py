"""Augmented copies of images: their size stays, and the same image gives the same copy every time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sfu.data.features.augment import Augmentation, AugmentedImages, check_augmentations
from sfu.data.images.images import ArrayImages
from sfu.errors import ConfigError


@pytest.mark.parametrize("name", Augmentation.names())
def test_augmentations_keep_the_size_and_are_the_same_every_time(name):
    images = ArrayImages(np.random.default_rng(3).integers(0, 256, size=(2, 9, 12, 3), dtype=np.uint8), "x")
    augmented = AugmentedImages(images, name)
    first = augmented.decode(1)
    assert first.shape == (3, 9, 12)
    assert first.dtype == torch.uint8
    assert first.equal(augmented.decode(1))
    assert not first.equal(images.decode(1))
    assert len(augmented.take([1])) == 1
    assert name in augmented.name(0)


def test_what_the_augmentations_do():
    ramp = np.tile(np.arange(16, dtype=np.uint8) * 10, (16, 1))[None, ..., None]
    images = ArrayImages(ramp, "x")
    whole = images.decode(0)
    assert AugmentedImages(images, "flip").decode(0).equal(whole.flip(-1))
    cropped = AugmentedImages(images, "crop").decode(0)[0, 8].int()
    assert int(cropped[-1] - cropped[0]) == pytest.approx(150 * 13 / 15, abs=12)  # 14 of 16 columns, stretched
    bright = AugmentedImages(images, "brightness").decode(0).float()
    assert float((bright / whole.clamp(min=1))[0, 0, 1:].std()) < 0.05


def test_unknown_and_repeated_augmentations_are_refused():
    with pytest.raises(ConfigError, match=r"curvature\.augment=spin is unknown\. Choose one of brightness, crop"):
        check_augmentations(["spin"], "curvature.augment")
    with pytest.raises(ConfigError, match="twice"):
        check_augmentations(["flip", "flip"], "curvature.augment")
