"""After a sweep: collect its jobs into one table, whether or not all of them succeeded; print and save it.

Hydra calls ``on_multirun_end`` only if every job succeeded, so the folder is noted at the start and the command
line aggregates when Hydra has returned or raised.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from sfu.errors import ConfigError
from sfu.files import write_text
from sfu.names import visible
from sfu.readers import TEXT_BYTES, read_bytes
from sfu.results.aggregate import Run, aggregate
from sfu.results.artifacts import overwrite_json, write_json
from sfu.results.run_folder import FoundRun, read_run, run_folders

if TYPE_CHECKING:
    from sfu.reporting.published import PublishedTable

_ASKING_SECONDS, _POLL_SECONDS = 8.0, 0.05


@dataclass(frozen=True)
class Sweep:
    """The jobs below a folder, but for those that were there before.

    Attributes:
        folder: The sweep's folder; jobs may stand at any depth in it.
        before: The ``status.json`` of each run that another sweep has left there.
    """

    folder: Path
    before: Mapping[Path, bytes] = field(default_factory=dict)

    @classmethod
    def starting_in(cls, folder: Path) -> Sweep:
        """Return the sweep whose jobs are about to start in ``folder``."""
        return cls(folder, _records(folder))

    def jobs(self) -> list[FoundRun]:
        """Return the jobs that have started, in order of their numbers.

        Each has written a ``status.json`` of its own. No clocks are compared, because jobs may run on machines whose
        clocks disagree.
        """
        folders = [path for path, record in _records(self.folder).items() if self.before.get(path) != record]
        runs = [run for run in map(read_run, folders) if run.job is not None]
        return sorted(runs, key=lambda run: run.job or 0)

    def stop_jobs(self) -> None:
        """Ask the jobs that run in children of this process to stop, and give them a moment to record that."""
        children = {child.pid for child in multiprocessing.active_children()}
        asked, end = set[tuple[Path, int]](), time.monotonic() + _ASKING_SECONDS
        while children and time.monotonic() < end:
            running = {(run.folder, run.pid) for run in self.jobs() if run.state == "running" and run.pid in children}
            if not running:
                return
            for folder, pid in running - asked:
                with suppress(ProcessLookupError):
                    os.kill(pid or 0, signal.SIGTERM)
                asked.add((folder, pid or 0))
            time.sleep(_POLL_SECONDS)

    def settle(self) -> None:
        """Record that jobs whose process is gone were interrupted."""
        for run in self.jobs():
            if run.state == "killed":
                path = run.folder / "status.json"
                status = json.loads(path.read_text(encoding="utf-8"))
                overwrite_json(path, {**status, "state": "interrupted", "error": "interrupted: its process was killed"})


_sweep: Sweep | None = None


class PrepareSweep(Callback):
    """Hydra callback that turns ``seeds`` into a sweep over ``seed``, and notes where the jobs of this sweep write."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Note them; exit if two jobs would write into one folder, since Hydra makes a warning of any error here."""
        global _sweep
        if isinstance(config.seeds, int) and config.seeds > 1:
            _sweep_over_seeds(config)
        try:
            _require_own_folders(config)
        except ConfigError as error:
            print(f"sfu: {visible(str(error))}", file=sys.stderr)
            sys.exit(1)
        _sweep = Sweep.starting_in(Path(config.hydra.sweep.dir).resolve())


def _sweep_over_seeds(config: DictConfig) -> None:
    """Have Hydra run ``seeds`` seeds from ``seed`` on, unless the command line lists several itself."""
    overrides = config.hydra.overrides.task  # Hydra reads them next
    sweep = f"seed={','.join(str(config.seed + index) for index in range(config.seeds))}"
    keys = [one.key_or_group for one in OverridesParser.create().parse_overrides(list(overrides))]
    if "seed" not in keys:
        overrides.insert(0, sweep)
    elif isinstance(config.seed, int):
        overrides[len(keys) - 1 - keys[::-1].index("seed")] = sweep


