"""``sfu-unlearn HEAD FOLDER --backbone``: images to forget, through the network below the head."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file

import sfu
from sfu.data.images.decode import decode_image
from sfu.records.record import read_deletion_record
from tests.records.cases import everything, message_of, run, write_rows, write_training

CLASSES, PER_CLASS = ("cat", "dog", "owl"), 40
NETWORK = ["resnet18", "backbone.size=32", "backbone.mean=[0.5,0.5,0.5]", "backbone.std=[0.5,0.5,0.5]"]


@pytest.fixture(scope="module")
def model_and_images(tmp_path_factory) -> tuple[Path, torch.nn.Module, torch.Tensor]:
    """A folder with images of three classes and a ResNet-18 whose last layer was trained on them; both in memory."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    paths = []
    for label, name in enumerate(CLASSES):
        (folder / "all" / name).mkdir(parents=True)
        for number in range(PER_CLASS):
            pixels = rng.normal(60 + 60 * label, 50, size=(32, 32, 3)).clip(0, 255).astype(np.uint8)
            paths.append(folder / "all" / name / f"{number:02}.png")
            Image.fromarray(pixels).save(paths[-1])
    images = torch.stack([(decode_image(path.read_bytes(), 3).float() / 255 - 0.5) / 0.5 for path in paths])
    labels = torch.arange(3).repeat_interleave(PER_CLASS)
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=3).eval()
    model.fc = torch.nn.Identity()
    with torch.no_grad():
        features = model(images).double()
    head = sfu.fit(features, labels, l2=1e-2, loss="quadratic", bias=True)
    model.fc = torch.nn.Linear(512, 3)
    head.copy_to(model.fc)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    for label in (0, 2):  # nobody asks for a dog
        target = folder / "gone" / CLASSES[label]
        target.mkdir(parents=True)
        for path in paths[label * PER_CLASS : label * PER_CLASS + 20]:
            (target / path.name).write_bytes(path.read_bytes())
    return folder, model, torch.cat([images[:20], images[80:100]])


def training(tmp_path: Path, **changes: object) -> str:
    about = {"n_train": 120, "loss": "quadratic", "l2": 1e-2, "classes": list(CLASSES), "bound": 50.0}
    return write_training(tmp_path / "training.json", **(about | changes))


def test_images_go_through_the_network_of_the_checkpoint_and_leave_no_trace(model_and_images, tmp_path):
    folder, model, images = model_and_images
    new, cache = tmp_path / "new", tmp_path / "sfu-cache"
    given = [str(folder / "model.safetensors"), str(folder / "gone"), "--layer", "fc", "--training", training(tmp_path)]
    assert run(*given, "--out", str(new), "--apply", "--on-doubt", "apply", "--backbone", *NETWORK) == 0
    record = sfu.TrainingRecord(
        n_train=120, loss=sfu.make_loss("quadratic"), l2=1e-2, trained="optimum", classes=CLASSES
    )
    labels = torch.tensor([0] * 20 + [2] * 20)
    head = record.head(model.fc, bound=50.0)
    with torch.no_grad():
        body = torch.nn.Sequential(*list(model.children())[:-1], torch.nn.Flatten())
        wanted = sfu.unlearn(head, body(images), labels, on_doubt="apply").head
    made = sfu.load_head(new / "head")
    assert torch.allclose(made.parameters_CE, wanted.parameters_CE, atol=1e-5)
    assert (made.forgotten.rows, made.n_train) == (40, 80)
    assert read_deletion_record(new / "record-1.json").done.rows == 40
    assert [name for name in everything(cache) if "features" in name or "fingerprints" in name] == []
    # the folder has the network, so a later request needs the images alone
    assert run(str(new), str(folder / "gone"), "--in-place", "--backbone", *NETWORK) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--backbone", "resnet18", "head.l2=1"],
            r"--backbone resnet18 is followed by head\.l2=1, which is no",
        ),
        (["--backbone", "resnet18", "extra.npz"], r"put FORGET and other options before --backbone"),
        (["--backbone", "resnet99"], r"resnet99"),
        (["--backbone", "resnet50"], r"model\.safetensors does not fit this architecture"),
        (["--backbone", "resnet18", "backbone.weights=nowhere.pt"], r"backbone\.weights=nowhere\.pt is not a file"),
    ],
)
def test_a_backbone_that_does_not_fit_is_refused(model_and_images, tmp_path, capsys, arguments, message):
    folder, *_ = model_and_images
    given = [str(folder / "model.safetensors"), str(folder / "gone"), "--layer", "fc", "--training", training(tmp_path)]
    assert run(*given, *arguments) == 2
    assert re.search(message, message_of(capsys))


def test_folders_without_images_or_with_strange_classes_are_refused(model_and_images, tmp_path, capsys):
    folder, *_ = model_and_images
    for name in ("empty/cat", "strange/wolf", "loose"):
        (tmp_path / name).mkdir(parents=True)
    image = next((folder / "gone" / "cat").iterdir()).read_bytes()
    (tmp_path / "strange" / "wolf" / "1.png").write_bytes(image)
    (tmp_path / "loose" / "1.png").write_bytes(image)
    cases = {
        "empty": r"has no image in cat/", "strange": r"the label 'wolf' is no class of the head\. The classes are cat,",
        "loose": r"holds no folders", "nowhere": r"FORGET \S+ is no folder\. With --backbone, give a folder",
    }  # fmt: skip
    for name, message in cases.items():
        given = [str(folder / "model.safetensors"), str(tmp_path / name), "--layer", "fc"]
        assert run(*given, "--training", training(tmp_path), "--backbone", *NETWORK) == 2, name
        assert re.search(message, message_of(capsys)), name
    rows = write_rows(tmp_path / "a.npz")
    assert run(str(folder / "model.safetensors"), rows, "--layer", "fc", "--training", training(tmp_path),
               "--backbone", "resnet18") == 2  # fmt: skip
