"""Whole runs with a linearised head: images, a core on public ones, training, methods, evaluation, files."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from sfu.data.load import load_image_parts
from sfu.errors import ConfigError, DataError
from sfu.experiment import prepare
from sfu.experiment.config import RunConfig
from sfu.experiment.context import RunContext
from sfu.experiment.validate import validate
from sfu.heads.files import load_head
from sfu.heads.settings import CoreWeights, LinearSettings
from sfu.isolation.sandbox import protections
from sfu.unlearning.rows import make_methods
from tests.experiment.cases import composed, run, write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "images")


def linearised(folder: Path, *overrides: str) -> RunConfig:
    return composed(
        "dataset=image_folder", f"dataset.path={folder}", "dataset.core_fraction=0.5", "dataset.normalize_rows=false",
        "head=linearised", "head.l2=1e-2", "head.tolerance=1e-6", "head.max_iterations=2000", "head.pretrain.epochs=1",
        "head.pretrain.batch_size=30", "head.pretrain.lr=0.02", "backbone.name=shufflenet_v2_x0_5",
        "backbone.weights=none", "backbone.size=32", "backbone.batch_size=16", "logger=none", *overrides,
    )  # fmt: skip


def test_a_run_from_images_to_the_table(tmp_path, folder):
    config = linearised(folder, "head.core=pretrain")
    config.methods = [
        "original",
        "retrained",
        "unlearned_plus",
        "closed_form",
        "unlearned_minus",
        "unlearned_plus_diagonal",
        "with_views",
    ]
    config.forget.fraction = 0.4
    config.curvature.dimension = 4
    config.variants = {"with_views": {"base": "closed_form", "curvature": {"augment": ["flip"]}}}
    metrics = run(config, tmp_path / "run")
    rows, about = metrics["rows"], metrics["run"]
    assert not [row["error"] for row in rows.values() if row.get("error")]
    assert (about["data"]["n_train"], about["data"]["n_test"]) == (60, 30)
    assert about["data"]["images"]["n_public"] == 60
    assert about["head"]["layers"] == ["fc"]
    assert rows["unlearned_plus"]["distance"] < 1e-3
    assert rows["closed_form"]["access"] == rows["unlearned_minus"]["access"] == "forget"
    assert rows["unlearned_plus_diagonal"]["access"] == "retained"
    isolation = {name: row["isolation"] for name, row in rows.items() if row["access"] != "retained"}
    assert set(isolation.values()) == {protections(isolate=True)}
    for name in rows:
        saved = load_head(tmp_path / "run" / "heads" / name)
        assert saved.n_classes == 3
    assert len(list((tmp_path / "run" / "heads").glob("core-*"))) == 1


def test_public_images_are_no_users_whatever_the_seed(folder):
    config = linearised(folder).dataset
    parts, again, other = load_image_parts(config, 0), load_image_parts(config, 0), load_image_parts(config, 1)
    test = set(parts.images.is_test_N.nonzero()[0])
    assert len(parts.public) == 60
    assert not set(parts.public) & (set(parts.train) | test)
    assert len(parts.public) + len(parts.train) + len(test) == len(parts.images.images)
    assert (parts.public == again.public).all()
    assert (parts.public == other.public).all()
    config.core_seed = 1
    assert set(parts.public) != set(load_image_parts(config, 0).public)


def test_loading_trains_nothing_and_a_core_is_trained_on_public_images_alone(tmp_path, folder):
    run = RunContext(linearised(folder, "head.core=pretrain"), tmp_path, {})
    prepare.load(run)
    assert run.core is None
    assert not (tmp_path / "sfu-cache" / "cores").exists()
    for row in run.images.train:
        Path(run.images.images.images.name(row)).write_bytes(b"no image")
    first = run.images.train[0]
    Image.new("RGB", (6, 6)).save(run.images.images.images.name(first))  # the one that shows the size
    prepare.pretrain_core(run)
    assert run.core.components == ("fc",)
    assert len(list((tmp_path / "sfu-cache" / "cores").glob("*/*.safetensors"))) == 1


def refused(config: RunConfig) -> None:
    validate(config)
    make_methods(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: setattr(c.head, "layers", 0), r"head\.layers=0\. Give a whole number of at least 1"),
        (lambda c: setattr(c.head, "layers", 99), r"head\.layers=99\. ShuffleNetV2 has 1 to \d+ components, .* fc,"),
        (lambda c: setattr(c.dataset, "core_fraction", 1.0), r"dataset\.core_fraction=1\.0\. Give .* below 1"),
        (lambda c: setattr(c.dataset, "core_fraction", -0.1), r"dataset\.core_fraction=-0\.1"),
        (lambda c: (setattr(c.dataset, "core_fraction", 0.0), setattr(c.head, "core", CoreWeights.pretrain)),
         r"head\.core=pretrain needs public images"),
        (lambda c: setattr(c, "head", LinearSettings()), r"core_fraction=0\.5 only applies to a linearised head"),
        (lambda c: setattr(c.head, "dtype", "int8"), r"head\.dtype=int8 is unknown"),
        (lambda c: setattr(c.head, "negative_slope", 2.0), r"head\.negative_slope=2"),
        (lambda c: setattr(c.head, "negative_slope", -1.0), r"head\.negative_slope=-1\.0\. Give .* below 1"),
        (lambda c: setattr(c.head, "batch_size", 0), r"head\.batch_size=0"),
        (lambda c: setattr(c.head, "batch_size", "most"), r"head\.batch_size=most\. Give a whole number"),
        (lambda c: setattr(c.head.sgd, "lr", 0.0), r"head\.sgd\.lr=0"),
        (lambda c: setattr(c.backbone, "name", "pixels"), r"head=linearised needs a network of torchvision"),
        (lambda c: setattr(c.curvature, "dimension", 0), r"curvature\.dimension=0"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_named_before_any_work(folder, change, message):
    config = linearised(folder)
    change(config)
    with pytest.raises(ConfigError, match=message):
        refused(config)


def test_a_core_that_leaves_a_class_no_user_is_refused_before_it_is_trained(tmp_path, folder):
    config = linearised(folder, "head.core=pretrain")
    config.dataset.core_fraction = 0.999
    with pytest.raises(ConfigError, match=r"of the 40 training images of class 0 are 40\. The core and the users need"):
        run(config, tmp_path / "run")


def test_row_numbers_do_not_go_with_public_images(tmp_path, folder):
    config = linearised(folder)
    (tmp_path / "rows.txt").write_text("3")
    config.forget.fraction, config.forget.indices = None, str(tmp_path / "rows.txt")
    with pytest.raises(DataError, match=r"dataset\.core_fraction takes some away\.\s+Name the images instead"):
        run(config, tmp_path / "run")
