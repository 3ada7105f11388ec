"""What a command would do: which results of every job are cached, what would be computed, and what downloaded.

A dry run downloads nothing. It imports PyTorch only to look a job up in a cache that holds something, because PyTorch's
number of threads and kind of device are part of every key, to check a backbone that was never built before, and to
estimate the time and memory of a job on a file of features, from the file's headers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sfu.config_files import config_dir
from sfu.data.settings import NO_BACKBONE
from sfu.files import human_size

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from sfu.experiment.config import RunConfig
    from sfu.experiment.estimate import Estimate

FLAG = "--dry-run"
MULTIRUN = ("-m", "--multirun")


@dataclass
class Tally:
    """Counts over the jobs of a dry run, and the size in bytes, where known, of all that would be downloaded."""

    jobs: int = 0
    cached: int = 0
    rows: int = 0
    rows_cached: int = 0
    downloads: dict[str, int | None] = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = {what: "size unknown" if size is None else human_size(size) for what, size in self.downloads.items()}
        jobs = f"{self.jobs} job{'s' * (self.jobs != 1)}: {self.cached} cached, {self.jobs - self.cached} to run"
        return "\n".join([
            *(f"would download {what} ({size})" for what, size in sizes.items()),
            f"{jobs}; {self.rows_cached} of {self.rows} rows are cached. Nothing was run or downloaded.",
        ])  # fmt: skip


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
        last = max((index for index, item in enumerate(kept) if "=" in item), default=len(kept) - 1)
        kept[last + 1 : last + 1] = _threads_under(given) + ours  # Hydra wants all settings in one place
        arguments[1:] = kept
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
    """Print what a job would read from the cache and what it would compute; note what it would download.

    Whether results are cached cannot be told before the data or weights that decide their keys are there.

    Raises:
        SfuError: The job would be refused before anything is computed.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from sfu.experiment.config import typed_config
    from sfu.experiment.job import open_cache
    from sfu.experiment.result_store import result_store
    from sfu.experiment.validate import validate
    from sfu.names import visible
    from sfu.unlearning.rows import make_methods

    hydra = HydraConfig.get()
    in_sweep = hydra.mode is RunMode.MULTIRUN
    typed = typed_config(config)
    validate(typed)
    make_methods(typed)
    downloads = missing_downloads(typed)
    tally.downloads |= downloads
    cache = None if downloads or not result_store().entries() else open_cache(typed, in_sweep=in_sweep)
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
    if (estimate := expected(typed, available)) is not None:
        print(estimate, flush=True)


def expected(config: RunConfig, available: list[str]) -> Estimate | None:
    """Estimate what a job takes, if the size of its data is told by headers of a file.

    Raises:
        ConfigError: It does not fit this machine's memory.
    """
    from sfu.data.datasets.base import FeatureDataset
    from sfu.heads.settings import LinearSettings

    if config.backbone.name != NO_BACKBONE or not isinstance(config.dataset, FeatureDataset):
        return None
    if not isinstance(config.head, LinearSettings) or (shape := config.dataset.shape()) is None:
        return None
    from sfu.experiment.estimate import expect, sizes_of_shape
    from sfu.experiment.validate import resolve_device
    from sfu.unlearning.rows import make_methods

    methods = make_methods(config)
    return expect(config, sizes_of_shape(shape, config), methods, resolve_device(config.device), available)


def missing_downloads(config: RunConfig) -> dict[str, int | None]:
    """Return what a run would download: addresses of data and weights, with their sizes in bytes where known.

    Raises:
        ConfigError: A setting cannot work.
        DataError: Data are missing and must not be downloaded.
    """
    from sfu.data.backbones.memo import recall
    from sfu.data.datasets.base import PublicDataset

    found: dict[str, int | None] = {}
    if config.backbone.name == NO_BACKBONE:
        return found
    if isinstance(config.dataset, PublicDataset):
        found |= {archive.url: archive.size for archive in config.dataset.to_download()}
    if recall(config.backbone) is None:  # one that was built before has its weights
        from sfu.data.backbones.library import library_of

        found |= library_of(config.backbone).to_download(config.backbone)
    return found
