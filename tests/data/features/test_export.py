"""Features of images exported to a file, which gives the same experiment as the images."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from sfu.cli import features as features_cli
from sfu.data.datasets.base import Dataset, ImageDataset
from sfu.data.datasets.features import CODES, TEST, TRAIN, read_feature_file
from sfu.data.feature_data import FeatureData
from sfu.data.features.export import ExportSettings, export_features, principal_axes, random_rotation
from sfu.data.features.extract import Extractor
from sfu.data.features.store import Features, FeatureStore
from sfu.data.images.image_set import ImageSet
from sfu.data.images.images import ArrayImages
from sfu.data.load import extract_features, load_dataset, load_image_parts
from sfu.errors import ConfigError, DataError
from sfu.files import StreamedArray, write_arrays
from sfu.progress import ProgressDisplay
from sfu.readers import read_arrays
from tests.experiment.cases import composed, write_folder

DIGITS = ["dataset=digits", "backbone=pixels"]


@pytest.fixture
def photos(tmp_path: Path) -> list[str]:
    folder = write_folder(tmp_path / "photos", damaged=("train/class-1/torn.png", "test/class-0/torn.png"))
    given = ["dataset.damaged=skip", "dataset.normalize_rows=false"]
    return ["dataset=image_folder", f"dataset.path={folder}", "backbone=pixels", *given]


def export(path: Path, *settings: str) -> Path:
    features_cli.main(["export", str(path), *settings])
    return path


def numbers(path: Path) -> dict[str, np.ndarray]:
    return read_arrays(path, (*TRAIN, *TEST, *CODES))


def from_images(settings: list[str], seed: int) -> FeatureData:
    config = composed(*settings)
    assert isinstance(config.dataset, ImageDataset)
    return extract_features(load_image_parts(config.dataset, seed), Extractor(config.backbone, torch.device("cpu")))


def from_file(path: Path, seed: int = 0) -> FeatureData:
    return load_dataset(Dataset.make(name="features", path=str(path)), seed)


# --- the same data


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_a_run_on_the_file_sees_what_a_run_on_the_images_sees_at_every_seed(tmp_path, photos, capsys, ending):
    for name, settings, told in (
        ("a", [*DIGITS, "dataset.normalize_rows=true"], "1,797 rows of 64 numbers, float32"),
        ("b", photos, "120 training and 30 test rows of 108 numbers, float32"),
    ):
        path = export(tmp_path / f"{name}{ending}", *settings)
        shown = capsys.readouterr().out
        assert told in shown
        assert ("A run draws one from these rows" in shown) == (settings is not photos)
        assert ("2 images cannot be decoded and are left out" in shown) == (settings is photos)
        for seed in (0, 1):
            images, file = from_images(settings, seed), from_file(path, seed)
            assert file.fingerprint() == images.fingerprint()
            assert file.n_classes == images.n_classes


def test_images_are_extracted_once_and_the_file_can_be_read_like_any_other(tmp_path, capsys):
    export(tmp_path / "a.npz", *DIGITS)
    assert "extracting features of 1,797 images" in capsys.readouterr().err
    export(tmp_path / "b.npz", *DIGITS, "dtype=float16")
    assert "extracting" not in capsys.readouterr().err
    with np.load(tmp_path / "a.npz") as one, np.load(tmp_path / "b.npz") as other:
        assert set(one) == set(TRAIN)
        assert other["train_features"].dtype == np.float16
        np.testing.assert_allclose(other["train_features"], one["train_features"], atol=5e-4)
        assert np.array_equal(other["train_labels"], one["train_labels"])


# --- projection and rotation


def test_principal_axes_are_those_of_the_centred_rows_in_any_number_of_pieces():
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(1e4 + rng.normal(size=(500, 12)) * np.geomspace(3, 0.01, 12) @ rng.normal(size=(12, 12)))
    centred = rows.numpy() - rows.numpy().mean(0)
    _, sizes, axes = np.linalg.svd(centred, full_matrices=False)
    whole, kept = principal_axes(iter([rows]), 5)
    pieces, kept_in_pieces = principal_axes(iter([rows[:0], rows[:7], rows[7:300], rows[300:]]), 5)
    np.testing.assert_allclose(abs((whole.numpy() * axes[:5].T).sum(0)), 1, atol=1e-9)
    torch.testing.assert_close(pieces, whole, atol=1e-8, rtol=0)
    assert (whole.amax(0) == whole.abs().amax(0)).all()  # the sign is the same on every machine
    assert kept == pytest.approx((sizes[:5] ** 2).sum() / (sizes**2).sum(), rel=1e-9)
    assert kept_in_pieces == pytest.approx(kept, rel=1e-9)


def test_a_projection_is_one_linear_map_of_both_parts_whose_axes_the_rotation_hides(tmp_path, photos, capsys):
    images = from_images(photos, 0)
    both = torch.cat([images.train_features_ND, images.test_features_TD]).double().numpy()

    def rows(name: str, *settings: str) -> tuple[np.ndarray, int]:
        made = numbers(export(tmp_path / name, *photos, *settings))
        return np.concatenate([made["train_features"], made["test_features"]]), len(made["train_features"])

    whole, _ = rows("whole.npz", "projection=108")
    np.testing.assert_allclose(whole @ whole.T, both @ both.T, atol=1e-3)  # turned and nothing else: no mean is removed
    assert "108 principal axes hold 100.0 % of the training rows' variance" in capsys.readouterr().out
    plain, n_train = rows("plain.npz", "projection=4", "rotation=null")
    covariance = np.cov(plain[:n_train].T)
    np.testing.assert_allclose(np.linalg.eigvalsh(np.cov(both[:n_train].T))[:-5:-1], np.diag(covariance), rtol=1e-4)
    np.testing.assert_allclose(covariance - np.diag(np.diag(covariance)), 0, atol=1e-6)
    turned, _ = rows("turned.npz", "projection=4", "rotation=7")
    np.testing.assert_allclose(turned, plain @ random_rotation(4, 7).numpy(), atol=1e-5)
    assert abs(np.corrcoef(turned[:n_train].T) - np.eye(4)).max() > 0.1
    unit, _ = rows("unit.npz", "projection=4", "dataset.normalize_rows=true")
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-6)


def test_a_rotation_is_orthogonal_and_depends_on_its_seed():
    one, same, other = (random_rotation(20, seed) for seed in (3, 3, 4))
    torch.testing.assert_close(one.T @ one, torch.eye(20, dtype=torch.float64))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


# --- eight bits


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_eight_bits_are_off_by_half_a_step_at_most(tmp_path, photos, ending):
    exact = from_file(export(tmp_path / f"a{ending}", *photos, "projection=9"))
    path = export(tmp_path / f"b{ending}", *photos, "projection=9", "dtype=uint8")
    stored, read = numbers(path), from_file(path)
    assert stored["train_features"].dtype == stored["test_features"].dtype == np.uint8
    half = 0.5 * stored["scale"] + 1e-6
    for part in ("train_features_ND", "test_features_TD"):
        off = (getattr(read, part) - getattr(exact, part)).abs().numpy()
        assert (off <= half).all()
        assert off.max() > 0
    assert torch.equal(read.train_labels_N, exact.train_labels_N)
    codes = np.concatenate([stored["train_features"], stored["test_features"]])
    assert (codes.min(0) == 0).all()
    assert (codes.max(0) == 255).all()


def test_a_feature_that_never_changes_is_exact_in_eight_bits(tmp_path):
    path = export(tmp_path / "a.npz", *DIGITS, "dtype=uint8")  # digits have pixels that are always 0
    assert (numbers(path)["scale"] == 0).any()
    expected = from_images(DIGITS, 0).train_features_ND
    torch.testing.assert_close(from_file(path).train_features_ND, expected, atol=0.002, rtol=0)


def coded(**changes: np.ndarray | None) -> dict[str, np.ndarray]:
    arrays = {
        "train_features": np.arange(12, dtype=np.uint8).reshape(4, 3),
        "train_labels": np.arange(4) % 2,
        "offset": np.array([-1, 0, 1], dtype=np.float32),
        "scale": np.array([0.5, 0, 2], dtype=np.float32),
    }
    return {name: values for name, values in (arrays | changes).items() if values is not None}


def test_uint8_without_codes_and_floats_beside_codes_are_taken_as_they_are(tmp_path):
    def features(arrays: dict[str, np.ndarray]) -> np.ndarray:
        np.savez(tmp_path / "a.npz", **arrays)
        return read_feature_file(tmp_path / "a.npz", TRAIN, "dataset.path")["train_features"]

    codes = coded()["train_features"]
    assert features(coded()).tolist() == (codes * np.array([0.5, 0, 2]) + np.array([-1, 0, 1])).tolist()
    assert features(coded(offset=None, scale=None)).tolist() == codes.tolist()
    assert features(coded(train_features=codes.astype(np.float32))).tolist() == codes.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": None}, "train_features is uint8 and has offset, but no scale"),
        ({"offset": None}, "train_features is uint8 and has scale, but no offset"),
        ({"scale": np.ones(2, np.float32)}, r"train_features \[4, 3\], offset \[3\], scale \[2\]"),
        ({"offset": np.ones((3, 3), np.float32)}, r"offset \[3, 3\]"),
        ({"scale": np.array([1, -1, 1], np.float32)}, "scale must hold finite floats of at least 0"),
        ({"offset": np.array([1, np.nan, 1], np.float32)}, "offset must hold finite floats"),
        ({"scale": np.array([1, 2, 3])}, "scale must hold finite floats of at least 0"),
    ],
)
@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_codes_that_cannot_be_are_refused(tmp_path, ending, changes, message):
    path = tmp_path / f"a{ending}"
    (np.savez if ending == ".npz" else lambda path, **arrays: save_file(arrays, path))(path, **coded(**changes))
    with pytest.raises(DataError, match=message) as refused:
        from_file(path)
    assert f"dataset.path={path}" in str(refused.value)
    assert "Write it again with" in str(refused.value)


def write_rows(path: Path, rows: list[list[float]], is_test: list[bool] | None = None, **given: object) -> Path:
    """Export a few rows without a backbone."""
    store = FeatureStore(path.parent / "cache", {"rows": str(rows)}, len(rows))
    store.write(0, Features(torch.tensor(rows), torch.arange(len(rows)), {}))
    pixels = ArrayImages(np.zeros((len(rows), 1, 1), np.uint8), "rows")
    images = ImageSet(pixels, np.arange(len(rows)) % 2, None if is_test is None else np.array(is_test), ("a", "b"))
    settings, stage = ExportSettings(**given), ProgressDisplay(False).stage
    export_features(path, images, store, {}, settings, normalize_rows=False, stage=stage)
    return path


def test_a_number_beyond_float16_is_refused(tmp_path):
    rows = [[1.0, -7e4], [2.0, 3.0]]
    write_rows(tmp_path / "a.npz", rows)
    with pytest.raises(DataError, match=r"a feature has the size 70000, and float16 ends at 65,504\. Choose dtype="):
        write_rows(tmp_path / "b.npz", rows, dtype="float16")


def test_test_rows_beyond_the_training_rows_are_not_cut_off_in_eight_bits(tmp_path):
    rows = [[0.0], [1.0], [-3.0], [9.0]]
    read = from_file(write_rows(tmp_path / "a.npz", rows, [False, False, True, True], dtype="uint8"))
    torch.testing.assert_close(read.test_features_TD, torch.tensor([[-3.0], [9.0]]))


def test_a_file_that_appears_during_the_extraction_stays(tmp_path):
    (tmp_path / "a.npz").write_text("mine")
    with pytest.raises(ConfigError, match=r"a\.npz exists"):
        write_rows(tmp_path / "a.npz", [[1.0], [2.0]])
    assert (tmp_path / "a.npz").read_text() == "mine"


# --- the file


def test_a_file_that_is_there_stays_unless_it_may_be_overwritten(tmp_path, capsys):
    path = tmp_path / "a.npz"
    path.write_text("mine")
    with pytest.raises(SystemExit):
        export(path, *DIGITS)
    shown = capsys.readouterr().err
    assert f"{path} exists, and export would replace it. Choose another file, or add overwrite=true." in shown
    assert "extracting" not in shown  # it is said before any work
    assert path.read_text() == "mine"
    export(path, *DIGITS, "overwrite=true")
    assert from_file(path).n_features == 64


@pytest.mark.parametrize(
    ("file", "settings", "message"),
    [
        ("a.csv", DIGITS, "a.csv ends in '.csv', and sfu writes .npz and .safetensors. Name the file first"),
        (".", DIGITS, "Name the file first"),
        ("folder.npz", DIGITS, "folder.npz is a folder. Name a file."),
        ("a.npz", ["dataset=digits"], "backbone=none extracts nothing"),
        ("a.npz", [*DIGITS, "projection=65"], "projection=65 keeps more axes than there are features (64)"),
        ("a.npz", [*DIGITS, "projection=0"], "projection=0. Give a whole number of at least 1"),
        (
            "a.npz",
            [*DIGITS, "projection=many"],
            "projection=many is not a whole number. Give a whole number of at least 1, or null.",
        ),
        ("a.npz", [*DIGITS, "dtype=int4"], "dtype=int4 is unknown. Choose one of float16, float32, uint8"),
        ("a.npz", [*DIGITS, "dataset.core_fraction=0.1"], "only applies to a linearised head"),
        ("a.npz", ["dataset=features", "backbone=pixels"], "holds features"),
    ],
)
def test_mistakes_are_explained_and_leave_no_file(tmp_path, monkeypatch, capsys, file, settings, message):
    monkeypatch.chdir(tmp_path)
    Path("folder.npz").mkdir()
    with pytest.raises(SystemExit) as stopped:
        features_cli.main(["export", file, *settings])
    assert stopped.value.code == 1
    assert message in capsys.readouterr().err
    assert [path for path in os.listdir() if path.startswith((".a", "a"))] == []


def test_under_torchrun_the_features_are_extracted_first(tmp_path, monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        export(tmp_path / "a.npz", *DIGITS)
    assert "export is one process. Under torchrun, extract the features first" in capsys.readouterr().err


def test_an_interrupted_write_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "a.npz"
    path.write_text("before")

    def pieces():
        yield np.zeros((5, 2), np.float32)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_arrays(path, {"x": StreamedArray(np.dtype("float32"), (10, 2), pieces())})
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["a.npz"]


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_memory_holds_one_piece_at_a_time_and_pieces_must_fill_the_shape(tmp_path, ending):
    alive = []

    def pieces():
        for number in range(4):
            assert not any(piece() is not None for piece in alive)
            piece = np.full((3, 2), number, np.float32)
            alive.append(weakref.ref(piece))
            yield piece
            del piece

    path = tmp_path / f"a{ending}"
    write_arrays(
        path, {"x": StreamedArray(np.dtype("float32"), (12, 2), pieces()), "y": StreamedArray.of(np.arange(3))}
    )
    read = read_arrays(path, ("x", "y"))
    assert read["x"].tolist() == [[number] * 2 for number in range(4) for _ in range(3)]
    assert read["y"].tolist() == [0, 1, 2]
    alive.clear()
    with pytest.raises(ValueError, match=r"96 bytes for an array of shape \[13, 2\]"):
        write_arrays(path, {"x": StreamedArray(np.dtype("float32"), (13, 2), pieces())})
    assert read_arrays(path, ("x",))["x"].shape == (12, 2)
