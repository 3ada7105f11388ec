"""After a sweep: collect its jobs into one table, whether or not all of them succeeded.

Hydra calls ``on_multirun_end`` only if every job succeeded, so the folder is noted at the start and the command
line aggregates when Hydra has returned or raised.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from sfu.errors import ArtifactError
from sfu.experiment.artifacts import read_metrics

_folder: Path | None = None


class RememberSweepFolder(Callback):
    """Hydra callback that notes where the jobs of this sweep write."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Note the sweep's folder, as an absolute path."""
        global _folder
        _folder = Path(config.hydra.sweep.dir).resolve()


def sweep_folder() -> Path | None:
    """The folder of the sweep that this process started, or ``None``."""
    return _folder


def collect(folder: Path) -> list[tuple[dict[str, str], dict[str, Any]]]:
    """Overrides and metrics of every job of a sweep, in order.

    A job that failed or never finished has ``{"error": why}`` in place of metrics.
    """
    jobs = sorted((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    return [_read_job(job) for job in jobs]


def _read_job(job: Path) -> tuple[dict[str, str], dict[str, Any]]:
    try:
        status = dict(json.loads((job / "status.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}, {"error": f"job {job.name} did not start"}
    overrides = dict(item.lstrip("+~").split("=", 1) for item in status["overrides"] if "=" in item)
    if status["state"] != "finished":
        error = status.get("error") or f"killed while {status['state']}"
        return overrides, {"error": f"job {job.name}: {str(error).splitlines()[0]}"}
    try:
        return overrides, read_metrics(job / "metrics.json")
    except ArtifactError as error:
        return overrides, {"error": f"job {job.name}: {error}"}
