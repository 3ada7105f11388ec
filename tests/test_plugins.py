"""What every registered dataset, backbone library, augmentation, head and logger must do, whoever registered it."""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass

import pytest
import torch

from sfu.data.augmentations import Augmentation
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
@pytest.mark.parametrize("channels", [1, 3])
def test_an_augmentation_keeps_size_and_type_and_repeats_itself(name, channels):
    image = torch.randint(0, 256, (channels, 9, 12), dtype=torch.uint8)
    before, change = image.clone(), Augmentation.named(name)()
    one, same = (change(image, torch.Generator().manual_seed(3)) for _ in range(2))
    assert (one.shape, one.dtype) == (image.shape, torch.uint8)
    assert torch.equal(one, same)
    assert torch.equal(image, before)


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
