"""What a command would do: which results of every job are cached, and which would be computed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sfu.config_files import config_dir

if TYPE_CHECKING:
    from omegaconf import DictConfig

FLAG = "--dry-run"


@dataclass
class Tally:
    """Counts over the jobs of a dry run."""

    jobs: int = 0
    cached: int = 0
    rows: int = 0
    rows_cached: int = 0

    def __str__(self) -> str:
        jobs = f"{self.jobs} job{'s' * (self.jobs != 1)}: {self.cached} cached, {self.jobs - self.cached} to run"
        return f"{jobs}; {self.rows_cached} of {self.rows} rows are cached. Nothing was run."


@contextmanager
def dry_run(arguments: list[str]) -> Iterator[Tally]:
    """Change the command's arguments so that its jobs run one after the other and leave no files.

    Jobs are looked up with the number of threads that the launcher would give them.
    """
    given = arguments[1:]
    with tempfile.TemporaryDirectory(prefix="sfu-dry-run-") as folder:
        ours = [f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}", "hydra.output_subdir=null"]
        theirs = (
            *("launcher=", "hydra/launcher=", "hydra.launcher."),
            *(f"{item.split('=')[0]}=" for item in ours),
        )
        kept = [item for item in given if item != FLAG and not item.startswith(theirs)]
        arguments[1:] = kept + _threads_under(given) + ours
        try:
            yield Tally()
        finally:
            arguments[1:] = given


def _threads_under(arguments: list[str]) -> list[str]:
    """The setting of ``threads`` that jobs have under a launcher that runs several side by side (joblib's)."""
    import yaml

    asked = dict(item.split("=", 1) for item in arguments if "=" in item)
    path = config_dir() / "launcher" / f"{asked.get('launcher')}.yaml"
    if "threads" in asked or not path.is_file():
        return []
    preset = yaml.safe_load(path.read_text(encoding="utf-8"))["hydra"].get("launcher", {})
    jobs = str(asked.get("hydra.launcher.n_jobs", preset.get("n_jobs")))
    if not jobs.removeprefix("-").isdigit():
        return []
    from joblib import cpu_count

    return [f"threads={max(1, cpu_count() // int(jobs) if int(jobs) > 0 else 1)}"]  # below 0: all cores


def inspect_job(config: DictConfig, tally: Tally) -> None:
    """Print what a job would read from the cache and what it would compute.

    Raises:
        SfuError: The job would be refused before anything is computed.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from sfu.experiment.config import typed_config
    from sfu.experiment.job import open_cache
    from sfu.experiment.validate import validate
    from sfu.names import visible
    from sfu.unlearning.rows import make_methods

    hydra = HydraConfig.get()
    in_sweep = hydra.mode is RunMode.MULTIRUN
    typed = typed_config(config)
    validate(typed)
    make_methods(typed)
    cache = open_cache(typed, in_sweep=in_sweep)
    available = [] if cache is None else cache.available()
    missing = [name for name in typed.methods if name not in available]
    tally.jobs += 1
    tally.rows += len(typed.methods)
    tally.rows_cached += len(typed.methods) - len(missing)
    job = visible(" ".join(str(item) for item in hydra.overrides.task)) or "(defaults)"
    if in_sweep:
        job = f"job {hydra.job.num}: {job}"
    if cache is not None and cache.has_run():
        tally.cached += 1
        print(f"{job}: cached")
        return
    todo = ", ".join([*([] if "head" in available else ["training"]), *missing]) or "the evaluation"
    print(f"{job}: would run {todo}" + (f"; cached: {', '.join(available)}" if available else ""), flush=True)
