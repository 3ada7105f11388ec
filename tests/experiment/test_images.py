"""Experiments on images: features behind the scenes; augmented curvature opens no image but those to forget."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision

from sfu.curvature.settings import curvature_settings
from sfu.data.datasets.base import Damaged
from sfu.data.load import load_images
from sfu.data.settings import ForgetSettings
from sfu.data.split import make_split
from sfu.errors import ConfigError, DataError, SourceFreeError
from sfu.experiment import prepare
from sfu.experiment.context import RunContext
from sfu.request import Access, ForgetRequest
from tests.experiment.cases import Probe, config_for, image_config, run, write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "images")


# --- the way through


def test_images_go_through_a_backbone_and_leave_a_record(tmp_path, folder):
    config = image_config(folder)
    config.methods = ["original", "retrained", "unlearned_plus", "closed_form"]
    metrics = run(config, tmp_path / "run")
    data = metrics["run"]["data"]
    assert (data["n_train"], data["n_test"], data["n_features"], data["n_classes"]) == (120, 30, 108, 3)
    assert data["class_names"] == ["class-0", "class-1", "class-2"]
    assert data["backbone"]["name"] == "pixels"
    assert data["images"]["n_images"] == 150
    assert metrics["rows"]["retrained"]["test_accuracy"] > 80
    assert metrics["rows"]["unlearned_plus"]["distance"] < 1e-8
    json.dumps(metrics)


def test_digits_as_images_are_the_digits(tmp_path):
    rows = ["original", "retrained"]
    plain = config_for(methods=rows, dataset__normalize_rows=False)
    images = config_for(None, "backbone=pixels", methods=rows, dataset__normalize_rows=False)
    one, other = (run(config, tmp_path / name)["rows"] for name, config in (("plain", plain), ("images", images)))
    for row in rows:
        assert other[row]["test_accuracy"] == pytest.approx(one[row]["test_accuracy"], abs=0.3)


def test_classes_can_be_forgotten_by_name(tmp_path, folder):
    config = image_config(folder)
    config.forget.classes = ["class-2"]
    assert run(config, tmp_path / "run")["run"]["data"]["n_forget"] == 40
    config.forget.classes = ["clas-2"]
    with pytest.raises(DataError, match=r"'clas-2' is not a class\. Its names include class-2"):
        run(config, tmp_path / "run")


def test_images_can_be_forgotten_by_file_name_and_the_run_says_which_they_were(tmp_path, folder):
    (tmp_path / "wish.txt").write_text(f"class-1/005.png\n{folder}/train/class-0/011.png\n")
    config = image_config(folder)
    config.forget.files = str(tmp_path / "wish.txt")
    metrics = run(config, tmp_path / "run")
    assert metrics["run"]["forget"]["kind"] == "files"
    told = (tmp_path / "run" / "forget_files.txt").read_text().split()
    assert sorted(told) == [f"{folder}/train/class-0/011.png", f"{folder}/train/class-1/005.png"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class-1/999.png", r"'class-1/999\.png' is not an image of the training part \(near: class-1/0"),
        ("005.png", r"several images end in '005\.png'\. Give more of the path"),
        ("class-1/005.png\ntrain/class-1/005.png", "more than once"),
        ("\n", "is an empty forget set"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused_before_features_are_extracted(tmp_path, folder, text, message):
    (tmp_path / "wish.txt").write_text(text)
    config = image_config(folder)
    config.forget.files = str(tmp_path / "wish.txt")
    with pytest.raises(DataError, match=message):
        run(config, tmp_path / "run")
    assert not list((tmp_path / "sfu-cache").glob("features/*"))


def test_row_numbers_do_not_go_with_images_left_out(tmp_path):
    folder = write_folder(tmp_path / "images", damaged=("train/class-1/003.png",))
    (tmp_path / "rows.txt").write_text("20")
    config = image_config(folder, dataset__damaged=Damaged.skip)
    config.forget.indices = str(tmp_path / "rows.txt")
    with pytest.raises(DataError, match=r"1 damaged images are left out, which shifts them\. Name the images instead"):
        run(config, tmp_path / "run")


def test_class_names_that_are_numbers_are_taken_as_names():
    labels = torch.arange(12).repeat(5)
    names = tuple(sorted(str(number) for number in range(12)))  # 0, 1, 10, 11, 2, ...
    split = make_split(ForgetSettings(classes=[10]), labels, 12, 0, names)
    assert labels[split.forget_F].unique().tolist() == [names.index("10")]


def test_identical_images_on_both_sides_of_a_cut_are_told(tmp_path, folder, caplog):
    config = image_config(folder)
    config.forget.classes = ["class-2"]
    images = run(config, tmp_path / "run")["run"]["data"]["images"]
    assert (images["n_forget_copies"], images["n_test_copies"]) == (0, 0)
    assert not caplog.text
    for copy, of in (
        ("train/class-0/me.png", "train/class-2/005.png"),
        ("test/class-1/me.png", "train/class-0/003.png"),
    ):
        shutil.copy(folder / of, folder / copy)
    images = run(config, tmp_path / "run")["run"]["data"]["images"]
    assert (images["n_forget_copies"], images["n_test_copies"]) == (1, 1)
    told = [record.message for record in caplog.records]
    assert len(told) == 2
    pair = f"(such as {folder}/train/class-2/005.png and {folder}/train/class-0/me.png)"
    assert (
        f"images to forget that are identical to a retained image: 1 {pair}. The model keeps what they show" in told[0]
    )
    assert f"(such as {folder}/test/class-1/me.png and {folder}/train/class-0/003.png)" in told[1]


def test_a_limit_takes_the_first_of_each_class(folder):
    config = image_config(folder, dataset__limit_per_class=4)
    images = load_images(config.dataset)
    assert [Path(path).stem for path in map(str, images.images.paths[:8])] == ["000", "001", "002", "003"] * 2
    assert np.bincount(images.labels_N[~images.is_test_N]).tolist() == [4, 4, 4]


def test_damaged_images_stop_a_run_by_name_or_are_skipped_and_listed(tmp_path):
    folder = write_folder(tmp_path / "images", damaged=("train/class-1/003.png", "test/class-0/001.png"))
    with pytest.raises(DataError, match=r"class-1/003\.png is none of BMP, GIF.*dataset\.damaged=skip"):
        run(image_config(folder), tmp_path / "run")
    metrics = run(image_config(folder, dataset__damaged=Damaged.skip), tmp_path / "run")
    data = metrics["run"]["data"]
    assert (data["n_train"], data["n_test"]) == (119, 29)
    assert data["images"]["n_damaged"] == 2
    assert all(name in " ".join(data["images"]["damaged"]) for name in ("class-1/003.png", "class-0/001.png"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: setattr(c.backbone, "name", "none"),
            "dataset=image_folder holds images, and backbone=none",
        ),
        (lambda c: setattr(c.dataset, "n_classes", 2), r"dataset\.n_classes=2 is too small: .* has 3 classes"),
        (lambda c: setattr(c.dataset, "limit_per_class", 0), r"dataset\.limit_per_class=0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path, folder, change, message):
    config = image_config(folder)
    change(config)
    with pytest.raises(ConfigError, match=message):
        run(config, tmp_path / "run")


def test_a_dataset_of_features_takes_no_backbone_and_no_augmentation(tmp_path, feature_file):
    config = config_for(feature_file)
    config.backbone.name = "pixels"
    with pytest.raises(ConfigError, match="dataset=features holds features, which backbone=pixels cannot read"):
        run(config, tmp_path / "run")
    config = config_for(feature_file)
    config.methods, config.curvature = ["closed_form"], curvature_settings(augment=["flip"])
    with pytest.raises(ConfigError, match=r"curvature\.augment=\['flip'\] \(row closed_form\) augments images"):
        run(config, tmp_path / "run")


# --- source-free


class Watcher:
    """Remembers every file opened below a folder."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.opened: list[str] = []
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple) -> None:
        if event == "open" and self.folder is not None and str(arguments[0]).startswith(self.folder):
            self.opened.append(str(arguments[0]))


