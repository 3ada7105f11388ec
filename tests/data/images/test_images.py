"""Sequences of images: parts from which no other image can be reached, digests by content, limits per class."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sfu.data.images.files import file_digests
from sfu.data.images.image_set import ImageSet
from sfu.data.images.images import ArrayImages, FileImages
from sfu.errors import DataError


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, size=(6, 4, 5, 3), dtype=np.uint8)


@pytest.fixture
def files(tmp_path: Path, pixels: np.ndarray) -> list[Path]:
    paths = [tmp_path / f"{index}.png" for index in range(len(pixels))]
    for path, image in zip(paths, pixels, strict=True):
        Image.fromarray(image).save(path)
    return paths


def test_files_and_arrays_give_the_same_pixels(pixels, files):
    for index in range(len(pixels)):
        assert ArrayImages(pixels, "x").decode(index).equal(FileImages(files).decode(index))


def test_some_of_the_images_lead_to_no_other(pixels, files):
    some = ArrayImages(pixels, "x").take(torch.tensor([4, 1]))
    assert len(some) == 2
    np.testing.assert_array_equal(some.pixels_NHWK, pixels[[4, 1]])
    assert some.pixels_NHWK.base is None
    assert FileImages(files).take([4, 1]).paths == [files[4], files[1]]


@pytest.mark.parametrize(("shape", "dtype"), [((2, 3, 3, 4), np.uint8), ((2, 3, 3), np.float32), ((3,), np.uint8)])
def test_arrays_of_other_kinds_are_refused(shape, dtype):
    bad = np.zeros(shape, dtype)
    with pytest.raises(DataError, match="images must be uint8"):
        ArrayImages(bad, "x")


def test_a_fingerprint_follows_content_and_order_not_names(tmp_path, files):
    whole = FileImages(files).fingerprint()
    copies = [tmp_path / f"copy-{path.name}" for path in files]
    for path, copy in zip(files, copies, strict=True):
        copy.write_bytes(path.read_bytes())
    assert FileImages(copies).fingerprint() == whole
    assert FileImages(files[::-1]).fingerprint() != whole
    assert FileImages(files[:-1]).fingerprint() != whole
    assert FileImages(files, channels=1).fingerprint() != whole
    files[3].write_bytes(files[2].read_bytes())
    assert FileImages(files).fingerprint() != whole


def test_digests_are_cached_until_a_file_changes(files):
    read: list[int] = []

    def digests() -> list[bytes]:
        return file_digests([str(path) for path in files], read.append, settled_seconds=-60.0)

    first = digests()
    assert digests() == first
    assert read == [len(files)]
    status = files[0].stat()
    data = bytearray(files[0].read_bytes())
    data[-1] ^= 1
    files[0].write_bytes(data)
    os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns))  # as if nothing had happened
    assert digests() != first
    assert read == [len(files)] * 2


def test_files_that_changed_a_moment_ago_are_read_every_time(tmp_path, files):
    FileImages(files).fingerprint()
    assert not (tmp_path / "sfu-cache" / "fingerprints").exists()
    told: list[int] = []
    FileImages(files).fingerprint(told.append)
    assert told == [len(files)]


def test_damaged_digests_are_made_again(tmp_path, files):
    paths = [str(path) for path in files]
    first = file_digests(paths, settled_seconds=-60.0)
    (cached,) = (tmp_path / "sfu-cache" / "fingerprints").glob("*/digests.bin")
    body = bytearray(cached.read_bytes())
    body[40] ^= 1
    cached.write_bytes(body)
    assert file_digests(paths, settled_seconds=-60.0) == first
    assert cached.read_bytes() != bytes(body)


def test_without_a_cache_fingerprints_are_still_made(monkeypatch, tmp_path, files):
    (tmp_path / "file").write_text("")
    paths = [str(path) for path in files]
    first = file_digests(paths, settled_seconds=-60.0)
    monkeypatch.setenv("SFU_CACHE", str(tmp_path / "file" / "below"))
    assert file_digests(paths, settled_seconds=-60.0) == first


def test_a_missing_file_is_named(files):
    files[2].unlink()
    with pytest.raises(DataError, match=r"2\.png cannot be read \(No such file"):
        FileImages(files).fingerprint()


def test_a_limit_keeps_the_first_of_each_class_and_part(pixels):
    labels = np.array([0, 1, 0, 0, 1, 0])
    whole = ImageSet(ArrayImages(pixels, "x"), labels, np.array([0, 0, 0, 1, 1, 1], dtype=bool), ("a", "b"))
    limited = whole.limited(1)
    np.testing.assert_array_equal(limited.labels_N, [0, 1, 0, 1])
    np.testing.assert_array_equal(limited.images.pixels_NHWK, pixels[[0, 1, 3, 4]])
    assert whole.limited(None) is whole
    without_parts = ImageSet(whole.images, labels, None, whole.class_names).limited(2)
    np.testing.assert_array_equal(without_parts.images.pixels_NHWK, pixels[[0, 1, 2, 4]])


def test_what_does_not_fit_together_is_refused(pixels):
    with pytest.raises(DataError, match="do not fit together"):
        ImageSet(ArrayImages(pixels, "x"), np.zeros(5, np.int64), None, ("a",))
    with pytest.raises(DataError, match="holds no image"):
        ImageSet(FileImages([]), np.zeros(0, np.int64), None, ("a",))
