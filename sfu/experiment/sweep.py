"""After a sweep: collect its jobs into one table, whether or not all of them succeeded; print and save it.

Hydra calls ``on_multirun_end`` only if every job succeeded, so the folder is noted at the start and the command
line aggregates when Hydra has returned or raised.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from sfu.errors import SfuError
from sfu.files import write_text
from sfu.names import visible
from sfu.results.aggregate import Run, aggregate
from sfu.results.artifacts import write_json
from sfu.results.run_folder import read_run, run_folders

if TYPE_CHECKING:
    from sfu.reporting.published import PublishedTable

_sweep: tuple[Path, datetime] | None = None


class RememberSweepFolder(Callback):
    """Hydra callback that notes where the jobs of this sweep write, and since when."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        global _sweep
        _sweep = Path(config.hydra.sweep.dir).resolve(), datetime.now(UTC)


def take_sweep() -> tuple[Path, datetime] | None:
    """Return folder and start of the sweep that this process started, and forget it; ``None`` if there is none."""
    global _sweep
    taken, _sweep = _sweep, None
    return taken


def collect(folder: Path, since: datetime | None = None) -> list[Run]:
    """Return overrides and metrics of every job of a sweep, in order of their numbers.

    A job that failed or never finished has ``{"error": why}`` in place of metrics. One that failed in some rows keeps
    the others.

    Args:
        folder: The sweep's folder; jobs may stand at any depth in it.
        since: Leave out jobs that started earlier, left by another sweep in the same folder.
    """
    jobs = [(run.job, run) for run in map(read_run, run_folders(folder)) if run.job is not None]
    jobs = [item for item in jobs if since is None or (item[1].started is not None and item[1].started >= since)]
    return [
        (run.overrides, {"error": f"job {job}: {run.problem}"} if run.metrics is None else run.metrics)
        for job, run in sorted(jobs, key=lambda item: item[0])
    ]


def report_sweep(folder: Path, since: datetime | None = None) -> None:
    """Aggregate the jobs in ``folder`` that started after ``since`` over their seeds, print and save the table.

    It becomes sweep.json, sweep.csv, sweep.md and sweep.png there; with ``published``, ours beside the paper's table is
    printed instead and becomes published.md and published.csv. A failure to write is reported and does not hide the
    jobs' own outcome.
    """
    from rich.console import Console

    from sfu.reporting.pictures.choose import save_sweep_plot
    from sfu.reporting.published import csv_published_table, markdown_published_table, terminal_published_table
    from sfu.reporting.terminal import terminal_table
    from sfu.reporting.text_tables import csv_table, markdown_table

    runs = collect(folder, since)
    if not runs:
        return
    table, published = aggregate(runs), _published(runs)
    Console().print(terminal_table(table) if published is None else terminal_published_table(table, published))
    try:
        if published is not None:
            write_text(folder / "published.md", markdown_published_table(table, published))
            write_text(folder / "published.csv", csv_published_table(table, published))
        write_json(folder / "sweep.json", table.to_json())
        write_text(folder / "sweep.csv", csv_table(table))
        write_text(folder / "sweep.md", markdown_table(table))
        if len(table.failed) < table.n_runs:
            save_sweep_plot(table, folder / "sweep.png")
    except (SfuError, OSError) as error:
        print(f"sfu: the sweep's table could not be saved: {visible(str(error))}", file=sys.stderr)
        return
    print(f"Saved in {visible(str(folder))}")


def _published(runs: Sequence[Run]) -> PublishedTable | None:
    """The table of the paper that all runs name."""
    from sfu.reporting.published import published_tables

    names = {metrics["run"].get("published") for _, metrics in runs if metrics and "run" in metrics}
    return published_tables().get(names.pop() or "") if len(names) == 1 else None