def _require_own_folders(config: DictConfig) -> None:
    """Refuse a sweep of which two jobs would write into one folder, where the later replaces the earlier.

    Only jobs of Hydra's own sweeper are known beforehand.

    Raises:
        ConfigError: ``hydra.sweep.subdir`` is the same for two jobs.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.global_hydra import GlobalHydra

    sweeper = config.hydra.sweeper
    subdir = str(OmegaConf.to_container(config.hydra.sweep, resolve=False)["subdir"])  # type: ignore[call-overload,index]
    if "hydra.job.num" in subdir or not sweeper._target_.endswith(f".{BasicSweeper.__name__}"):
        return
    given = [*(f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()), *config.hydra.overrides.task]
    loader = GlobalHydra.instance().config_loader()
    jobs = BasicSweeper.split_arguments(OverridesParser.create(loader).parse_overrides(given), None)[0]
    used: dict[str, int] = {}
    for number, overrides in enumerate(jobs):
        composed = loader.load_sweep_config(config, overrides)
        folder = os.path.normpath(Path(config.hydra.sweep.dir).resolve() / str(composed.hydra.sweep.subdir))
        first = used.setdefault(folder, number)
        if first != number:
            remedy = shlex.quote(f"hydra.sweep.subdir={subdir}/${{hydra.job.num}}")
            raise ConfigError(
                f"hydra.sweep.subdir={subdir} is {folder} for job {first} and for job {number}, which would replace "
                f"each other's results. Leave it out, or give every job a folder of its own: {remedy}"
            )


def current_sweep() -> Sweep | None:
    """Return the sweep that this process has started, or ``None``."""
    return _sweep


def take_sweep() -> Sweep | None:
    """Return the sweep that this process has started, and forget it; ``None`` if there is none."""
    global _sweep
    taken, _sweep = _sweep, None
    return taken


def _records(folder: Path) -> dict[Path, bytes]:
    found = {}
    for path in run_folders(folder) if folder.is_dir() else []:
        with suppress(OSError, ValueError):
            found[path] = read_bytes(path / "status.json", TEXT_BYTES)
    return found


def collect(sweep: Sweep) -> list[Run]:
    """Return overrides and metrics of every job of a sweep, in order of their numbers.

    A job that failed or never finished has ``{"error": why}`` in place of metrics. One that failed in some rows keeps
    the others.
    """
    return [
        (
            {key: value for key, value in run.overrides.items() if key != "seeds"},
            {"error": f"job {run.job}: {run.problem}"} if run.metrics is None else run.metrics,
        )
        for run in sweep.jobs()
    ]


def report_sweep(sweep: Sweep) -> None:
    """Aggregate the jobs of a sweep over their seeds, print and save the table.

    It becomes sweep.json, sweep.csv, sweep.md, sweep.tex and sweep.png in its folder. With ``published``, ours beside
    the paper's table is printed instead and becomes published.md and published.csv.

    Raises:
        ArtifactError: A file cannot be written. The table is printed before.
    """
    from rich.console import Console

    from sfu.reporting.pictures.choose import save_sweep_plot
    from sfu.reporting.published import csv_published_table, markdown_published_table, terminal_published_table
    from sfu.reporting.terminal import print_verdicts, terminal_table
    from sfu.reporting.text_tables import csv_table, latex_table, markdown_table

    runs, folder = collect(sweep), sweep.folder
    if not runs:
        return
    seeds = sorted({key for overrides, _ in runs for key in overrides if key.startswith("seed_for.")})
    table, published = aggregate(runs, ["seed", *seeds]), _published(runs)
    console = Console()
    console.print(terminal_table(table) if published is None else terminal_published_table(table, published))
    print_verdicts(table, console)
    if published is not None:
        write_text(folder / "published.md", markdown_published_table(table, published))
        write_text(folder / "published.csv", csv_published_table(table, published))
    write_json(folder / "sweep.json", table.to_json())
    write_text(folder / "sweep.csv", csv_table(table))
    write_text(folder / "sweep.md", markdown_table(table))
    write_text(folder / "sweep.tex", latex_table(table))
    if len(table.failed) < table.n_runs:
        save_sweep_plot(table, folder / "sweep.png")
    print(f"Saved in {visible(str(folder))}")


def _published(runs: Sequence[Run]) -> PublishedTable | None:
    """The table of the paper that all runs name."""
    from sfu.reporting.published import published_tables

    names = {metrics["run"].get("published") for _, metrics in runs if metrics and "run" in metrics}
    return published_tables().get(names.pop() or "") if len(names) == 1 else None
