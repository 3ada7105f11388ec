"""One experiment from configuration to metrics: a list of stages over one :class:`RunContext`.

Training data exist only from :func:`~sfu.experiment.prepare.load` to :func:`~sfu.experiment.prepare.discard`, and again
from :func:`~sfu.experiment.prepare.reload` on. Source-free methods run in between, where loading the data or opening
their files raises an error.
"""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import sfu
from sfu.experiment import prepare, rows
from sfu.experiment.cache import StageCache
from sfu.experiment.config import RunConfig
from sfu.experiment.context import RunContext
from sfu.experiment.estimate import expect, sizes_of
from sfu.experiment.row_process import ROW_PROCESS
from sfu.experiment.validate import validate
from sfu.heads.settings import LinearSettings
from sfu.isolation.sandbox import NOTHING, protections
from sfu.isolation.server import server_of
from sfu.progress import ProgressDisplay
from sfu.results.artifacts import METRICS_SCHEMA, finite
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.rows import check_row_names, make_methods

_PACKAGES = (
    "torch", "torchvision", "pillow", "numpy", "scipy", "scikit-learn", "hydra-core", "omegaconf", "safetensors",
)  # fmt: skip


def run(
    config: RunConfig,
    folder: Path,
    *,
    methods: Mapping[str, UnlearningMethod] | None = None,
    overrides: Sequence[str] = (),
    show_progress: bool = True,
    on_stage: Callable[[str, float], None] = lambda name, seconds: None,
    cache: StageCache | None = None,
) -> dict[str, Any]:
    """Run an experiment, write heads and split into ``folder``, and return the metrics (schema 1).

    Args:
        config: The whole configuration.
        folder: An existing folder.
        methods: Methods by row name, in place of those that ``config.methods`` names. Nothing is cached then.
        overrides: What the user changed, for the record.
        show_progress: Show a progress bar on a terminal.
        on_stage: Called with the name and the seconds of every finished stage.
        cache: Results of earlier runs; none by default.

    Raises:
        ConfigError: A setting cannot work, or the memory is too small. Most are checked before any data are loaded.
        DataError: The data or the forget set cannot be used.
        SfuError: Training failed.
    """
    started, clock = datetime.now(UTC), time.perf_counter()
    validate(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision("highest")  # no TF32 in curvature and solves
    named = methods is None
    if named and protections(isolate=config.isolate) != NOTHING:
        server_of(ROW_PROCESS)  # it loads while the data do
    with ProgressDisplay(show_progress) as display:
        cache = cache if named else None
        made = methods or make_methods(config)
        check_row_names(made)
        context = RunContext(config, folder, made, display, on_stage, cache, named)
        rows.check_augmentations(context)
        with context.timed("prepare"):
            prepare.load(context)
            prepare.check_forget_set(context)
            prepare.pretrain_core(context)
            prepare.extract(context)
            prepare.choose_forget_set(context)
            _estimate(context, clock)
            prepare.train(context)
        prepare.save_inputs(context)
        prepare.discard(context)
        rows.run_source_free_rows(context)
        prepare.reload(context)
        rows.run_rows_with_data(context)
        table = rows.evaluate(context)
    about = _describe_run(context, overrides)
    about |= {"started": started.isoformat(timespec="seconds"), "seconds": time.perf_counter() - clock}
    return dict(finite({"schema": METRICS_SCHEMA, "run": about, "rows": table}))


def _estimate(run: RunContext, clock: float) -> None:
    """Estimate what a run with a linear head takes, and tell it if it is long; it began at ``clock``.

    Raises:
        ConfigError: It needs more memory than there is.
    """
    if not isinstance(run.config.head, LinearSettings):  # the preflight of a linearised head follows
        return
    done = [] if run.cache is None else run.cache.available()
    rest = expect(run.config, sizes_of(run.data, run.split, run.config), run.methods, run.device, done)
    if rest.worth_telling:
        run.display.say(str(rest))
    run.expected = replace(rest, seconds=rest.seconds + time.perf_counter() - clock)


def _describe_run(run: RunContext, overrides: Sequence[str]) -> dict[str, Any]:
    """Versions, machine and settings of a run."""
    config, device, head = run.config, run.device, run.request.head
    return {
        "name": run.folder.name,
        "sfu_version": sfu.__version__,
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in _PACKAGES}},
        "device": str(device) if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})",
        "threads": torch.get_num_threads(),
        "tf32": torch.get_float32_matmul_precision() != "highest",
        "git": _git_state(Path(sfu.__file__).parent),
        "dtype": config.dtype,
        "overrides": list(overrides),
        "published": config.published,
        "reused": [] if run.cache is None else run.cache.reused,
        "seeds": {"seed": config.seed, **run.seeds},
        "data": run.data_record,
        "expected": None if run.expected is None else run.expected.as_json(),
        "forget": {**asdict(config.forget), "kind": run.split.kind, "request": run.split.request},
        "canaries": asdict(config.canaries) if run.canaries is not None else None,
        "tune": {"rule": config.tune.value, "budget": config.tune_budget},
        "head": {
            "l2": config.head.l2, "bias": config.head.bias, "training": config.head.training.value,
            "gradient_norm": float(head.gradient_CE.norm()), "loss": head.loss.as_json(), **head.about(),
        },
    }  # fmt: skip


def _git_state(package: Path) -> dict[str, Any] | None:
    """Return the commit of the checkout that a package is part of, and whether its files were changed since.

    Returns ``None`` if the package is no part of a checkout, or git is not there.
    """

    def git(*arguments: str) -> str:
        given = ["git", "-C", str(package), *arguments]
        return subprocess.run(given, capture_output=True, text=True, check=True, timeout=5).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "."))}
    except (OSError, subprocess.SubprocessError):
        return None
