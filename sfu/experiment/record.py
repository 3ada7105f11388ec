"""What ``metrics.json`` says of a run, of its data and of every row."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

import torch

import sfu
from sfu.experiment.context import RowResult, RunContext
from sfu.heads.base import Head
from sfu.heads.linearised.head import LinearisedHead
from sfu.unlearning.base import UnlearningMethod

_PACKAGES = (
    "torch", "torchvision", "pillow", "numpy", "scipy", "scikit-learn", "hydra-core", "omegaconf", "safetensors",
)  # fmt: skip


def describe_data(run: RunContext) -> dict[str, object]:
    """Counts and names of the data, and a fingerprint by which a reload knows them again."""
    data, n_forget = run.data, run.split.forget_F.numel()
    about: dict[str, object] = {
        "name": data.name, "path": run.config.dataset.path, "fingerprint": data.fingerprint(), "n_train": data.n_train,
        "n_forget": n_forget, "n_retain": data.n_train - n_forget, "n_test": data.test_labels_T.shape[0],
        "n_features": data.n_features, "n_classes": data.n_classes, "class_names": list(data.class_names) or None,
    }  # fmt: skip
    if data.train_images is not None:
        about |= {"backbone": asdict(run.config.backbone), "images": data.about_images}
    return about


def describe_run(run: RunContext, overrides: Sequence[str]) -> dict[str, Any]:
    """Versions, machine and settings of a run."""
    config, device, head = run.config, run.device, run.request.head
    return {
        "name": run.folder.name,
        "sfu_version": sfu.__version__,
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in _PACKAGES}},
        "device": str(device) if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})",
        "threads": torch.get_num_threads(),
        "dtype": config.dtype,
        "overrides": list(overrides),
        "published": config.published,
        "reused": run.cache.reused,
        "seeds": {"seed": config.seed, **run.seeds},
        "data": run.data_record,
        "forget": {"kind": run.split.kind, **asdict(config.forget)},
        "tune": {"rule": config.tune.value, "budget": config.tune_budget},
        "head": {
            "l2": config.head.l2, "bias": config.head.bias, "training": config.head.training.value,
            "gradient_norm": float(head.gradient_CE.norm()), "loss": head.loss.as_json(), **_describe_core(head),
        },
    }  # fmt: skip


def describe_row(method: UnlearningMethod, result: RowResult, scores: dict[str, Any]) -> dict[str, Any]:
    """One row of the table; ``scores`` is empty if the method failed."""
    row: dict[str, Any] = {"access": method.access.value, "tuning": method.tuning, **scores}
    if result.unlearned is None:
        row |= {"applied": False, "details": {}, "note": f"failed: {result.error}", "error": result.error}
    else:
        row |= {
            "applied": result.unlearned.applied,
            "predicted_distance_gain": result.unlearned.predicted_gain,
            "details": dict(result.unlearned.details),
            "note": result.unlearned.note,
        }
    return row | asdict(result.usage)


def _describe_core(head: Head) -> dict[str, Any]:
    if not isinstance(head, LinearisedHead):
        return {}
    return {"layers": list(head.core.components), "n_parameters": head.core.n_parameters, "core": head.core.digest}
