from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from torchvision.datasets import CIFAR10, CIFAR100

from sfu.data.datasets.base import Dataset
from sfu.data.datasets.caltech256 import Caltech256
from sfu.data.datasets.cifar import Cifar10, Cifar100
from sfu.data.datasets.digits import Digits
from sfu.data.datasets.stanford_dogs import StanfordDogs
from sfu.data.download import Archive
from sfu.data.images.decode import ImageError
from sfu.errors import ConfigError, DataError
from tests.data.image_samples import (
    BREEDS,
    pack,
    publish_cifar,
    serving,
    write_caltech,
    write_dog_lists,
    write_dogs,
)

KINDS = {"cifar10": Cifar10, "cifar100": Cifar100, "caltech256": Caltech256, "stanford_dogs": StanfordDogs}
CIFARS = [pytest.param(Cifar10, CIFAR10, id="cifar10"), pytest.param(Cifar100, CIFAR100, id="cifar100")]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SFU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")


def config(kind, root: Path | None = None, **settings):
    return kind(root=root and str(root), **{"download": False, **settings})


def test_digits_as_images_are_the_digits_as_rows():
    found = Digits().images()
    assert (len(found.images), found.is_test_N) == (1797, None)
    assert found.class_names == tuple("0123456789")
    from sklearn.datasets import load_digits

    rows, labels = load_digits(return_X_y=True)
    pixels = found.images.decode(7)
    assert pixels.shape == (1, 8, 8)
    assert pixels.dtype == torch.uint8
    np.testing.assert_array_equal(pixels.numpy().ravel(), np.rint(rows[7] * 255 / 16))
    np.testing.assert_array_equal(found.labels_N, labels)


@pytest.mark.parametrize(("module", "reader"), CIFARS)
def test_cifar_is_what_torchvision_reads(tmp_path, monkeypatch, module, reader):
    publish_cifar(monkeypatch, tmp_path, reader)
    found = config(module, tmp_path).images()
    train, test = (reader(tmp_path, train=train) for train in (True, False))
    assert found.is_test_N.tolist() == [False] * len(train) + [True] * len(test)
    assert found.labels_N.tolist() == train.targets + test.targets
    assert found.class_names == tuple(train.classes)
    for index, (image, _) in ((0, train[0]), (len(train) + 3, test[3])):
        np.testing.assert_array_equal(found.images.decode(index).permute(1, 2, 0), np.asarray(image))
    assert found.images.fingerprint() == config(module, tmp_path).images().images.fingerprint()


