"""One job of the command line: run, save, print, and record in ``status.json`` how it ended.

The configuration is checked before PyTorch is imported, so that mistakes are told at once.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from sfu.errors import ArtifactError, ConfigError, SfuError
from sfu.experiment.config import Reuse, RunConfig, plain, public_settings, typed_config
from sfu.experiment.validate import validate
from sfu.files import folder_in_use, write_text
from sfu.isolation.sandbox import NOTHING, protections
from sfu.isolation.server import server_of
from sfu.lazy import first_imports
from sfu.names import show_warnings_safely, visible
from sfu.processes import Stopped, birth_of
from sfu.results.artifacts import overwrite_json, remove_results, write_json
from sfu.results.run_folder import read_run
from sfu.unlearning.rows import make_methods
from sfu.unlearning.settings import Tune

if TYPE_CHECKING:
    from sfu.experiment.cache import StageCache


def run_job(config: DictConfig) -> Exception | None:
    """Run one configuration inside Hydra; its folder is Hydra's output folder.

    Returns:
        The error that ended the run, or a :class:`SfuError` if rows failed; ``status.json`` records it, and everything
        finished before is in the folder.

    Raises:
        Exception: The run failed, and that could not be recorded.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    show_warnings_safely()
    hydra = HydraConfig.get()
    sweep = Path(hydra.sweep.dir).name if hydra.mode is RunMode.MULTIRUN else None
    folder = Path(hydra.runtime.output_dir)
    overrides = [str(item) for item in hydra.overrides.task]
    try:
        with _recorded(folder, overrides, None if sweep is None else hydra.job.num):
            _check_seeds(config, overrides, sweep)
            metrics = _run_and_save(config, folder, overrides, sweep)
            _print_result(metrics, folder, in_sweep=sweep is not None)
            _require_all_rows(metrics, folder)
    except Exception as error:
        if read_run(folder).state != "failed":
            raise
        return error
    return None


def _check_seeds(config: DictConfig, overrides: list[str], sweep: str | None) -> None:
    """Refuse ``seeds`` that became no sweep over ``seed``."""
    if sweep is None and config.seeds > 1:
        raise ConfigError(f"seeds={config.seeds} needs a sweep. Leave out hydra.mode=RUN, or set seeds=1.")
    if config.seeds > 1 and not any(item.startswith("seed=") for item in overrides):
        raise ConfigError(
            "seeds takes one number, such as seeds=10. To compare several numbers, run sfu once for each."
        )


def open_cache(config: RunConfig, *, in_sweep: bool) -> StageCache | None:
    """Return the cached results that a run may use, or ``None`` if ``reuse`` forbids it.

    Args:
        config: A configuration that has been validated.
        in_sweep: Whether the run is a job of a sweep.

    Raises:
        ConfigError: A setting cannot work.
        DataError: A file is missing.
    """
    if config.reuse is Reuse.never or (config.reuse is Reuse.sweeps and not in_sweep):
        return None
    from sfu.experiment.cache import StageCache
    from sfu.experiment.keys import stage_keys
    from sfu.experiment.result_store import result_store

    return StageCache(result_store(), stage_keys(config))


def line_of_job(start: str, overrides: list[str], end: str, width: int) -> str:
    """Return one line with as many overrides as fit, or with all of them if not even one fits."""
    for count in range(len(overrides), 0, -1):
        line = start + " ".join([*overrides[:count], *(["..."] if count < len(overrides) else [])]) + end
        if len(line) <= width:
            return line
    return start + " ".join(overrides) + end


def _run_and_save(config: DictConfig, folder: Path, overrides: list[str], sweep: str | None) -> dict[str, Any]:
    typed = typed_config(config)
    resolved = plain(typed)
    write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(resolved)))
    validate(typed)
    make_methods(typed)
    cache = open_cache(typed, in_sweep=sweep is not None)
    if cache is None and protections(isolate=typed.isolate) != NOTHING:
        server_of("sfu.experiment.row_process")  # it loads while this process does

    with first_imports():
        from sfu.experiment.pipeline import run
    from sfu.reporting.loggers.content import public_metrics
    from sfu.reporting.pictures.gaps import save_gap_plot
    from sfu.reporting.pictures.roc import save_roc_plot
    from sfu.reporting.pictures.trade_off import save_trade_off_plot
    from sfu.reporting.text_tables import run_csv, run_markdown

    with typed.logger as logger:
        logger.start(public_settings(typed), _run_info(typed, folder, sweep))
        metrics = None if cache is None else cache.restore_run(folder)
        restored = metrics is not None
        if metrics is None:
            metrics = run(typed, folder, overrides=overrides, on_stage=logger.log_stage, cache=cache)
        else:
            metrics["run"] |= {
                "name": folder.name, "overrides": overrides, "published": typed.published, "reused": ["run"],
            }  # fmt: skip
        write_json(folder / "metrics.json", metrics)
        write_text(folder / "metrics.csv", run_csv(metrics))
        write_text(folder / "table.md", run_markdown(metrics))
        figure = folder / "figure.png"
        _draw(save_gap_plot, public_metrics(metrics), figure)  # loggers upload it
        if typed.evaluation.trade_off:
            _draw(save_trade_off_plot, metrics, folder / "trade_off.png")
        if typed.evaluation.has_more_attacks:
            _draw(save_roc_plot, metrics, folder / "roc.png")
        logger.log_result(metrics, figure if figure.is_file() else None)
        logger.log_files(folder)
    if cache is not None and not restored and not _failures(metrics) and typed.tune is not Tune.oracle:
        cache.save_run(folder)
    return metrics


