"""What every registered dataset, backbone library, augmentation, head and logger must do, whoever registered it."""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from sfu.data.augmentations import Augmentation, Mixture
from sfu.data.backbones.library import BackboneLibrary
from sfu.data.datasets.base import Dataset, FeatureDataset, ImageDataset
from sfu.data.settings import BackboneSettings
from sfu.errors import ConfigError
from sfu.heads.settings import HeadSettings
from sfu.reporting.loggers.base import RunLogger
from tests.reporting.samples import good_run


@pytest.mark.parametrize("name", Dataset.names())
def test_a_dataset_offers_features_or_images_under_its_name(name):
    kind = Dataset.named(name)
    assert issubclass(kind, FeatureDataset | ImageDataset)
    assert is_dataclass(kind)
    assert not inspect.isabstract(kind)
    assert kind().name == name
    with pytest.raises(ConfigError, match=rf"dataset\.colour is not a setting of dataset={name}\."):
        Dataset.make(name, colour="red")


@pytest.mark.parametrize("name", HeadSettings.names())
def test_a_head_refuses_settings_it_does_not_have(name):
    assert HeadSettings.named(name)().name == name
    with pytest.raises(ConfigError, match=rf"head\.colour is not a setting of head={name}\."):
        HeadSettings.make(name, colour="red")
    with pytest.raises(ConfigError, match=r"head\.l2=-1\.0"):
        HeadSettings.make(name, l2=-1)


@pytest.mark.parametrize("name", BackboneLibrary.names())
def test_a_library_refuses_a_model_it_does_not_have(name):
    if name == "timm":
        pytest.importorskip("timm")
    with pytest.raises(ConfigError, match=r"backbone\.name=resnet_of_nobody"):
        BackboneLibrary.named(name).check(BackboneSettings(name="resnet_of_nobody", library=name))


@pytest.mark.parametrize("name", Augmentation.names())
@hypothesis.settings(max_examples=15)
@hypothesis.given(
    channels=st.sampled_from([1, 3]), height=st.integers(1, 20), width=st.integers(1, 20), seed=st.integers(0, 2**31)
)
@hypothesis.example(channels=1, height=1, width=1, seed=0)
@hypothesis.example(channels=3, height=9, width=12, seed=3)
def test_an_augmentation_keeps_size_and_type_and_repeats_itself(name, channels, height, width, seed):
    image, other = torch.randint(
        0, 256, (2, channels, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    before, partner, change = image.clone(), other.clone(), Augmentation.named(name)()

    def copy():
        drawn = torch.Generator().manual_seed(seed)
        return change.mix(image, other, drawn) if isinstance(change, Mixture) else change(image, drawn)

    one, same = copy(), copy()
    assert (one.shape, one.dtype) == (image.shape, torch.uint8)
    assert torch.equal(one, same)
    assert torch.equal(image, before)
    assert torch.equal(other, partner)


@pytest.mark.parametrize("name", RunLogger.names())
def test_a_logger_records_a_run_in_its_folder_alone(name, tmp_path, monkeypatch):
    if name == "tensorboard":
        pytest.importorskip("tensorboard")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    folder = tmp_path / "run"
    folder.mkdir()
    with RunLogger.make(name) as logger:
        logger.start({"seed": 0}, {"name": "run", "folder": str(folder)})
        logger.log_stage("prepare", 0.5)
        logger.log_result(good_run())
        logger.log_files(folder)
    assert list(elsewhere.iterdir()) == []
    assert (list(folder.iterdir()) == []) == (name == "none")
