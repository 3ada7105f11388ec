"""What a command would do: for every job, which results are kept from earlier runs and which would be computed."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from omegaconf import DictConfig

FLAG = "--dry-run"


@dataclass
class Tally:
    """Counts over the jobs looked at."""

    jobs: int = 0
    kept: int = 0
    rows: int = 0
    rows_kept: int = 0

    def sentence(self) -> str:
        """The last line."""
        whole = f"{self.jobs} job{'s' * (self.jobs != 1)}: {self.kept} kept whole, {self.jobs - self.kept} to run"
        return f"{whole}; of {self.rows} rows {self.rows_kept} kept. Nothing was run."


@contextmanager
def dry_run(arguments: list[str]) -> Iterator[Tally]:
    """Change the command's arguments so that its jobs, looked at one by one, leave nothing behind."""
    given = arguments[1:]
    with tempfile.TemporaryDirectory(prefix="sfu-dry-run-") as folder:
        ours = [f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}", "hydra.output_subdir=null"]
        theirs = ("launcher=", "hydra/launcher=", *(f"{item.split('=')[0]}=" for item in ours))
        arguments[1:] = [item for item in given if item != FLAG and not item.startswith(theirs)] + ours
        try:
            yield Tally()
        finally:
            arguments[1:] = given


def look_at_job(config: DictConfig, tally: Tally) -> None:
    """Print what a job would take and what it would compute.

    Raises:
        SfuError: The job would be refused before anything is computed.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from sfu.experiment.config import typed_config
    from sfu.experiment.job import kept_results
    from sfu.experiment.validate import validate
    from sfu.unlearning.rows import make_methods

    hydra = HydraConfig.get()
    in_sweep = hydra.mode is RunMode.MULTIRUN
    typed = typed_config(config)
    validate(typed)
    make_methods(typed)
    kept = kept_results(typed, in_sweep=in_sweep)
    there = kept.there()
    missing = [name for name in typed.methods if name not in there]
    tally.jobs += 1
    tally.rows += len(typed.methods)
    tally.rows_kept += len(typed.methods) - len(missing)
    shown = " ".join(str(item) for item in hydra.overrides.task) or "(defaults)"
    job = f"job {hydra.job.num}: {shown}" if in_sweep else shown
    if kept.has_run():
        tally.kept += 1
        print(f"{job}: kept")
        return
    parts = [*([] if "head" in there else ["training"]), *missing]
    print(f"{job}: would run {', '.join(parts) or 'the evaluation'}" + (f"; kept: {', '.join(there)}" if there else ""))
    sys.stdout.flush()
