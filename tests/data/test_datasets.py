from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors

from sfu.config_files import group_options
from sfu.data.datasets.base import Dataset
from sfu.data.feature_data import make_feature_data
from sfu.data.load import load_dataset
from sfu.data.seal import sealed
from sfu.errors import ConfigError, DataError, SourceFreeError
from tests.conftest import make_arrays


def load(path: Path, **settings: object):
    return load_dataset(Dataset.make(name="features", path=str(path), **settings), seed=0)


def test_every_dataset_file_has_a_config_and_the_reverse():
    assert Dataset.names() == group_options("dataset")


def test_npz_and_safetensors_give_the_same_data(tmp_path, arrays):
    np.savez(tmp_path / "a.npz", **arrays)
    save_file(arrays, tmp_path / "a.safetensors")
    one, other = load(tmp_path / "a.npz"), load(tmp_path / "a.safetensors")
    assert one.fingerprint() == other.fingerprint()
    assert torch.equal(one.train_features_ND, torch.from_numpy(arrays["train_features"]))
    assert one.n_classes == 4
    assert (one.n_train, one.n_features) == (400, 12)


def test_fingerprint_sees_one_changed_bit(arrays):
    before = make_feature_data("x", *arrays.values()).fingerprint()
    arrays["test_features"][3, 2] = np.nextafter(arrays["test_features"][3, 2], np.float32(9))
    assert make_feature_data("x", *arrays.values()).fingerprint() != before


def test_without_a_test_part_a_seeded_stratified_one_is_held_out(tmp_path, arrays):
    np.savez(tmp_path / "a.npz", train_features=arrays["train_features"], train_labels=arrays["train_labels"])
    config = Dataset.make(name="features", path=str(tmp_path / "a.npz"), test_fraction=0.25)
    data, same, other = (load_dataset(config, seed) for seed in (0, 0, 1))
    assert data.test_labels_T.bincount().tolist() == [25, 25, 25, 25]
    assert data.n_train == 300
    assert data.fingerprint() == same.fingerprint() != other.fingerprint()
    both = torch.cat([data.train_features_ND, data.test_features_TD])
    assert torch.equal(both.sort(0).values, torch.from_numpy(arrays["train_features"]).sort(0).values)


def test_digits_are_the_real_ones():
    data = load_dataset(Dataset.make(name="digits"), seed=0)
    assert (data.n_train, data.test_labels_T.shape[0], data.n_features, data.n_classes) == (1437, 360, 64, 10)
    assert float(data.train_features_ND.max()) == 1.0


def test_rows_of_every_part_are_normalized_alike(tmp_path, arrays):
    arrays["train_features"][5] = 0.0
    np.savez(tmp_path / "a.npz", **arrays)
    data = load(tmp_path / "a.npz", normalize_rows=True)
    norms = data.train_features_ND.norm(dim=1)
    assert float(norms[5]) == 0.0
    np.testing.assert_allclose(np.delete(norms.numpy(), 5), 1.0, rtol=1e-6)
    np.testing.assert_allclose(data.test_features_TD.norm(dim=1).numpy(), 1.0, rtol=1e-6)


def spoil(name: str, change):
    return pytest.param(name, change, id=f"{name}-{change.__name__}")


def nan(a):
    a[7, 1] = np.nan
    return a


def infinite(a):
    a[0, 0] = np.inf
    return a


def narrower(a):
    return a[:, :-1]


def flat(a):
    return a.ravel()


def empty(a):
    return a[:0]


def text(a):
    return np.full(a.shape, "a")


def fractions(a):
    return a + 0.5


def negative(a):
    return a - 1


def too_large(a):
    return np.where(np.arange(a.size) == 3, 11, a)


def shorter(a):
    return a[:-1]


def one_class(a):
    return np.zeros_like(a)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(spoil("train_features", c) for c in (nan, infinite, narrower, flat, empty, text)),
        *(spoil("test_features", c) for c in (nan, infinite, narrower, flat, empty)),
        *(spoil("train_labels", c) for c in (fractions, negative, too_large, shorter, one_class)),
        *(spoil("test_labels", c) for c in (fractions, negative, too_large, shorter)),
    ],
)
def test_unusable_arrays_are_refused_by_name(tmp_path, arrays, name, change):
    arrays[name] = change(arrays[name])
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(DataError, match=r"bad\.npz.*(features|labels)"):
        load(tmp_path / "bad.npz")


def test_rows_are_counted_as_in_the_file_although_a_test_part_is_drawn(tmp_path, arrays):
    arrays = {key: arrays[key] for key in ("train_features", "train_labels")}
    arrays["train_features"][317, 2] = np.nan
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(DataError, match=r"train_features has NaN .* in 1 of 400 rows \(first: row 317\)"):
        load(tmp_path / "bad.npz")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_safetensors_of_16_bits_are_read(tmp_path, arrays, dtype):
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    narrow = {key: value.to(dtype) if "features" in key else value for key, value in tensors.items()}
    save_tensors(narrow, tmp_path / "a.safetensors")
    data = load(tmp_path / "a.safetensors")
    assert torch.equal(data.train_features_ND, narrow["train_features"].float())
    assert torch.equal(data.test_labels_T, tensors["test_labels"])
    narrow["test_features"] = narrow["test_features"].to(torch.float8_e4m3fn)
    save_tensors(narrow, tmp_path / "a.safetensors")
    with pytest.raises(DataError, match="test_features is float8_e4m3fn, whose scale the file does not hold; write it"):
        load(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.array(["ant", "bee"] * 200), r"train_labels holds <U3, not numbers; number the classes: numpy\.unique"),
        (
            np.array(["ant", "bee"] * 200, dtype=object),
            "train_labels holds object, not numbers; sfu never loads pickled",
        ),
        (np.zeros(400, dtype="V2"), "holds .*V2, not numbers; bfloat16 arrays are saved so: write them as float32"),
        (np.eye(4)[np.arange(400) % 4], r"train_labels has shape \[400, 4\] and is one-hot.*: labels\..*argmax\(1\)"),
    ],
)
def test_labels_that_are_no_numbers_or_no_indices_get_a_remedy(tmp_path, arrays, labels, message):
    np.savez(tmp_path / "a.npz", train_features=arrays["train_features"], train_labels=labels)
    with pytest.raises(DataError, match=message):
        load(tmp_path / "a.npz")


