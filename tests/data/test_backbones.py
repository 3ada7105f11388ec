"""Frozen backbones: evaluation mode always, the weights' own transform for every image, nothing unpickled."""

from __future__ import annotations

import re
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision import models

from sfu.data.backbones import torchvision_models
from sfu.data.backbones.backbone import Backbone, build_backbone, check_backbone
from sfu.data.backbones.transform import ImageTransform
from sfu.data.backbones.weights import read_state_dict
from sfu.data.settings import BackboneSettings
from sfu.errors import ConfigError, DataError

CPU = torch.device("cpu")


def images(count: int, height: int = 40, width: int = 48, channels: int = 3, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator))


def config(**settings) -> BackboneSettings:
    return BackboneSettings(**{"name": "resnet18", "weights": "none", **settings})


def features(backbone: Backbone, batch: list[torch.Tensor]) -> torch.Tensor:
    return backbone.features(backbone.transform.pixels(batch)).cpu()


def prepared(transform: ImageTransform, batch: list[torch.Tensor], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return transform.normalized(transform.pixels(batch), CPU, dtype)


@pytest.fixture(scope="module")
def resnet():
    return build_backbone(config())


# --- evaluation mode


def test_a_batch_changes_nothing_and_its_company_does_not_matter(resnet):
    """Not even if somebody switches to training mode: statistics of a batch never enter."""
    batch = images(6)
    before = {name: tensor.clone() for name, tensor in resnet.module.state_dict().items()}
    resnet.module.train()
    together = features(resnet, batch)
    assert not any(module.training for module in resnet.module.modules())
    assert all(tensor.equal(before[name]) for name, tensor in resnet.module.state_dict().items())
    torch.testing.assert_close(
        torch.cat([features(resnet, [image]) for image in batch]), together, rtol=1e-4, atol=1e-5
    )
    assert not together.requires_grad


def test_in_training_mode_company_would_matter(resnet):
    """The fault the test above guards against is real, and it would be seen."""
    batch = prepared(resnet.transform, images(6))
    with torch.no_grad():
        module = build_backbone(config()).module.train()
        alone_and_together = module(batch)[:2], module(batch[:2])
    assert (alone_and_together[0] - alone_and_together[1]).abs().max() > 1e-2


# --- transforms


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0", "mobilenet_v3_small"])
def test_the_transform_is_that_of_the_weights(name):
    """The library's own preset on the image as Pillow opens it, of every shape: larger, smaller, wide, tall."""
    from PIL import Image

    weights = models.get_model_weights(name).DEFAULT
    transform = torchvision_models._transform(weights, resized=True)
    for height, width in ((300, 280), (32, 32), (64, 200), (257, 100)):
        (image,) = images(1, height, width)
        expected = weights.transforms()(Image.fromarray(image.permute(1, 2, 0).numpy()))
        levels = (prepared(transform, [image])[0] - expected).abs() * 255 * min(transform.std)
        assert float(levels.max()) < (1.01 if transform.interpolation == "bilinear" else 2.01)
        assert float((levels > 0.5).float().mean()) < 0.02  # on noise, the hardest; rounding through floats gives 0.25


def test_images_of_one_size_together_equal_one_by_one():
    transform = ImageTransform(24, 20, "bilinear", (0.4, 0.5, 0.6), (0.2, 0.3, 0.2))
    wide = images(2, 30, 60)
    mixed = [*images(2), wide[0], *images(2, seed=1), wide[1]]
    together = prepared(transform, mixed)
    alone = [prepared(transform, [image]) for image in mixed]
    assert together.equal(torch.cat(alone))


def test_sizes_that_differ_need_a_crop():
    with pytest.raises(DataError, match=r"differ in size \(48 x 40, 60 x 30.*Set backbone\.size"):
        prepared(ImageTransform(), [*images(1), *images(1, 30, 60)])


def test_random_weights_leave_the_size_alone_and_a_size_can_be_set(resnet):
    assert resnet.transform.resize is None
    assert resnet.transform.crop is None
    chosen = build_backbone(config(size=32, mean=[0.1, 0.2, 0.3], std=[1.0, 1.0, 0.5])).transform
    assert (chosen.resize, chosen.crop, chosen.mean, chosen.std) == (32, 32, (0.1, 0.2, 0.3), (1.0, 1.0, 0.5))


def test_greyscale_goes_into_a_network_of_colours(resnet):
    grey = images(2, channels=1)
    torch.testing.assert_close(features(resnet, grey), features(resnet, [image.repeat(3, 1, 1) for image in grey]))


def test_pixels_are_the_pixels():
    batch = images(3, 2, 2)
    torch.testing.assert_close(
        features(build_backbone(config(name="pixels")), batch), torch.stack(batch).flatten(1) / 255
    )


# --- cutting


@pytest.mark.parametrize(
    ("name", "size", "width"),
    [("resnet18", 32, 512), ("mnasnet0_5", 32, 1280), ("squeezenet1_1", 40, 512), ("mobilenet_v3_small", 32, 1024),
     ("densenet121", 32, 1024), ("googlenet", 32, 1024), ("convnext_tiny", 32, 768)],
)  # fmt: skip
def test_the_cut_is_right_before_the_last_layer(name, size, width):
    torch.manual_seed(0)
    whole = models.get_model(name, weights=None, **torchvision_models.quiet(name)).eval()
    cut = build_backbone(config(name=name))
    fed = {}
    other = models.get_model(name, weights=None, **torchvision_models.quiet(name))
    last = whole.get_submodule(torchvision_models.remove_last_layer(other))
    last.register_forward_hook(lambda module, inputs, output: fed.setdefault("input", inputs[0]))
    batch = prepared(cut.transform, images(2, size, size))
    with torch.inference_mode():
        whole(batch)
    found = features(cut, images(2, size, size))
    assert found.shape == (2, width)
    pooled = fed["input"].mean((2, 3)).relu() if fed["input"].ndim == 4 else fed["input"]
    torch.testing.assert_close(found, pooled, rtol=1e-4, atol=1e-5)


def test_a_network_of_fixed_size_says_which_setting_to_change():
    with pytest.raises(DataError, match=r"vit_b_32 cannot take images of \(3, 40, 48\).*Set backbone\.size"):
        features(build_backbone(config(name="vit_b_32")), images(1))


# --- weights


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return {name: tensor.clone() for name, tensor in models.resnet18(num_classes=10).state_dict().items()}


def test_random_weights_follow_their_seed_and_leave_the_global_generator_alone():
    torch.manual_seed(3)
    first = build_backbone(config()).digest
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert drawn.equal(torch.rand(1))
    assert build_backbone(config()).digest == first
    assert build_backbone(config(seed=1)).digest != first


@pytest.mark.parametrize("form", ["safetensors", "pt", "wrapped", "parallel"])
def test_a_local_file_of_weights_is_loaded_whatever_its_wrapping_and_its_classes(tmp_path, state, form):
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pth")
    if form == "safetensors":
        save_file(state, path)
    else:
        prefixed = {f"module.{name}": tensor for name, tensor in state.items()} if form == "parallel" else state
        torch.save({"state_dict": prefixed, "epoch": 3} if form != "pt" else prefixed, path)
    backbone = build_backbone(config(weights=str(path)))
    assert backbone.module.state_dict()["layer4.1.bn2.running_var"].equal(state["layer4.1.bn2.running_var"])
    assert backbone.module.conv1.weight.equal(state["conv1.weight"])
    assert backbone.transform == torchvision_models._transform(models.ResNet18_Weights.DEFAULT, resized=True)


class Payload:
    def __reduce__(self):
        return (print, ("pickled code ran",))


def test_a_file_with_code_in_it_is_refused_and_the_code_not_run(tmp_path, capsys):
    torch.save({"conv1.weight": torch.zeros(1), "extra": Payload()}, tmp_path / "w.pth")
    with pytest.raises(DataError, match=r"more than tensors \(.*print\), which sfu never unpickles"):
        build_backbone(config(weights=str(tmp_path / "w.pth")))
    assert "ran" not in capsys.readouterr().out


class Bomb:
    def __reduce__(self):
        return bytearray, (10**10,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_weights_gets_no_more_memory_than_it_has(tmp_path, zipped):
    path, tensors = tmp_path / "a.pt", {"w": torch.zeros(1 << 20)}
    torch.save({**tensors, "more": Bomb()}, path, _use_new_zipfile_serialization=zipped)
    bombs = [path.read_bytes()]
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    if zipped:
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as packed:
            for name in archive.namelist():
                packed.writestr(name, bytes(80 << 20) if name.endswith("data/0") else archive.read(name))
        bombs.append((tmp_path / "b.pt").read_bytes())
    else:
        bombs.append(path.read_bytes().replace(b"ctorch", b"B\xff\xff\xff\x7f", 1))  # bytes, 2 GiB of them
    for bomb in bombs:
        path.write_bytes(bomb)
        tracemalloc.start()
        with pytest.raises(DataError, match=r"bytearray|may be meant to fill|cannot be read"):
            read_state_dict(path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
        tracemalloc.stop()


def test_weights_of_another_architecture_damaged_or_not_finite_are_refused(tmp_path, state):
    save_file(state, tmp_path / "resnet18.safetensors")
    with pytest.raises(DataError, match=r"does not fit this architecture: it lacks layer1\.2\.conv1\.weight"):
        build_backbone(config(name="resnet34", weights=str(tmp_path / "resnet18.safetensors")))
    broken = torch.full_like(state["conv1.weight"], float("nan"))
    save_file({**state, "conv1.weight": broken}, tmp_path / "nan.safetensors")
    with pytest.raises(DataError, match=r"NaN or infinite values in conv1\.weight"):
        build_backbone(config(weights=str(tmp_path / "nan.safetensors")))
    whole = (tmp_path / "resnet18.safetensors").read_bytes()
    for name, data in (("cut.safetensors", whole[:-100]), ("cut.pth", whole[:50]), ("empty.pth", b"")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match="cannot be read"):
            build_backbone(config(weights=str(tmp_path / name)))
    torch.save({"epoch": 3}, tmp_path / "none.pth")
    with pytest.raises(DataError, match="holds no tensors by name"):
        build_backbone(config(weights=str(tmp_path / "none.pth")))


def test_without_a_network_the_error_says_where_to_put_the_weights(monkeypatch):
    def offline(self, *arguments, **options):
        raise OSError("Name or service not known")

    monkeypatch.setattr(models.ResNet18_Weights, "get_state_dict", offline)
    with pytest.raises(DataError, match=r"place https://.*resnet18-.*\.pth at .*checkpoints/resnet18-.*\.pth"):
        build_backbone(config(weights="default"))


def test_default_weights_are_loaded_by_the_library_itself_old_names_included(monkeypatch):
    """The published vit files say mlp.linear_1, which torchvision translates to mlp.0 as it loads them."""
    torch.manual_seed(5)
    state = models.vit_b_32().state_dict()
    old = {
        re.sub(r"mlp\.0\.", "mlp.linear_1.", name.replace("mlp.3.", "mlp.linear_2.")): t for name, t in state.items()
    }
    assert old.keys() != state.keys()
    monkeypatch.setattr(models.ViT_B_32_Weights, "get_state_dict", lambda self, **options: dict(old))
    loaded = build_backbone(config(name="vit_b_32", weights="default")).module
    assert loaded.encoder.layers[0].mlp[0].weight.equal(state["encoder.layers.encoder_layer_0.mlp.0.weight"])


def test_old_names_in_a_local_file_are_translated(tmp_path):
    torch.manual_seed(6)
    state = models.densenet121().state_dict()
    old = {re.sub(r"(denselayer\d+\.(?:norm|conv))([12])", r"\1.\2", name): tensor for name, tensor in state.items()}
    old = {name: tensor for name, tensor in old.items() if not name.endswith("num_batches_tracked")}
    assert "features.denseblock1.denselayer1.norm.1.weight" in old
    save_file(old, tmp_path / "old.safetensors")
    loaded = build_backbone(config(name="densenet121", weights=str(tmp_path / "old.safetensors"))).module
    name = "features.denseblock4.denselayer16.conv2.weight"
    assert loaded.state_dict()[name].equal(state[name])


# --- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "resnet19"}, r"backbone\.name=resnet19 is not a classification model.*resnet18"),
        ({"library": "keras"}, r"backbone\.library=keras is unknown\. Choose one of timm, torchvision"),
        ({"weights": "nowhere.pth"}, r"backbone\.weights=nowhere\.pth is not a file"),
        ({"size": 0}, r"backbone\.size=0\. Give a whole number of at least 1"),
        ({"batch_size": 0}, r"backbone\.batch_size=0"),
        ({"workers": 0}, r"backbone\.workers=0"),
        ({"dtype": "int8"}, r"backbone\.dtype=int8 is unknown"),
        ({"mean": [0.5]}, r"backbone\.mean and backbone\.std belong together"),
        ({"mean": [0.5], "std": [0.0]}, r"std must be above 0"),
        ({"mean": [124.0] * 3, "std": [58.0] * 3}, r"must describe pixels in 0\.\.1 \(divide by 255\)"),
        ({"mean": [0.5] * 2, "std": [0.5] * 2}, r"Give 1 or 3 values of each"),
        ({"mean": [0.5] * 3, "std": [0.5]}, r"Give 1 or 3 values of each"),
        ({"name": "pixels", "weights": "file.pth"}, r"has no effect on backbone=pixels"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_built(settings, message):
    with pytest.raises(ConfigError, match=message):
        check_backbone(config(**settings))


def test_timm_is_optional_and_its_absence_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r"backbone\.library=timm needs timm.*sfu\[timm\]"):
        check_backbone(config(library="timm", name="resnet18"))


class FakeTimm:
    """timm's public surface as sfu uses it, so that the path is tested where timm is not installed."""

    class data:
        @staticmethod
        def resolve_model_data_config(model):
            return {
                "input_size": (3, 28, 28), "crop_pct": 0.875, "interpolation": "bicubic",
                "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5),
            }  # fmt: skip

    @staticmethod
    def is_model(name):
        return name == "tiny"

    @staticmethod
    def list_models():
        return ["tiny"]

    @staticmethod
    def create_model(name, pretrained, num_classes):
        assert num_classes == 0
        if pretrained:
            raise OSError("hub unreachable")
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        model.pretrained_cfg = {"classifier": "head"}
        return model


def test_timm_models_are_built_without_classifier_with_their_own_transform(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "timm", FakeTimm)
    monkeypatch.setitem(sys.modules, "timm.data", FakeTimm.data)
    backbone = build_backbone(config(library="timm", name="tiny"))
    assert features(backbone, images(2)).shape == (2, 4)
    weights = {"0.weight": torch.ones(4, 3, 3, 3), "0.bias": torch.zeros(4), "head.weight": torch.zeros(9, 4)}
    save_file(weights, tmp_path / "tiny.safetensors")
    local = build_backbone(config(library="timm", name="tiny", weights=str(tmp_path / "tiny.safetensors")))
    assert (local.transform.resize, local.transform.crop, local.transform.interpolation) == (32, 28, "bicubic")
    assert local.module[0].weight.eq(1).all()
    with pytest.raises(DataError, match=r"hub unreachable.*set backbone\.weights"):
        build_backbone(config(library="timm", name="tiny", weights="default"))
    with pytest.raises(ConfigError, match=r"backbone\.name=tinny is not a model of timm\. Near: tiny"):
        check_backbone(config(library="timm", name="tinny"))


def test_a_real_timm_model(tmp_path):
    timm = pytest.importorskip("timm")
    found = features(build_backbone(config(library="timm", name="mobilenetv3_small_050", size=64)), images(2))
    assert found.shape == (2, timm.create_model("mobilenetv3_small_050", num_classes=0).head_hidden_size)


def test_other_dtypes_give_float32_features_and_double_precision_stays(device):
    single = features(build_backbone(config()).to(device), images(4))
    half = features(build_backbone(config(dtype="bfloat16")).to(device), images(4))
    double = features(build_backbone(config(dtype="float64")).to(device), images(4))
    assert (single.dtype, half.dtype, double.dtype) == (torch.float32, torch.float32, torch.float64)
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-5)
    relative = (half.double() - double).norm() / double.norm()
    assert 1e-5 < float(relative) < 0.05


def test_normalising_is_done_in_numpy_terms():
    (image,) = images(1, 4, 4)
    transform = ImageTransform(mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    mean, std = (np.array(values)[:, None, None] for values in (transform.mean, transform.std))
    expected = (image.numpy() / 255 - mean) / std
    np.testing.assert_allclose(prepared(transform, [image], torch.float64)[0].numpy(), expected, atol=1e-6)