def _require_all_rows(metrics: dict[str, Any], folder: Path) -> None:
    failed = _failures(metrics)
    if failed:
        what = "; ".join(f"{name}: {error}" for name, error in failed.items())
        raise SfuError(f"{len(failed)} of {len(metrics['rows'])} rows failed ({what}); the others are in {folder}.")


def _failures(metrics: dict[str, Any]) -> dict[str, str]:
    return {name: row["error"] for name, row in metrics["rows"].items() if row.get("error")}


def _draw(save: Callable[[dict[str, Any], Path], Path], metrics: dict[str, Any], path: Path) -> None:
    """Draw a figure, unless the cache had it. If drawing fails, warn and go on: metrics.json has the numbers.

    Raises:
        ArtifactError: The file cannot be written.
    """
    if path.is_file():
        return
    try:
        save(metrics, path)
    except ArtifactError:
        raise
    except Exception as error:
        why = visible(f"{type(error).__name__}: {error}")
        print(f"sfu: {path.name} could not be drawn ({why}).", file=sys.stderr)


def _run_info(config: RunConfig, folder: Path, sweep: str | None) -> dict[str, Any]:
    """What a logger may find the run by: a sweep is a group, an experiment a job type, and data and loss are tags."""
    from hydra.core.hydra_config import HydraConfig

    experiment = HydraConfig.get().runtime.choices.get("experiment")
    return {
        "name": folder.name,
        "folder": str(folder),
        "group": "-".join(part for part in (experiment, sweep) if part) or None,
        "job_type": experiment or ("run" if sweep is None else "sweep"),
        "tags": [name for name in (config.dataset.name, config.loss.name, config.backbone.name) if name != "none"],
    }


def _print_result(metrics: dict[str, Any], folder: Path, *, in_sweep: bool) -> None:
    from rich.console import Console

    from sfu.reporting.terminal import print_run

    if not in_sweep:
        print_run(metrics, folder, Console())
        return
    about, n_rows = metrics["run"], f"{len(metrics['rows'])} rows"
    cached = sum(name in metrics["rows"] for name in about["reused"])
    end = f": {n_rows}{f' ({cached} cached)' if cached else ''} in {about['seconds']:.1f} s"
    if about["reused"] == ["run"]:
        end = f": {n_rows}, cached"
    overrides = [visible(item) for item in about["overrides"]] or ["(defaults)"]
    print(line_of_job(f"job {visible(folder.name)}: ", overrides, end, Console().width))


@contextmanager
def _recorded(folder: Path, overrides: list[str], job: int | None) -> Iterator[None]:
    """Clear the folder, and keep ``status.json`` true: running, then finished, failed or interrupted."""
    remove_results(folder)
    path, clock = folder / "status.json", time.perf_counter()
    status = {
        "state": "running", "started": datetime.now(UTC).isoformat(), "overrides": overrides, "job": job,
        "host": platform.node(), "pid": os.getpid(), "born": birth_of(os.getpid()),  # tell a run that was killed
    }  # fmt: skip
    try:
        write_json(path, status)
        with folder_in_use(folder):
            yield
            write_json(path, {**status, "state": "finished", "seconds": time.perf_counter() - clock})
    except BaseException as error:
        _release_locals(error)
        ended = {**status, **_how_it_ended(error), "seconds": time.perf_counter() - clock}
        if path.is_file():  # else it could not be written, or the folder was removed
            overwrite_json(path, ended)
        raise


def _how_it_ended(error: BaseException) -> dict[str, str]:
    """Return state and error; whatever goes wrong because the run is being stopped is no failure."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, Stopped):
            return {"state": "interrupted", "error": f"interrupted by {signal.Signals(link.signum).name}"}
        if isinstance(link, KeyboardInterrupt):
            return {"state": "interrupted", "error": "interrupted"}
        link = link.__cause__ or link.__context__
    return {"state": "failed", "error": f"{type(error).__name__}: {error}"}


def _release_locals(error: BaseException) -> None:
    """Clear the variables in an error's frames: Hydra holds the errors of a sweep, which would hold training rows."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
