"""Features extracted once: cached by content, resumed at the chunk reached, shared by jobs, made again if damaged."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from sfu.cli import features as features_cli
from sfu.data.backbones.backbone import Backbone
from sfu.data.backbones.library import Pixels
from sfu.data.backbones.memo import remember
from sfu.data.backbones.transform import ImageTransform
from sfu.data.features.extract import Extractor
from sfu.data.images.decode import ImageError
from sfu.data.images.images import ArrayImages, AugmentedImages, FileImages
from sfu.data.settings import BackboneSettings
from sfu.errors import ArtifactError, DataError

CPU = torch.device("cpu")


class Counting(ArrayImages):
    """Images that count how often they are decoded, and can be told to fail."""

    def __init__(self, pixels: np.ndarray, what: str = "counted") -> None:
        super().__init__(pixels, what)
        self.decoded: list[int] = []
        self.stop_at: int | None = None
        self.damaged: set[int] = set()

    def decode(self, index: int) -> torch.Tensor:
        if index == self.stop_at:
            raise KeyboardInterrupt
        if index in self.damaged:
            raise ImageError(f"{self.name(index)} is damaged (on purpose)")
        self.decoded.append(index)
        return super().decode(index)


@pytest.fixture
def images() -> Counting:
    return Counting(np.random.default_rng(0).integers(0, 256, size=(50, 6, 5, 3), dtype=np.uint8))


def extractor(cache: Path, *, progress=None, say=lambda sentence: None, **settings) -> Extractor:
    config = BackboneSettings(**{"name": "pixels", "cache": str(cache), "batch_size": 7, **settings})
    return Extractor(config, CPU, progress=progress, say=say, chunk_rows=16)


def expected(images: ArrayImages) -> torch.Tensor:
    return torch.from_numpy(images.pixels_NHWK.transpose(0, 3, 1, 2).reshape(len(images), -1)) / 255


def chunks(cache: Path) -> list[Path]:
    """The folders of all chunks, in the order of their images."""
    folders = [path.parent for path in cache.glob("*/*/features.safetensors")]
    return sorted(folders, key=lambda folder: load_file(folder / "features.safetensors")["rows"].tolist())


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- extracted once


def test_features_are_those_of_every_image_in_order_and_are_extracted_once(tmp_path, images):
    progress: list[tuple[int, int]] = []
    first = extractor(tmp_path, progress=lambda *at: progress.append(at)).extract(images)
    torch.testing.assert_close(first.features_MD, expected(images), rtol=0, atol=1e-7)
    assert first.rows_M.tolist() == list(range(50))
    assert sorted(images.decoded) == list(range(50))
    assert progress[-1] == (50, 50)
    assert [at[0] for at in progress] == sorted(at[0] for at in progress)
    again = extractor(tmp_path).extract(images)
    assert again.features_MD.equal(first.features_MD)
    assert len(images.decoded) == 50
    assert len(chunks(tmp_path)) == 4


def test_a_second_run_does_not_even_build_the_backbone(monkeypatch, tmp_path, images):
    first = extractor(tmp_path).extract(images)
    monkeypatch.setattr(Pixels, "build", lambda settings: pytest.fail("the backbone was built again"))
    assert extractor(tmp_path).extract(images).features_MD.equal(first.features_MD)


@pytest.mark.parametrize(
    "change",
    [{"size": 4}, {"mean": [0.5] * 3, "std": [0.5] * 3}, {"dtype": "float64"}, {"dtype": "bfloat16"},
     {"name": "resnet18", "weights": "none"}],
    ids=lambda change: ",".join(change),
)  # fmt: skip
def test_whatever_decides_the_features_has_its_own_store(tmp_path, images, change):
    base = extractor(tmp_path).store(images).key
    assert extractor(tmp_path, **change).store(images).key != base
    assert extractor(tmp_path).store(AugmentedImages(images, "flip")).key != base
    assert extractor(tmp_path).store(images.take(range(49))).key != base
    other = images.pixels_NHWK.copy()
    other[17, 0, 0, 0] ^= 1
    assert extractor(tmp_path).store(ArrayImages(other, "counted")).key != base


@pytest.mark.parametrize("change", [{"batch_size": 50}, {"workers": 1}])
def test_whatever_does_not_decide_them_does_not(tmp_path, images, change):
    first = extractor(tmp_path).extract(images)
    again = extractor(tmp_path, **change).extract(images)
    assert again.features_MD.equal(first.features_MD)
    assert len(images.decoded) == 50


def test_random_weights_of_another_seed_are_another_backbone(tmp_path, images):
    keys = {extractor(tmp_path, name="resnet18", weights="none", seed=seed).store(images).key for seed in (0, 1)}
    assert len(keys) == 2


def test_a_weights_file_that_changes_is_another_backbone(tmp_path, images):
    from torchvision import models

    path = tmp_path / "weights.safetensors"
    keys = set()
    for seed in (0, 1):
        torch.manual_seed(seed)
        save_file(models.resnet18().state_dict(), path)
        keys.add(extractor(tmp_path / "cache", name="resnet18", weights=str(path)).store(images).key)
    assert len(keys) == 2


# --- interrupted


def test_an_interrupted_extraction_goes_on_at_the_chunk_it_had_reached(tmp_path, images):
    whole = extractor(tmp_path / "whole").extract(images)
    images.decoded.clear()
    images.stop_at = 40
    with pytest.raises(KeyboardInterrupt):
        extractor(tmp_path / "stopped").extract(images)
    assert len(chunks(tmp_path / "stopped")) == 2
    images.stop_at = None
    images.decoded.clear()
    resumed = extractor(tmp_path / "stopped").extract(images)
    assert sorted(images.decoded) == list(range(32, 50))
    assert resumed.features_MD.equal(whole.features_MD)
    for one, other in zip(chunks(tmp_path / "whole"), chunks(tmp_path / "stopped"), strict=True):
        assert files(one) == files(other)


_SLOW_JOB = """
import sys, time, numpy as np, torch
from sfu.data.features.extract import Extractor
from sfu.data.images.images import ArrayImages
from sfu.data.settings import BackboneSettings
cache, pixels, seconds = sys.argv[1:]
class Slow(ArrayImages):
    def decode(self, index):
        time.sleep(float(seconds))
        return super().decode(index)
