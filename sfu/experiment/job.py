"""One job of the command line: run, save, print, and keep the record straight whatever happens."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from sfu.data.load import choose_backbone
from sfu.data.split import DEFAULT_FRACTION
from sfu.errors import SfuError
from sfu.experiment.explain import refuse_added_keys
from sfu.experiment.keys import stage_keys
from sfu.experiment.result_store import result_store
from sfu.experiment.reuse import StageResults
from sfu.experiment.runner import run
from sfu.experiment.validate import validate
from sfu.files import write_text
from sfu.results.artifacts import remove_results, write_json
from sfu.settings import Reuse, RunConfig, Tune


def run_job(config: DictConfig) -> None:
    """Run one configuration inside Hydra; its folder is Hydra's output folder.

    Raises:
        SfuError: The run failed, or a row of it did; everything finished before is in the folder.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    in_sweep = hydra.mode is RunMode.MULTIRUN
    folder = Path(hydra.runtime.output_dir)
    overrides = [str(item) for item in hydra.overrides.task]
    record = _Record(folder, overrides, hydra.job.num if in_sweep else None)
    with record:
        metrics = _run_and_save(config, folder, overrides, Path(hydra.sweep.dir).name if in_sweep else None)
        _show(metrics, folder, in_sweep)
        failed = _failures(metrics)
        if failed:
            what = "; ".join(f"{name}: {error}" for name, error in failed.items())
            raise SfuError(f"{len(failed)} of {len(metrics['rows'])} rows failed ({what}); the others are in {folder}.")


def _run_and_save(config: DictConfig, folder: Path, overrides: list[str], group: str | None) -> dict[str, Any]:
    from sfu.reporting.export import csv_table, markdown_table
    from sfu.reporting.loggers import make_logger
    from sfu.reporting.plot import save_bar_plot
    from sfu.reporting.trade_off import save_trade_off_plot

    typed = typed_config(config)
    resolved = OmegaConf.to_container(OmegaConf.structured(typed), resolve=True, enum_to_str=True)
    assert isinstance(resolved, dict)
    write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(resolved)))
    kept = kept_results(typed, in_sweep=group is not None)
    with _logger(typed, folder, group, make_logger) as logger:
        logger.start({str(key): value for key, value in resolved.items()}, {"name": folder.name, "folder": str(folder)})
        metrics = kept.take_run(folder)
        if metrics is not None:
            metrics["run"] |= {
                "name": folder.name, "overrides": overrides, "published": typed.published, "reused": ["run"],
            }  # fmt: skip
        else:
            metrics = run(typed, folder, overrides=overrides, on_stage=logger.log_stage, kept=kept)
        write_json(folder / "metrics.json", metrics)
        write_text(folder / "metrics.csv", csv_table(metrics))
        write_text(folder / "table.md", markdown_table(metrics))
        picture = folder / "figure.png"
        if not picture.is_file():
            _draw(save_bar_plot, metrics, picture)
        if typed.evaluation.trade_off and not (folder / "trade_off.png").is_file():
            _draw(save_trade_off_plot, metrics, folder / "trade_off.png")
        logger.log_result(metrics, picture if picture.is_file() else None)
        logger.log_files(folder)
    if metrics["run"]["reused"] != ["run"] and not _failures(metrics) and typed.tune is not Tune.oracle:
        kept.keep_run(folder)
    return metrics


def kept_results(config: RunConfig, *, in_sweep: bool) -> StageResults:
    """What earlier runs left, if this one is to take it.

    Raises:
        ConfigError: A setting cannot work.
        DataError: A file is missing.
    """
    if config.reuse is Reuse.never or (config.reuse is Reuse.sweeps and not in_sweep):
        return StageResults()
    validate(config)
    return StageResults(result_store(), stage_keys(config))


def _failures(metrics: dict[str, Any]) -> dict[str, str]:
    return {name: row["error"] for name, row in metrics["rows"].items() if row.get("error")}


def _draw(save: Callable[[dict[str, Any], Path], Path], metrics: dict[str, Any], path: Path) -> None:
    """A figure; a failure to draw it is a warning, since the numbers are safe and worth more."""
    try:
        save(metrics, path)
    except Exception as error:
        print(f"sfu: the figure could not be drawn ({type(error).__name__}: {error}).", file=sys.stderr)
        return


def typed_config(config: DictConfig) -> RunConfig:
    """The composed configuration as settings.

    Raises:
        ConfigError: A key was added that sfu does not have.
    """
    refuse_added_keys(config)
    typed = OmegaConf.to_object(config)
    assert isinstance(typed, RunConfig)
    typed.backbone.name = choose_backbone(typed.dataset, typed.backbone, needed=typed.head.name == "linearised")
    forget = typed.forget
    if all(value is None for value in vars(forget).values()):
        forget.fraction = DEFAULT_FRACTION
    return typed


def _logger(config: RunConfig, folder: Path, group: str | None, make_logger: Any) -> Any:
    """The logger: a sweep is a group, an experiment a kind of job, and data and loss are tags."""
    from hydra.core.hydra_config import HydraConfig

    experiment = HydraConfig.get().runtime.choices.get("experiment")
    labels = [name for name in (config.dataset.name, config.loss.name, config.backbone.name) if name != "none"]
    offered = {
        "group": "-".join(part for part in (experiment, group) if part) or None,
        "job_type": experiment or ("run" if group is None else "sweep"),
        "tags": labels,
    }
    given = {key: value for key, value in vars(config.logger).items() if key != "name" and value not in (None, [])}
    if "tags" in given:
        given["tags"] = [*given["tags"], *labels]
    return make_logger(config.logger.name, offered, dir=folder, **given)


def _show(metrics: dict[str, Any], folder: Path, in_sweep: bool) -> None:
    from rich.console import Console

    from sfu.reporting.table import print_run

    if not in_sweep:
        print_run(metrics, folder, Console())
        return
    about, what = metrics["run"], f"{len(metrics['rows'])} rows"
    if about["reused"] == ["run"]:
        end = f": {what}, kept"
    else:
        kept = len([name for name in about["reused"] if name in metrics["rows"]])
        end = f": {what}{f' ({kept} kept)' if kept else ''} in {about['seconds']:.1f} s"
    print(line_of_job(f"job {folder.name}: ", about["overrides"] or ["(defaults)"], end, Console().width))


def line_of_job(start: str, overrides: list[str], end: str, width: int) -> str:
    """One line: as many overrides as fit (what a sweep varies comes first), all of them where nothing else would."""
    for count in range(len(overrides), 0, -1):
        line = start + " ".join([*overrides[:count], *(["..."] if count < len(overrides) else [])]) + end
        if len(line) <= width:
            return line
    return start + " ".join(overrides) + end


class _Record:
    """Keeps status.json true: running, then finished or failed."""

    def __init__(self, folder: Path, overrides: list[str], job: int | None) -> None:
        self._path = folder / "status.json"
        self._status: dict[str, Any] = {
            "state": "running",
            "started": datetime.now(UTC).isoformat(),
            "overrides": overrides,
            "job": job,
            "host": platform.node(),
            "pid": os.getpid(),  # tells a run that was killed from one under way
        }
        self._clock = time.perf_counter()

    def __enter__(self) -> None:
        remove_results(self._path.parent)
        write_json(self._path, self._status)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._status |= {"state": "finished", "seconds": time.perf_counter() - self._clock}
        if error is not None:
            stopped = isinstance(error, KeyboardInterrupt)
            what = "interrupted" if stopped else f"{type(error).__name__}: {error}"
            self._status |= {"state": "interrupted" if stopped else "failed", "error": what}
        write_json(self._path, self._status)
