"""A small head or checkpoint with rows to forget, and the command that serves a request from them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sfu.cli.unlearn import main
from tests.unlearning.cases import rows, trained

TRAINING = {"n_train": 400, "loss": {"name": "quadratic", "target_scale": 1.0}, "l2": 1e-2, "trained": "optimum"}


def write_rows(path: Path, first: int = 0, last: int = 40, **changes: object) -> str:
    """Write some of the training rows of :func:`tests.unlearning.cases.trained`."""
    features, labels = rows()
    arrays = {"features": features[first:last].numpy(), "labels": labels[first:last].numpy(), **changes}
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return str(path)


def write_head(folder: Path) -> str:
    trained().save(folder / "old")
    return str(folder / "old")


def state(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A model of two layers, the last of them trained, and a buffer of whole numbers."""
    generator = torch.Generator().manual_seed(0)
    return {
        "body.weight": torch.randn(12, 12, generator=generator).to(dtype),
        "fc.weight": trained().weight_CD.to(dtype).clone(),
        "body.steps": torch.tensor(7),
    }


def write_model(path: Path, content: object = None) -> str:
    content = state() if content is None else content
    if path.suffix == ".safetensors":
        save_file(content, path, {"format": "pt"})
    else:
        torch.save(content, path)
    return str(path)


def write_training(path: Path, **changes: object) -> str:
    path.write_text(json.dumps(TRAINING | changes))
    return str(path)


def run(*arguments: str) -> int:
    """Return the exit code of ``sfu-unlearn``."""
    try:
        main([*arguments])
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


def everything(folder: Path) -> dict[str, bytes]:
    """The content of all files, those of locks left out."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def message_of(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.removeprefix("sfu-unlearn: ").strip()