config = BackboneSettings(name="pixels", cache=cache, batch_size=7, workers=1)
Extractor(config, torch.device("cpu"), chunk_rows=16).extract(Slow(np.load(pixels), "slow"))
"""


def slow_job(cache: Path, pixels: Path, seconds: float, n_chunks: int) -> subprocess.Popen:
    """A process that extracts features of an array, so many seconds an image, once it has written ``n_chunks``."""
    process = subprocess.Popen([sys.executable, "-c", _SLOW_JOB, str(cache), str(pixels), str(seconds)])
    deadline = time.monotonic() + 60
    while len(chunks(cache)) < n_chunks and time.monotonic() < deadline:
        time.sleep(0.005)
    return process


def test_a_process_killed_outright_leaves_whole_chunks_and_no_lock(tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, size=(400, 3, 3, 3), dtype=np.uint8)
    np.save(tmp_path / "pixels.npy", pixels)
    cache = tmp_path / "cache"
    process = slow_job(cache, tmp_path / "pixels.npy", 0.01, n_chunks=2)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    there = len(chunks(cache))
    assert 2 <= there < 25
    images = Counting(pixels, "slow")
    found = extractor(cache).extract(images)
    torch.testing.assert_close(found.features_MD, expected(images), rtol=0, atol=1e-7)
    assert sorted(images.decoded) == list(range(16 * there, 400))


# --- damaged and foreign files


def _cut_short(chunk: Path) -> None:
    path = chunk / "features.safetensors"
    path.write_bytes(path.read_bytes()[:-40])


def _one_bit(chunk: Path) -> None:
    data = bytearray((chunk / "features.safetensors").read_bytes())
    data[-100] ^= 1
    (chunk / "features.safetensors").write_bytes(data)


def _empty(chunk: Path) -> None:
    (chunk / "features.safetensors").write_bytes(b"")


def _another_chunk(chunk: Path) -> None:
    other = next(path for path in chunk.parent.iterdir() if path.is_dir() and path != chunk)
    shutil.rmtree(chunk)
    shutil.copytree(other, chunk)


def _of_another_content(chunk: Path) -> None:
    about = json.loads((chunk / "entry.json").read_text())
    (chunk / "entry.json").write_text(json.dumps({**about, "key": "0" * 32}))


def _without_digests(chunk: Path) -> None:
    about = json.loads((chunk / "entry.json").read_text())
    (chunk / "entry.json").write_text(json.dumps({"key": about["key"]}))


@pytest.mark.parametrize(
    "damage",
    [_cut_short, _one_bit, _empty, _another_chunk, _of_another_content, _without_digests],
    ids=lambda damage: damage.__name__.strip("_"),
)
def test_a_chunk_that_is_damaged_or_foreign_is_made_again_and_no_other(tmp_path, images, damage):
    whole = extractor(tmp_path).extract(images)
    images.decoded.clear()
    damage(chunks(tmp_path)[2])
    assert extractor(tmp_path).extract(images).features_MD.equal(whole.features_MD)
    assert sorted(images.decoded) == list(range(32, 48))


def test_the_description_of_an_entry_may_be_missing_or_damaged(tmp_path, images):
    whole = extractor(tmp_path).extract(images)
    (about,) = tmp_path.glob("*/entry.json")
    about.write_text("{")
    assert extractor(tmp_path).extract(images).features_MD.equal(whole.features_MD)
    about.unlink()
    assert extractor(tmp_path).extract(images).features_MD.equal(whole.features_MD)


def test_a_memo_of_a_backbone_that_is_not_what_it_was_is_noticed(tmp_path, images):
    first = extractor(tmp_path / "cache", name="resnet18", weights="none")
    key = first.store(images).key
    (path,) = (tmp_path / "sfu-cache" / "backbones").glob("*/record.json")
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, "weights": "0" * 64}))
    again = extractor(tmp_path / "cache", name="resnet18", weights="none")
    assert again.store(images).key == key  # a damaged record is not used
    remember(first.config, {**found, "weights": "0" * 64})
    with pytest.raises(DataError, match="is not the network it was when it was last built"):
        extractor(tmp_path / "cache", name="resnet18", weights="none").extract(images)
    extractor(tmp_path / "cache", name="resnet18", weights="none").extract(images)


# --- damaged images


def test_damaged_images_stop_the_extraction_by_name(tmp_path, images):
    images.damaged = {20, 21, 22, 49}  # the last of them two chunks later
    with pytest.raises(ImageError, match=r"4 of 50 images cannot.*image 20 of counted.*and 1 more, listed in .*=skip"):
        extractor(tmp_path).extract(images)
    assert len(chunks(tmp_path)) == 1  # what came before stays
    (listed,) = tmp_path.glob("*/damaged.txt")
    assert [line.split()[1] for line in listed.read_text().splitlines()] == ["20", "21", "22", "49"]


def test_or_they_are_left_out_and_listed(tmp_path, images):
    images.damaged = {0, 20, 49}
    found = extractor(tmp_path).extract(images, fail_on_damage=False)
    decoded = [index for index in range(50) if index not in images.damaged]
    assert found.rows_M.tolist() == decoded
    torch.testing.assert_close(found.features_MD, expected(images)[decoded], rtol=0, atol=1e-7)
    assert sorted(found.damaged) == [0, 20, 49]
    with pytest.raises(ImageError, match="image 0 of counted is damaged"):  # what was skipped once is not forgotten
        extractor(tmp_path).extract(images)


def test_a_whole_chunk_of_damage_and_nothing_but_damage(tmp_path, images):
    images.damaged = set(range(16))
    assert extractor(tmp_path / "a").extract(images, fail_on_damage=False).rows_M.tolist() == list(range(16, 50))
    images.damaged = set(range(50))
    with pytest.raises(DataError, match="none of the 50 images can be decoded"):
        extractor(tmp_path / "b").extract(images, fail_on_damage=False)


# --- what else may go wrong


def test_too_little_room_is_said_before_the_first_chunk(monkeypatch, tmp_path, images):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(ArtifactError, match=r"need 0\.0 MiB, but .* has 0\.0 MiB free\. Make room \(sfu-features ls"):
        extractor(tmp_path).extract(images)
    assert chunks(tmp_path) == []


def test_a_full_disk_keeps_what_was_written(monkeypatch, tmp_path, images):
    import safetensors.torch

    real, written = safetensors.torch.save_file, []

    def full_after_two(*arguments, **options):
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(1)
        return real(*arguments, **options)

    monkeypatch.setattr(safetensors.torch, "save_file", full_after_two)
    with pytest.raises(ArtifactError, match="No space left on device"):
        extractor(tmp_path).extract(images)
    assert len(chunks(tmp_path)) == 2
    assert not list(tmp_path.glob("*/.*"))


def test_a_cache_that_cannot_be_written_names_the_setting(tmp_path, images):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match=r"Set backbone\.cache to a folder"):
        extractor(tmp_path / "file").extract(images)


def test_features_that_are_not_finite_name_the_image(tmp_path, images):
    class Breaks(nn.Module):
        def forward(self, batch):
            return batch.flatten(1) / (batch[:, :1, 0, 0] - float(images.pixels_NHWK[19, 0, 0, 0]) / 255)

    broken = Backbone("broken", Breaks(), ImageTransform(), "flatten", torch.float32, "0" * 64)
    settings = BackboneSettings(name="pixels", cache=str(tmp_path), batch_size=7)
    with pytest.raises(DataError, match=r"NaN or infinite features for \d+ images \(first: image \d+ of counted\)"):
        Extractor(settings, CPU, backbone=broken).extract(images)


def test_images_of_several_sizes_need_one(tmp_path):
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for path, size in zip(paths, ((4, 4), (4, 6)), strict=True):
        Image.new("RGB", size).save(path)
    with pytest.raises(DataError, match=r"differ in size \(4 x 4, 4 x 6.*Set backbone\.size"):
        extractor(tmp_path / "cache").extract(FileImages(paths))
    assert extractor(tmp_path / "cache", size=4).extract(FileImages(paths)).features_MD.shape == (2, 48)


def test_features_are_those_of_the_library_at_its_own_size(monkeypatch, tmp_path, device):
    """Through the whole extraction: resized once and cropped once, as the weights' own transform does."""
    from torchvision import models

    torch.manual_seed(0)
    weights, model = models.ResNet18_Weights.DEFAULT, models.resnet18().eval()
    monkeypatch.setattr(models.ResNet18_Weights, "get_state_dict", lambda self, **options: model.state_dict())
    rng = np.random.default_rng(4)
    paths = []
    for index, shape in enumerate([(300, 400), (240, 100), (40, 30), (256, 256), (224, 224)]):
        paths.append(tmp_path / f"{index}.png")
        coarse = rng.integers(0, 256, size=(shape[0] // 10, shape[1] // 10, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize(shape[::-1], Image.Resampling.BICUBIC).save(paths[-1])
    config = BackboneSettings(name="resnet18", weights="default", cache=str(tmp_path / "cache"), batch_size=3)
    found = Extractor(config, device, say=lambda sentence: None).extract(FileImages(paths)).features_MD
    model.fc = nn.Identity()
    preset = weights.transforms()
    with torch.inference_mode():
        wanted = torch.cat([model(preset(Image.open(path).convert("RGB"))[None]) for path in paths])
    torch.testing.assert_close(found, wanted, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("settings", [{"batch_size": 3}, {"workers": 1}, {"batch_size": 50, "workers": 3}])
def test_neither_batches_nor_threads_change_the_features(tmp_path, images, settings):
    network = {"name": "resnet18", "weights": "none"}
    one = extractor(tmp_path / "a", **network).extract(images).features_MD
    other = extractor(tmp_path / "b", **{**network, **settings}).extract(images).features_MD
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_what_a_killed_writer_left_is_cleared_away_and_a_lost_description_is_written_again(tmp_path, images):
    extractor(tmp_path).extract(images)
    (about,) = tmp_path.glob("*/entry.json")
    left = about.with_name(".0123.4567")
    left.mkdir()
    (left / "half").write_bytes(b"half")
    about.unlink()
    extractor(tmp_path).extract(images)
    assert not left.exists()
    assert json.loads(about.read_text())["shown"]["chunks"] == 4


def test_an_image_too_long_to_resize_is_damage(tmp_path):
    Image.new("RGB", (8000, 2)).save(tmp_path / "long.png")
    with pytest.raises(ImageError, match=r"long\.png is 8000 x 2, too long and thin to resize its shorter side to 224"):
        extractor(tmp_path / "cache", size=224).extract(FileImages([tmp_path / "long.png"]))


# --- several processes


def test_while_another_job_extracts_the_same_features_this_one_waits(tmp_path, images):
    np.save(tmp_path / "pixels.npy", images.pixels_NHWK)
    cache = tmp_path / "cache"
    other = slow_job(cache, tmp_path / "pixels.npy", 0.05, n_chunks=1)
    said: list[str] = []
    found = extractor(cache, say=said.append).extract(images)
    assert other.wait() == 0
    assert said == ["waiting for another run that extracts the same features"]
    assert images.decoded == []
    torch.testing.assert_close(found.features_MD, expected(images), rtol=0, atol=1e-7)


@pytest.mark.slow
def test_two_ranks_give_the_same_bytes_as_one_process(tmp_path):
    """A real network under torchrun (gloo), over more than one chunk of the real size."""
    from torch.distributed.run import main as torchrun

    rng = np.random.default_rng(2)
    for label in ("a", "b"):
        folder = tmp_path / "images" / label
        folder.mkdir(parents=True)
        for index in range(1050):
            Image.fromarray(rng.integers(0, 256, size=(8, 8, 3), dtype=np.uint8)).save(folder / f"{index:04d}.png")
    settings = [
        "extract", "dataset=image_folder", f"dataset.path={tmp_path / 'images'}", "backbone=resnet18",
        "backbone.weights=none", "device=cpu",
    ]  # fmt: skip
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        torchrun(
            ["--nproc-per-node=2", "--master-port=0", "--standalone", "-m", "sfu.cli.features", *settings,
             f"backbone.cache={tmp_path / 'two'}"]
        )  # fmt: skip
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
    features_cli.main([*settings, f"backbone.cache={tmp_path / 'one'}"])
    ours, theirs = ([files(chunk) for chunk in chunks(tmp_path / cache)] for cache in ("one", "two"))
    assert len(ours) == 2
    assert ours == theirs
