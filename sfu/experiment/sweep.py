"""After a sweep: collect its jobs into one table, whether or not all of them succeeded.

Hydra calls ``on_multirun_end`` only if every job succeeded, so the folder is noted at the start and the command
line aggregates when Hydra has returned or raised.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from sfu.results.run_folder import FoundRun, read_run, run_folders

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
    found = [(run.job, run) for run in map(read_run, run_folders(folder)) if run.job is not None]
    jobs = [item for item in found if since is None or (item[1].started is not None and item[1].started >= since)]
    return [_result(run) for _, run in sorted(jobs, key=lambda item: item[0])]


def _result(run: FoundRun) -> tuple[dict[str, str], dict[str, Any]]:
    if run.metrics is not None:  # of a run that failed, too: its other rows are good
        return run.overrides, run.metrics
    return run.overrides, {"error": f"job {run.job}: {run.problem}"}
