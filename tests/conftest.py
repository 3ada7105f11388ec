"""Shared fixtures: a small dataset with known structure, every device present, and caches kept inside tmp_path."""

from __future__ import annotations

import gc
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slow tests: those left at the end are quick, and no process waits long for another."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Spare later collections of garbage what the imports have made: each run of sfu collects, for its contract."""
    gc.freeze()
    gc.enable()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


hypothesis.settings.register_profile("sfu", deadline=None, derandomize=True)
hypothesis.settings.load_profile("sfu")


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _caches_in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SFU_CACHE", str(tmp_path / "sfu-cache"))
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


def make_arrays(
    n_train: int = 400, n_test: int = 120, n_features: int = 12, n_classes: int = 4, seed: int = 0
) -> dict[str, np.ndarray]:
    """Gaussian classes with a shared anisotropic covariance: learnable, with a full-rank Gram matrix."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(n_classes, n_features))
    scales = np.geomspace(2.0, 0.2, n_features)

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(count) % n_classes
        rng.shuffle(labels)
        return (centers[labels] + scales * rng.normal(size=(count, n_features))).astype(np.float32), labels

    train, test = draw(n_train), draw(n_test)
    return {
        "train_features": train[0],
        "train_labels": train[1].astype(np.int64),
        "test_features": test[0],
        "test_labels": test[1].astype(np.int64),
    }


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    return make_arrays()


@pytest.fixture
def feature_file(tmp_path: Path, arrays: dict[str, np.ndarray]) -> Path:
    path = tmp_path / "features.npz"
    np.savez(path, **arrays)
    return path
