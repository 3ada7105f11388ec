"""One job of the command line: run, save, print, and keep the record straight whatever happens."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from sfu.data.split import DEFAULT_FRACTION
from sfu.errors import SfuError
from sfu.experiment.artifacts import remove_results, write_json
from sfu.experiment.explain import refuse_added_keys
from sfu.experiment.runner import run
from sfu.files import write_text
from sfu.settings import RunConfig


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
        failed = {name: row["error"] for name, row in metrics["rows"].items() if row.get("error")}
        if failed:
            what = "; ".join(f"{name}: {error}" for name, error in failed.items())
            raise SfuError(f"{len(failed)} of {len(metrics['rows'])} rows failed ({what}); the others are in {folder}.")


def _run_and_save(config: DictConfig, folder: Path, overrides: list[str], group: str | None) -> dict[str, Any]:
    from sfu.reporting.export import csv_table, markdown_table
    from sfu.reporting.loggers import make_logger
    from sfu.reporting.plot import save_bar_plot
    from sfu.reporting.trade_off import save_trade_off_plot

    typed = _typed(config)
    resolved = OmegaConf.to_container(OmegaConf.structured(typed), resolve=True, enum_to_str=True)
    assert isinstance(resolved, dict)
    write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(resolved)))
    with _logger(typed, folder, group, make_logger) as logger:
        logger.start({str(key): value for key, value in resolved.items()}, {"name": folder.name, "folder": str(folder)})
        metrics = run(typed, folder, overrides=overrides, on_stage=logger.log_stage)
        write_json(folder / "metrics.json", metrics)
        write_text(folder / "metrics.csv", csv_table(metrics))
        write_text(folder / "table.md", markdown_table(metrics))
        picture = _draw(save_bar_plot, metrics, folder / "figure.png")
        if typed.evaluation.trade_off:
            _draw(save_trade_off_plot, metrics, folder / "trade_off.png")
        logger.log_result(metrics, picture)
    return metrics


def _draw(save: Callable[[dict[str, Any], Path], Path], metrics: dict[str, Any], path: Path) -> Path | None:
    """A figure; a failure to draw it is a warning, since the numbers are safe and worth more."""
    try:
        return save(metrics, path)
    except Exception as error:
        print(f"sfu: the figure could not be drawn ({type(error).__name__}: {error}).", file=sys.stderr)
        return None


def _typed(config: DictConfig) -> RunConfig:
    refuse_added_keys(config)
    typed = OmegaConf.to_object(config)
    assert isinstance(typed, RunConfig)
    forget = typed.forget
    if all(value is None for value in vars(forget).values()):
        forget.fraction = DEFAULT_FRACTION
    return typed


def _logger(config: RunConfig, folder: Path, group: str | None, make_logger: Any) -> Any:
    settings = config.logger
    if settings.name == "none":
        return make_logger("none")
    given = {"mode": settings.mode, "project": settings.project}
    return make_logger(
        settings.name,
        dir=folder,
        entity=settings.entity,
        group=settings.group or group,
        job_type=config.dataset.name,
        tags=settings.tags,
        **{key: value for key, value in given.items() if value is not None},
    )


def _show(metrics: dict[str, Any], folder: Path, in_sweep: bool) -> None:
    from rich.console import Console

    from sfu.reporting.table import print_run

    if not in_sweep:
        print_run(metrics, folder, Console())
        return
    shown = " ".join(metrics["run"]["overrides"]) or "(defaults)"
    print(f"job {folder.name}: {shown}: {len(metrics['rows'])} rows in {metrics['run']['seconds']:.1f} s")


class _Record:
    """Keeps status.json true: running, then finished or failed."""

    def __init__(self, folder: Path, overrides: list[str], job: int | None) -> None:
        self._path = folder / "status.json"
        self._status: dict[str, Any] = {
            "state": "running",
            "started": datetime.now(UTC).isoformat(),
            "overrides": overrides,
            "job": job,
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