_WATCHER = Watcher()


@pytest.fixture
def watcher():
    _WATCHER.opened = []
    yield _WATCHER
    _WATCHER.folder = None


def test_augmented_curvature_opens_the_images_to_forget_and_no_other(tmp_path, folder, watcher):
    """The watcher looks from the end of training to the end of the last source-free row."""
    config = image_config(folder, methods=["original", "closed_form"])
    config.curvature.augment = ["flip", "crop", "mixup"]

    def watch(stage, seconds):
        if stage in ("prepare", "closed_form"):
            watcher.folder = str(folder) if stage == "prepare" else None

    metrics = run(config, tmp_path / "run", on_stage=watch)
    assert "error" not in metrics["rows"]["closed_form"]
    to_forget = (tmp_path / "run" / "forget_files.txt").read_text().split()
    assert len(to_forget) == 12
    assert set(watcher.opened) == set(to_forget)  # the watcher does see: every one of them was opened


def test_every_method_gets_the_views_it_asks_for_normalised_like_the_rest(tmp_path, folder):
    wanted = {"both": ("flip", "crop", "crop", "cutmix"), "one": ("flip",), "none": ()}
    methods = {name: Probe(augmentations=names) for name, names in wanted.items()}
    run(image_config(folder), tmp_path / "run", methods=methods)
    both, one = methods["both"].found, methods["one"].found
    assert methods["none"].found.views_VFD is None
    assert both.views_VFD.shape == (4, 12, 108)
    assert one.views_VFD.equal(both.views_VFD[:1])
    assert not both.views_VFD[1].equal(both.views_VFD[2])  # two draws
    torch.testing.assert_close(both.views_VFD.norm(dim=2), torch.ones(4, 12))
    flipped = both.features_FD.reshape(12, 3, 6, 6).flip(-1).flatten(1)
    torch.testing.assert_close(both.views_VFD[0], flipped, rtol=0, atol=1e-6)
    rows = torch.arange(12)
    assert both.partners_VF[:3].equal(rows.repeat(3, 1))
    assert not (both.partners_VF[3] == rows).any()  # cutmix shows a second row


