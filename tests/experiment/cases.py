"""What tests of whole runs share: configurations, a folder of images, a method that looks around, and the command."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from PIL import Image

from sfu.cli import run as cli
from sfu.config_files import config_dir
from sfu.experiment import pipeline
from sfu.experiment.config import RunConfig, register, typed_config
from sfu.reporting.pictures import gaps
from sfu.request import Access, ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.result import UnlearningResult

ROWS = ["original", "retrained", "unlearned_plus", "unlearned_minus", "closed_form", "unlearned_minus_paper"]


def composed(*overrides: str) -> RunConfig:
    """The configuration that the command line would have."""
    return copy.deepcopy(_composed(overrides))


@functools.cache
def _composed(overrides: tuple[str, ...]) -> RunConfig:
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return typed_config(compose("sfu", overrides=list(overrides)))


def changed(config: RunConfig, **changes: object) -> RunConfig:
    """The configuration with some keys changed; ``head__l2`` is ``head.l2``."""
    for key, value in changes.items():
        group, _, last = key.rpartition("__")
        parents = group.split("__") if group else []
        node = functools.reduce(getattr, parents, config)
        assert hasattr(node, last), key
        if group == "loss":  # losses are frozen
            config.loss = dataclasses.replace(config.loss, **{last: value})
        else:
            setattr(node, last, value)
    return config


def config_for(path: Path | None = None, *overrides: str, **changes: object) -> RunConfig:
    """Six rows on a feature file, or on digits."""
    data = ["dataset=digits"] if path is None else ["dataset=features", f"dataset.path={path}"]
    defaults = [*data, "backbone=none", "logger=none", "curvature.perturbations=60"]
    config = composed(*{item.partition("=")[0]: item for item in (*defaults, *overrides)}.values())
    config.methods, config.forget.fraction = list(ROWS), None
    return changed(config, **changes)


def image_config(folder: Path, **changes: object) -> RunConfig:
    """One row on a folder of images, which are their own features."""
    config = composed("dataset=image_folder", f"dataset.path={folder}", "backbone=pixels", "logger=none")
    config.methods, config.forget.fraction = ["original"], None
    config.backbone.batch_size, config.head.l2 = 16, 1e-3
    return changed(config, **changes)


def run(config: RunConfig, folder: Path, **options: Any) -> dict[str, Any]:
    """Run without a progress bar."""
    folder.mkdir(exist_ok=True)
    return pipeline.run(config, folder, show_progress=False, **options)


def write_folder(root: Path, *, per_class: int = 40, n_test: int = 10, damaged: tuple[str, ...] = ()) -> Path:
    """Patterns of 3 classes, with noise, as PNG files of 6 x 6 pixels."""
    rng = np.random.default_rng(0)
    centers = rng.integers(40, 216, size=(3, 6, 6, 3))
    for part, count in (("train", per_class), ("test", n_test)):
        for label in range(3):
            folder = root / part / f"class-{label}"
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = (centers[label] + rng.normal(scale=40, size=(6, 6, 3))).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{index:03d}.png")
    for name in damaged:
        (root / name).write_bytes(b"no image")
    return root


class Probe(UnlearningMethod):
    """Changes nothing, and remembers what ``attempt(request, retained)`` returned."""

    def __init__(
        self,
        attempt: Callable[[ForgetRequest, RetainedSet | None], Any] = lambda request, retained: request,
        access: Access = Access.FORGET,
        augmentations: tuple[str, ...] = (),
    ) -> None:
        self._attempt, self._access, self._augmentations = attempt, access, augmentations
        self.found: Any = None

    @property
    def access(self) -> Access:
        return self._access

    @property
    def augmentations(self) -> tuple[str, ...]:
        return self._augmentations

    def unlearn(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None = None
    ) -> UnlearningResult:
        self.found = self._attempt(request, retained)
        return UnlearningResult(request.head)


def sfu(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command in this process and return its exit code; a run's picture is one pixel, as others look at it."""
    GlobalHydra.instance().clear()
    monkeypatch.setattr(gaps, "save_gap_plot", lambda metrics, path: Image.new("RGB", (1, 1)).save(path))
    monkeypatch.setattr(sys, "argv", ["sfu", *arguments])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        GlobalHydra.instance().clear()
    return 0
