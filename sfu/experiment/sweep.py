"""After a sweep: collect its jobs into one table, whether or not all of them succeeded.

Hydra calls ``on_multirun_end`` only if every job succeeded, so the folder is noted at the start and the command
line aggregates when Hydra has returned or raised.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from sfu.errors import ArtifactError
from sfu.experiment.artifacts import read_metrics

_sweep: tuple[Path, datetime] | None = None


class RememberSweepFolder(Callback):
    """Hydra callback that notes where the jobs of this sweep write, and since when."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Note the sweep's folder, as an absolute path, and the time."""
        global _sweep
        _sweep = Path(config.hydra.sweep.dir).resolve(), datetime.now(UTC)


def current_sweep() -> tuple[Path, datetime] | None:
    """Folder and start of the sweep that this process started, or ``None``."""
    return _sweep


def collect(folder: Path, since: datetime | None = None) -> list[tuple[dict[str, str], dict[str, Any]]]:
    """Overrides and metrics of every job of a sweep, in order of their numbers.

    A job that failed or never finished has ``{"error": why}`` in place of metrics.

    Args:
        folder: The sweep's folder; jobs may stand at any depth in it.
        since: Leave out jobs that started earlier, left by another sweep in the same folder.
    """
    found = []
    for path in folder.rglob("status.json"):
        try:
            status = dict(json.loads(path.read_text(encoding="utf-8")))
            started = datetime.fromisoformat(status["started"])
        except (OSError, ValueError, KeyError):
            continue
        if status.get("job") is not None and (since is None or started >= since):
            found.append((int(status["job"]), path.parent, status))
    return [_read_job(job, status) for _, job, status in sorted(found, key=lambda item: item[0])]


def _read_job(job: Path, status: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    overrides = dict(item.lstrip("+~").split("=", 1) for item in status["overrides"] if "=" in item)
    if status["state"] != "finished":
        error = status.get("error") or f"killed while {status['state']}"
        return overrides, {"error": f"job {status['job']}: {str(error).splitlines()[0]}"}
    try:
        return overrides, read_metrics(job / "metrics.json")
    except ArtifactError as error:
        return overrides, {"error": f"job {status['job']}: {error}"}