@pytest.mark.parametrize("through", ["its name", "a link", "the cache", "torchvision"])
@pytest.mark.parametrize("augmenting", [False, True])
def test_a_retained_image_or_its_features_cannot_be_opened(tmp_path, folder, through, augmenting):
    outside = tmp_path / "outside.png"
    linked = folder / "train" / "class-0" / "000.png"
    linked.rename(outside)
    linked.symlink_to(outside)

    def reach(request, retained):
        if through == "its name":
            for path in sorted(folder.rglob("*.png")):
                path.read_bytes()
        elif through == "a link":
            outside.read_bytes()
        elif through == "torchvision":
            for path in sorted(folder.rglob("*.png")):
                torchvision.io.decode_image(str(path))
        else:
            from safetensors.torch import load_file

            load_file(next((tmp_path / "sfu-cache" / "features").glob("*/*/features.safetensors")))

    probe = Probe(reach, augmentations=("flip",) if augmenting else ())
    metrics = run(image_config(folder), tmp_path / "run", methods={"probe": probe})
    assert "SourceFreeError" in metrics["rows"]["probe"]["error"]


def test_images_still_referenced_after_the_discard_are_noticed(tmp_path, folder):
    context = RunContext(image_config(folder), tmp_path, {})
    for stage in (prepare.load, prepare.extract, prepare.choose_forget_set, prepare.train):
        stage(context)
    held = context.data.train_images
    with pytest.raises(SourceFreeError, match="still referenced after the discard"):
        prepare.discard(context)
    assert len(held.names()) == 120


