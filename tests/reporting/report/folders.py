"""Run folders as `sfu` leaves them, made in a moment."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from tests.reporting.samples import catastrophic_run, shifted

CONFIG: dict[str, Any] = {
    "dataset": {"name": "digits", "path": None, "normalize_rows": True, "root": None, "download": True},
    "backbone": {"name": "none", "cache": None, "workers": None},
    "head": {"name": "linear", "l2": 5e-4},
    "loss": {"name": "quadratic"},
    "curvature": {"estimator": "psd_fit", "perturbations": None},
    "logger": {"name": "none"},
    "forget": {"fraction": 0.1, "classes": None},
    "methods": ["original", "retrained", "closed_form"],
    "variants": {},
    "seed": 0,
    "seed_for": {"split": None},
    "threads": None,
}


def config_with(**changes: Any) -> dict[str, Any]:
    config = deepcopy(CONFIG)
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = config
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return config


def write_run(
    folder: Path,
    metrics: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    *,
    overrides: tuple[str, ...] = (),
    started: str = "2026-11-27T23:08:00+00:00",
    **status: Any,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    record = {"state": "finished", "started": started, "overrides": list(overrides), "job": None, **status}
    (folder / "status.json").write_text(json.dumps(record))
    (folder / "config.yaml").write_text(yaml.safe_dump(config or config_with()))
    if metrics is not None:
        (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder


def write_sweep(
    root: Path, fractions: tuple[float, ...] = (0.05, 0.1, 0.15), seeds: int = 3, without: tuple[str, ...] = ()
) -> Path:
    """A sweep whose accuracies rise by a point a fraction and 0.2 a seed."""
    for index, fraction in enumerate(fractions):
        for seed in range(seeds):
            metrics = shifted(catastrophic_run(), 0.2 * seed + index)
            metrics["rows"] = {name: row for name, row in metrics["rows"].items() if name not in without}
            write_run(
                root / f"{index * seeds + seed}",
                metrics,
                config_with(forget__fraction=fraction, seed=seed),
                overrides=(f"forget.fraction={fraction}", f"seed={seed}"),
                job=index * seeds + seed,
            )
    return root


def killed_status() -> dict[str, Any]:
    """The record of a process of this machine that is no more."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return {"state": "running", "pid": done.pid, "host": platform.node()}
