"""Augmented copies of images: their size stays, and the same image gives the same copy every time."""

from __future__ import annotations

import zlib
from itertools import combinations

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate, pad

from sfu.data.augmentations import Augmentation, check_augmentations, numbered
from sfu.data.images.images import ArrayImages, AugmentedImages, FileImages
from sfu.errors import ConfigError, DataError


@pytest.mark.parametrize("name", Augmentation.names())
def test_augmentations_keep_the_size_and_are_the_same_every_time(name):
    images = ArrayImages(np.random.default_rng(3).integers(0, 256, size=(2, 9, 12, 3), dtype=np.uint8), "x")
    augmented = AugmentedImages(images, name)
    first = augmented.decode(1)
    assert first.shape == (3, 9, 12)
    assert first.dtype == torch.uint8
    assert first.equal(augmented.decode(1))
    assert not first.equal(images.decode(1))
    assert len(augmented.take([1, 0])) == 2
    assert name in augmented.name(0)


def drawn(name: str) -> torch.Generator:
    """What decides the random copy of image 0."""
    return torch.Generator().manual_seed(zlib.crc32(f"{name} 0".encode()))


def test_what_the_augmentations_do():
    pixels = np.random.default_rng(5).integers(0, 256, size=(1, 16, 24, 3), dtype=np.uint8)
    images = ArrayImages(pixels, "x")
    whole = images.decode(0)
    changed = {name: AugmentedImages(images, name).decode(0) for name in ("flip", "crop", "brightness")}
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


def test_what_else_the_augmentations_do():
    pixels = np.random.default_rng(5).integers(0, 256, size=(2, 16, 24, 3), dtype=np.uint8)
    images = ArrayImages(pixels, "x")
    whole, other = images.decode(0), images.decode(1)
    changed = {name: AugmentedImages(images, name).decode(0) for name in Augmentation.names()}

    where = drawn("pad_crop")
    down, right = (int(torch.randint(-reach, reach + 1, (), generator=where)) for reach in (2, 3))
    padded = pad(whole[None].float(), (3, 3, 2, 2), mode="reflect")[0]
    assert changed["pad_crop"].float().equal(padded[:, 2 + down : 18 + down, 3 + right : 27 + right])
    assert (down, right) != (0, 0)

    where = drawn("mixup")
    share = 0.2 + 0.3 * float(torch.rand((), generator=where))
    wanted = ((1 - share) * whole.float() + share * other.float()).round()
    torch.testing.assert_close(changed["mixup"].float(), wanted, rtol=0, atol=1)

    from_other = (changed["cutmix"] != whole).any(0)
    rows, columns = from_other.any(1).nonzero()[:, 0], from_other.any(0).nonzero()[:, 0]
    box = (slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1))
    assert changed["cutmix"][:, *box].equal(other[:, *box])
    assert from_other.sum() == from_other[box].numel()  # one box, and all of it
    assert 0.15 < from_other.double().mean() < 0.55

    where = drawn("zoom")
    side = 0.6 + 0.4 * float(torch.rand((), generator=where))
    height, width = round(side * 16), round(side * 24)
    top, left = (int(torch.randint(size + 1, (), generator=where)) for size in (16 - height, 24 - width))
    window = whole[None, :, top : top + height, left : left + width].float()
    zoomed = interpolate(window, (16, 24), mode="bilinear", antialias=True)[0].round().clamp(0, 255)
    torch.testing.assert_close(changed["zoom"].float(), zoomed, rtol=0, atol=1)

    grey = np.full((1, 8, 8, 1), 100, dtype=np.uint8)
    factor = 1 + 0.4 * (2 * float(torch.rand((), generator=drawn("color_jitter"))) - 1)
    jittered = AugmentedImages(ArrayImages(grey, "x"), "color_jitter").decode(0)
    assert set(jittered.flatten().tolist()) == {int(100 * factor)}  # no contrast to change, and no saturation


def test_every_draw_is_another_copy_with_a_key_of_its_own():
    images = ArrayImages(np.random.default_rng(3).integers(0, 256, size=(5, 9, 12, 3), dtype=np.uint8), "x")
    for name in ("crop", "mixup", "pad_crop"):
        draws = [AugmentedImages(images, *view) for view in numbered([name, "flip", name, name]) if view[0] == name]
        assert [draw.title for draw in draws] == [name, f"{name} 2", f"{name} 3"]
        assert len({draw.fingerprint() for draw in draws}) == 3
        copies = [torch.stack([draw.decode(index) for index in range(5)]) for draw in draws]
        assert not any(one.equal(another) for one, another in combinations(copies, 2))
        again = AugmentedImages(images, name, 2)
        assert again.decode(4).equal(copies[1][4])
        assert again.take([0, 1, 2, 3, 4]).decode(4).equal(copies[1][4])
    assert AugmentedImages(images, "flip").partner(2) == 2


def test_an_image_is_mixed_with_every_other_one_and_never_with_itself():
    images = ArrayImages(np.zeros((4, 2, 2, 1), dtype=np.uint8), "x")
    partners = {
        (index, AugmentedImages(images, "mixup", draw).partner(index)) for index in range(4) for draw in range(1, 60)
    }
    assert partners == {(index, other) for index in range(4) for other in range(4) if index != other}


def test_images_of_different_sizes_are_mixed(tmp_path):
    for name, size in (("a", (8, 6)), ("b", (5, 9))):
        Image.new("RGB", size, {"a": "red", "b": "blue"}[name]).save(tmp_path / f"{name}.png")
    images = FileImages([tmp_path / "a.png", tmp_path / "b.png"])
    mixed = [AugmentedImages(images, "cutmix").decode(index) for index in range(2)]
    assert [list(one.shape) for one in mixed] == [[3, 6, 8], [3, 9, 5]]
    assert all({tuple(pixel) for pixel in one.flatten(1).T.tolist()} == {(255, 0, 0), (0, 0, 255)} for one in mixed)


def test_a_single_image_cannot_be_mixed():
    with pytest.raises(DataError, match=r"curvature\.augment=cutmix mixes .* only one\. Leave cutmix out"):
        AugmentedImages(ArrayImages(np.zeros((1, 2, 2, 1), dtype=np.uint8), "x"), "cutmix")


def test_unknown_augmentations_and_copies_that_would_not_differ_are_refused():
    with pytest.raises(
        ConfigError, match=r"curvature\.augment=spin is unknown\. Choose one of brightness, color_jitter"
    ):
        check_augmentations(["spin"], "curvature.augment")
    with pytest.raises(ConfigError, match="names flip twice, but it always gives the same copy"):
        check_augmentations(["flip", "crop", "flip"], "curvature.augment")
    check_augmentations(["flip", "crop", "crop"], "curvature.augment")