# --- what the views do


def test_views_enter_the_curvature_and_nothing_else(arrays):
    from sfu import unlearn
    from sfu.heads.settings import LinearSettings
    from sfu.heads.train import train_head
    from sfu.losses.quadratic import Quadratic

    features, labels = torch.from_numpy(arrays["train_features"]), torch.from_numpy(arrays["train_labels"])
    head = train_head(
        features, labels, 4, LinearSettings(l2=1e-2, bias=False), Quadratic(),
        seed=0, device=torch.device("cpu"), dtype=torch.float64,
    )  # fmt: skip
    rows, views = features[:60], torch.stack([features[:60] * 1.5, features[:60].flip(1)])
    request = ForgetRequest(head, rows, labels[:60], views_VFD=views)
    everything = torch.cat([rows, *views]).double()
    hessian = everything.T @ everything / 180 + 1e-2 * torch.eye(12, dtype=torch.float64)
    assert request.rows(torch.tensor([3, 5])).views_VFD.equal(views[:, [3, 5]])
    fixed = {"estimator": "closed_form", "regularization": "none"}
    stepped = unlearn(head, rows, labels[:60], views=views, curvature=fixed).head.parameters_CE
    step = torch.linalg.solve(hessian, request.newton_gradient().T).T
    torch.testing.assert_close(stepped, head.parameters_CE + 60 / 340 * step)
    for estimator in ("psd_fit", "ledoit_wolf", "oas"):
        fitted = unlearn(head, rows, labels[:60], views=views, curvature={"estimator": estimator, "on_doubt": "apply"})
        assert fitted.details["weight_forget"] + fitted.details["weight_views"] == pytest.approx(1)


def test_a_forget_set_with_more_copies_than_there_were_rows_is_fine(arrays):
    from sfu import unlearn
    from sfu.heads.linear import LinearHead

    head = LinearHead(torch.ones(4, 12), torch.zeros(4, 12), 1e-2, 100)
    rows, labels = torch.from_numpy(arrays["train_features"][:60]), torch.from_numpy(arrays["train_labels"][:60])
    given = {"estimator": "closed_form", "on_doubt": "apply"}
    result = unlearn(head, rows, labels, views=rows.repeat(3, 1, 1), curvature=given)
    assert result.applied
    assert result.details["weight_forget"] + result.details["weight_views"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("views", "message"),
    [(torch.zeros(1, 9, 12), r"are \[1, 9, 12\]\. Give \[views, 10, 12\]"), (torch.zeros(10, 12), "every view"),
     (torch.full((1, 10, 12), torch.nan), "NaN or infinite")],
)  # fmt: skip
def test_views_that_do_not_fit_are_refused(views, message):
    from sfu.heads.linear import LinearHead

    head = LinearHead(torch.zeros(4, 12), torch.zeros(4, 12), 1e-2, 100)
    with pytest.raises(DataError, match=message):
        ForgetRequest(head, torch.zeros(10, 12), torch.zeros(10, dtype=torch.int64), views_VFD=views)


def test_the_call_for_owners_takes_views_not_names(arrays):
    from sfu import LinearHead, unlearn

    head = LinearHead(torch.zeros(4, 12), torch.zeros(4, 12), 1e-2, 100)
    with pytest.raises(ConfigError, match="give the augmented features as views"):
        unlearn(head, torch.zeros(3, 12), torch.zeros(3, dtype=torch.int64), curvature={"augment": ["flip"]})


def test_an_estimator_that_knows_the_retained_curvature_takes_no_views():
    from sfu.unlearning.methods.newton import Newton

    with pytest.raises(ConfigError, match=r"curvature\.augment is not a setting of curvature=exact"):
        curvature_settings(estimator="exact", augment=["flip"])
    exact = Newton(curvature_settings(estimator="exact"))
    assert exact.access is Access.RETAINED
    assert exact.augmentations == ()