@pytest.mark.parametrize(("module", "reader"), CIFARS)
def test_cifar_comes_from_its_archive_or_the_web(tmp_path, monkeypatch, module, reader):
    folder = publish_cifar(monkeypatch, tmp_path / "source", reader)
    body = pack(tmp_path / "placed" / reader.filename, folder.parent, [reader.base_folder])
    monkeypatch.setattr(reader, "tgz_md5", hashlib.md5(body).hexdigest())
    monkeypatch.setattr(module, "archive_bytes", len(body))
    placed = config(module, tmp_path / "placed").images()
    with serving({"/archive": body}) as server:
        monkeypatch.setattr(reader, "url", f"{server.url}/archive")
        server.drops = [len(body) // 2]
        fetched = config(module, download=True).images()
        config(module, download=True).images()
        assert len(server.asked) == 2
    assert placed.images.fingerprint() == fetched.images.fingerprint()
    below = tmp_path / "cache" / "datasets"
    assert config(module).source_files() == [below / reader.base_folder, below / reader.filename]


def test_changed_pickles_are_never_loaded(tmp_path, monkeypatch):
    folder = publish_cifar(monkeypatch, tmp_path, CIFAR10)
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return (Path.touch, (ran,))

    for name in ("data_batch_3", "batches.meta"):
        good = (folder / name).read_bytes()
        (folder / name).write_bytes(pickle.dumps(Evil()))
        with pytest.raises(DataError, match=rf"differs from the published files in {name} \(md5 \w+\).*Remove"):
            config(Cifar10, tmp_path).images()
        assert not ran.exists()
        (folder / name).write_bytes(good)
    (folder / "test_batch").unlink()
    with pytest.raises(DataError, match="lacks test_batch"):
        config(Cifar10, tmp_path).source_files()


def test_caltech_is_what_torchvision_reads_but_for_clutter(tmp_path):
    write_caltech(tmp_path)
    theirs = torchvision.datasets.Caltech256(tmp_path)
    with_clutter = config(Caltech256, tmp_path, clutter=True).images()
    assert with_clutter.labels_N.tolist() == theirs.y
    assert [path.name for path in with_clutter.images.paths] == [
        f"{label + 1:03d}_{number:04d}.jpg" for label, number in zip(theirs.y, theirs.index, strict=True)
    ]
    assert [path.parent.name for path in with_clutter.images.paths] == [theirs.categories[label] for label in theirs.y]
    found = config(Caltech256, tmp_path).images()
    assert found.is_test_N is None
    assert (len(found.class_names), found.class_names[55], with_clutter.class_names[-1]) == (256, "thing-56", "clutter")
    assert found.labels_N.max() == 255
    assert found.images.decode(0).shape == (3, 10, 12)


def test_caltech_strays_are_left_out_and_gaps_named(tmp_path, caplog):
    folder = write_caltech(tmp_path)
    before = config(Caltech256, tmp_path).images().images.paths
    assert "the published archive 29780" in caplog.text
    (folder / ".DS_Store").write_text("stray")
    (folder / "notes").mkdir()
    shutil.rmtree(folder / "257.clutter")
    assert config(Caltech256, tmp_path).images().images.paths == before
    with pytest.raises(DataError, match="lacks category 257"):
        config(Caltech256, tmp_path, clutter=True).source_files()
    (folder / "005.thing-5" / "005_0001.jpg").unlink()
    with pytest.raises(DataError, match=r"005\.thing-5 does not hold .* 005_0001\.jpg is missing"):
        config(Caltech256, tmp_path).images()
    (folder / "006.thing-6" / "006_0001.jpg").unlink()
    shutil.rmtree(folder / "005.thing-5")
    with pytest.raises(DataError, match="lacks category 005"):
        config(Caltech256, tmp_path).images()
    (folder / "005.other").mkdir()
    with pytest.raises(DataError, match=r"005\.other does not hold .*: it is empty"):
        config(Caltech256, tmp_path).images()
    (folder / "005.thing-5").mkdir()
    with pytest.raises(DataError, match=r"holds category 005 twice"):
        config(Caltech256, tmp_path).source_files()


def test_dogs_follow_the_official_lists(tmp_path):
    folder = write_dogs(tmp_path)
    official = config(StanfordDogs, tmp_path).images()
    assert official.class_names == ("Chihuahua", "Japanese spaniel", "Shih-Tzu")
    assert official.is_test_N.tolist() == [False] * 6 + [True] * 6
    assert official.labels_N.tolist() == [0, 0, 1, 1, 2, 2] * 2
    assert official.images.paths[6] == folder / "Images" / BREEDS[0] / "n02085620_1.jpg"
    drawn = config(StanfordDogs, tmp_path, official_split=False).images()
    assert drawn.is_test_N is None
    assert drawn.images.fingerprint() == official.images.fingerprint()  # features are extracted once for both splits


def change_lists(folder: Path, change) -> None:
    train = [(f"{breed}/{breed.split('-')[0]}_0.jpg", label) for label, breed in enumerate(BREEDS, start=1)]
    test = [(f"{breed}/{breed.split('-')[0]}_1.jpg", label) for label, breed in enumerate(BREEDS, start=1)]
    write_dog_lists(folder, *change(train, test))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda train, test: (train, [*test, train[0]]), "name an image twice"),
        (lambda train, test: (train, [(test[0][0], 2), *test[1:]]), "contradict each other"),
        (lambda train, test: ([(file, label + 1) for file, label in train], test), "contradict each other"),
        (lambda train, test: (train[:2], test[:1]), None),
        (
            lambda train, test: (train, [*test, (f"{BREEDS[0]}/gone.jpg", 1)]),
            r"lacks n02085620-Chihuahua/gone\.jpg and 0",
        ),
        (lambda train, test: (train, [*test, ("../train_list.mat", 4)]), r"lacks \.\./train_list\.mat"),
    ],
    ids=["twice", "two labels", "from 2", "fewer", "missing", "outside"],
)
def test_dog_lists_that_contradict_are_refused(tmp_path, change, message):
    change_lists(write_dogs(tmp_path), change)
    if message is None:
        assert len(config(StanfordDogs, tmp_path).images().class_names) == 2
        return
    with pytest.raises(DataError, match=message):
        config(StanfordDogs, tmp_path).images()