def test_a_stated_number_of_classes_allows_gaps_and_bounds_labels(tmp_path, arrays):
    arrays["train_labels"] = arrays["train_labels"] * 2
    arrays["test_labels"] = arrays["test_labels"] * 2
    np.savez(tmp_path / "gaps.npz", **arrays)
    with pytest.raises(DataError, match=r"class 1 never occurs.*dataset\.n_classes"):
        load(tmp_path / "gaps.npz")
    assert load(tmp_path / "gaps.npz", n_classes=9).n_classes == 9
    with pytest.raises(DataError, match=r"outside 0 \.\. 4"):
        load(tmp_path / "gaps.npz", n_classes=5)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_damaged_files_are_refused(tmp_path, suffix):
    path = tmp_path / f"bad{suffix}"
    path.write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(DataError, match=r"cannot be read \("):
        load(path)


def test_pickled_objects_are_never_loaded(tmp_path, arrays):
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return (Path.touch, (ran,))

    arrays["train_labels"] = np.array([Evil()] * 400, dtype=object)
    np.savez(tmp_path / "evil.npz", **arrays)
    with pytest.raises(DataError, match="never loads"):
        load(tmp_path / "evil.npz")
    assert not ran.exists()
    pickle.loads(pickle.dumps(Evil()))  # the payload does work where it is loaded
    assert ran.exists()


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        (None, ConfigError, r"needs dataset\.path"),
        ("missing.npz", DataError, "does not exist"),
        ("here.csv", ConfigError, r"\.npz and \.safetensors"),
    ],
)
def test_paths_that_cannot_work(tmp_path, path, error, message):
    (tmp_path / "here.csv").write_text("1,2")
    config = Dataset.make(name="features", path=path and str(tmp_path / path))
    for attempt in (lambda: load_dataset(config, 0), lambda: config.source_files()):
        with pytest.raises(error, match=message):
            attempt()


def test_missing_arrays_and_half_a_test_part(tmp_path, arrays):
    np.savez(tmp_path / "a.npz", X=arrays["train_features"], y=arrays["train_labels"])
    told = (
        r"no train_features and no train_labels\. It holds X, y\. sfu reads train_features, train_labels and, .* under "
        r"these names: data = numpy\.load\('a\.npz'\); numpy\.savez\('renamed\.npz', train_features=data\['X'\], "
        r"train_labels=data\['y'\]\)\."
    )
    with pytest.raises(DataError, match=told):
        load(tmp_path / "a.npz")
    del arrays["test_labels"]
    np.savez(tmp_path / "b.npz", **arrays)
    with pytest.raises(DataError, match="test_features alone"):
        load(tmp_path / "b.npz")


def test_a_path_that_digits_would_ignore_is_refused():
    with pytest.raises(ConfigError, match=r"dataset\.path is not a setting of dataset=digits"):
        Dataset.make(name="digits", path="x.npz").source_files()


def test_unknown_dataset_names_the_known_ones():
    with pytest.raises(ConfigError, match="digits, features"):
        load_dataset(Dataset.make(name="imagenet"), 0)


def test_sealed_data_cannot_be_loaded_nor_opened(feature_file):
    config = Dataset.make(name="features", path=str(feature_file))
    with sealed(config.source_files()):
        with pytest.raises(SourceFreeError, match="dataset 'features'"):
            load_dataset(config, 0)
        with pytest.raises(SourceFreeError, match=r"features\.npz"):
            np.load(feature_file)
        with pytest.raises(SourceFreeError, match=r"features\.npz"):
            feature_file.open("rb")
        (feature_file.parent / "other").write_text("free")
    assert load_dataset(config, 0).n_train == 400


@given(seed=st.integers(0, 2**31), n_classes=st.integers(2, 6), n_features=st.integers(1, 9))
def test_any_well_formed_arrays_are_kept_as_they_are(seed, n_classes, n_features):
    arrays = make_arrays(30, 12, n_features, n_classes, seed)
    data = make_feature_data("x", *arrays.values())
    assert data.n_classes == n_classes
    for mine, given_array in zip(
        (data.train_features_ND, data.train_labels_N, data.test_features_TD, data.test_labels_T),
        arrays.values(),
        strict=True,
    ):
        np.testing.assert_array_equal(mine.numpy(), given_array)


def test_a_file_without_an_ending_is_refused_with_a_remedy(tmp_path):
    (tmp_path / "features").touch()
    with pytest.raises(ConfigError, match=r"features has no ending\. sfu reads \.npz and \.safetensors\. Save the"):
        Dataset.make(name="features", path=str(tmp_path / "features")).source_files()
