"""Augmented copies of images: their size stays, and the same image gives the same copy every time."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate

from sfu.data.augmentations import Augmentation, check_augmentations
from sfu.data.images.images import ArrayImages, AugmentedImages
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


def drawn(name: str) -> torch.Generator:
    """What decides the random copy of image 0."""
    return torch.Generator().manual_seed(zlib.crc32(f"{name} 0".encode()))


def test_what_the_augmentations_do():
    pixels = np.random.default_rng(5).integers(0, 256, size=(1, 16, 24, 3), dtype=np.uint8)
    images = ArrayImages(pixels, "x")
    whole = images.decode(0)
    changed = {name: AugmentedImages(images, name).decode(0) for name in Augmentation.names()}
    assert changed["flip"].equal(whole.flip(-1))

    where = drawn("crop")
    top, left = (int(torch.randint(size - round(0.875 * size) + 1, (), generator=where)) for size in (16, 24))
    window = whole[None, :, top : top + 14, left : left + 21].float()
    cropped = interpolate(window, (16, 24), mode="bilinear", antialias=True)[0].round().clamp(0, 255)
    torch.testing.assert_close(changed["crop"].float(), cropped, rtol=0, atol=1)

    factor = 0.7 + 0.6 * float(torch.rand((), generator=drawn("brightness")))
    bright = (whole * factor).clamp(0, 255).floor()
    torch.testing.assert_close(changed["brightness"].float(), bright, rtol=0, atol=1)

    centre = np.full((1, 31, 31, 1), 50, dtype=np.uint8)
    centre[0, 15, 15] = 250
    rotated = AugmentedImages(ArrayImages(centre, "x"), "rotate").decode(0)[0]
    assert int(rotated[15, 15]) == 250  # a rotation about the centre
    assert set(rotated[8:12, 8:12].flatten().tolist()) == {50}
    assert int(rotated.min()) >= 37  # the mean colour fills the corners; torchvision darkens their edge by a quarter


def test_unknown_and_repeated_augmentations_are_refused():
    with pytest.raises(ConfigError, match=r"curvature\.augment=spin is unknown\. Choose one of brightness, crop"):
        check_augmentations(["spin"], "curvature.augment")
    with pytest.raises(ConfigError, match="twice"):
        check_augmentations(["flip", "flip"], "curvature.augment")