def test_damaged_dog_list_is_named(tmp_path):
    folder = write_dogs(tmp_path)
    whole = (folder / "test_list.mat").read_bytes()
    for damaged in (b"", whole[:200], b"no mat file at all" * 20):
        (folder / "test_list.mat").write_bytes(damaged)
        with pytest.raises(DataError, match=r"test_list\.mat cannot be read .*lists\.tar"):
            config(StanfordDogs, tmp_path).images()


def test_dogs_and_caltech_come_from_the_web(tmp_path):
    dogs, caltech = write_dogs(tmp_path / "source"), write_caltech(tmp_path / "source")
    bodies = {
        "/images.tar": pack(tmp_path / "images.tar", dogs, ["Images"]),
        "/lists.tar": pack(tmp_path / "lists.tar", dogs, ["file_list.mat", "train_list.mat", "test_list.mat"]),
        "/caltech.tar": pack(tmp_path / "caltech.tar", caltech.parent, ["256_ObjectCategories"]),
    }
    with serving(bodies) as server:

        def here(real: Archive, path: str) -> Archive:
            digest = hashlib.new(real.algorithm, bodies[path]).hexdigest()
            return Archive(server.url + path, real.filename, real.algorithm, digest, real.entries, len(bodies[path]))

        class ServedDogs(StanfordDogs):
            def archives(self):
                images, lists = super().archives()
                return here(images, "/images.tar"), here(lists, "/lists.tar")

        class ServedCaltech(Caltech256):
            def archives(self):
                return (here(*super().archives(), "/caltech.tar"),)

        for kind, served in ((StanfordDogs, ServedDogs), (Caltech256, ServedCaltech)):
            fetched = config(served, tmp_path / "root", download=True).images()
            placed = config(kind, tmp_path / "source").images()
            assert fetched.images.fingerprint() == placed.images.fingerprint()
        assert [path for path, _ in server.asked] == list(bodies)
    assert not (tmp_path / "root" / "stanford_dogs" / "file_list.mat").exists()  # not needed


def test_truncated_archive_is_named(tmp_path):
    folder = tmp_path / "caltech256"
    folder.mkdir()
    (folder / "256_ObjectCategories.tar").write_bytes(b"half")
    with pytest.raises(DataError, match=r"256_ObjectCategories\.tar has md5 \w+, but .* has 67b4f42c.*Remove the file"):
        config(Caltech256, tmp_path).images()


def test_image_that_does_not_decode_is_named(tmp_path):
    folder = write_dogs(tmp_path)
    found = config(StanfordDogs, tmp_path).images()
    path = folder / "Images" / BREEDS[0] / "n02085620_0.jpg"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ImageError, match=r"n02085620_0\.jpg is damaged"):
        found.images.decode(0)


@pytest.mark.parametrize("name", KINDS)
def test_missing_data_say_what_to_place_where(tmp_path, name):
    module = KINDS[name]
    with pytest.raises(DataError) as caught:
        config(module, tmp_path / "nowhere").source_files()
    for part in (
        "dataset.download=false",
        str(tmp_path / "nowhere"),
        "http",
        "md5" if "dogs" not in name else "sha256",
    ):
        assert part in str(caught.value)
    assert not (tmp_path / "nowhere").exists()
    config(module, tmp_path / "nowhere", download=True).source_files()  # will be fetched, but not now
    assert not (tmp_path / "nowhere").exists()


SPECIAL = {"path": "x", "root": "z", "labels_csv": "y.csv", "clutter": True, "official_split": False}
TAKEN = {
    "digits": (),
    "cifar10": ("root",),
    "cifar100": ("root",),
    "caltech256": ("root", "clutter"),
    "stanford_dogs": ("root", "official_split"),
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name in TAKEN for key in SPECIAL if key not in TAKEN[name]])
def test_settings_without_a_meaning_are_refused(name, key):
    with pytest.raises(ConfigError, match=rf"dataset\.{key} is not a setting of dataset={name}\. It takes "):
        Dataset.make(name, **{key: SPECIAL[key]})


def test_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"dataset\.root=.*file is not a folder"):
        config(Cifar10, tmp_path / "file", download=True).source_files()


def test_home_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_dogs(tmp_path / "data")
    assert len(config(StanfordDogs, Path("~/data")).images().images) == 12
    assert os.listdir(tmp_path) == ["data"]
