"""Run one experiment from configuration to metrics: train, discard, unlearn, score."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import sfu
from sfu.data.backbones.backbone import NO_BACKBONE
from sfu.data.features.place import views_folder
from sfu.data.seal import sealed
from sfu.errors import ConfigError, SfuError
from sfu.evaluation.evaluate import Evaluator
from sfu.experiment import stages
from sfu.experiment.artifacts import METRICS_SCHEMA, finite, save_split, write_json
from sfu.experiment.progress import ProgressDisplay
from sfu.experiment.stages import Prepared, RowResult
from sfu.experiment.validate import resolve_device, resolve_dtype, validate
from sfu.files import write_text
from sfu.heads.linear import LinearHead
from sfu.reporting.published import published_row
from sfu.seeds import resolve_seeds
from sfu.settings import RunConfig
from sfu.unlearning.method import Access, RetainedSet, Tools, UnlearningMethod
from sfu.unlearning.methods.retrained import Retrained
from sfu.unlearning.registry import make_methods
from sfu.unlearning.tuning import nearest

log = logging.getLogger(__name__)

_PACKAGES = (
    "torch",
    "torchvision",
    "pillow",
    "numpy",
    "scipy",
    "scikit-learn",
    "hydra-core",
    "omegaconf",
    "safetensors",
)


def run(
    config: RunConfig,
    folder: Path,
    *,
    overrides: list[str] | None = None,
    show_progress: bool = True,
    on_stage: Callable[[str, float], None] | None = None,
) -> dict[str, Any]:
    """Run ``config``, leaving heads and split in ``folder``, and return the metrics (schema 1).

    Args:
        config: The whole configuration.
        folder: An existing folder.
        overrides: What the user changed, for the record.
        show_progress: Show a progress bar on a terminal.
        on_stage: Called with the name and seconds of every stage done.

    Raises:
        ConfigError: A setting cannot work; raised before any data are loaded.
        DataError: The data or the forget set cannot be used.
        SfuError: Training failed.
    """
    started, clock = datetime.now(UTC), time.perf_counter()
    validate(config)
    device, dtype = resolve_device(config.device), resolve_dtype(config.dtype)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision("highest")  # no TF32 in curvature and solves
    methods = make_methods(config)
    _check_augmentations(config, methods)
    seeds = resolve_seeds(config)
    report = on_stage or (lambda name, seconds: None)
    with ProgressDisplay(show_progress) as display:
        with stages.measured(device) as usage:
            prepared = stages.prepare(config, seeds, device, dtype, list(methods.values()), display)
        report("prepare", usage.seconds)
        save_split(folder / "split.safetensors", prepared.split)
        if prepared.forget_files:
            write_text(folder / "forget_files.txt", "\n".join(prepared.forget_files) + "\n")
        prepared.request.head.save(folder / "heads" / "original")
        stages.discard(prepared)
        results = _run_source_free(config, methods, prepared, seeds, device, display, report)
        data = stages.reload(config, seeds, device, prepared)
        retained = RetainedSet(
            data.train_features_ND[prepared.split.retain_R], data.train_labels_N[prepared.split.retain_R]
        )
        results |= _run_with_data(config, methods, prepared, seeds, retained, display, report)
        reference = _reference(config, methods, results, prepared, seeds, retained)
        del retained
        with display.stage("evaluating") as tick, stages.measured(device) as usage:
            evaluator = Evaluator(
                data, prepared.split, prepared.request.head, reference,
                membership_splits=config.evaluation.membership_splits, seed=seeds["evaluation"],
            )  # fmt: skip
            results = {name: _settled(result, evaluator) for name, result in results.items()}
            if config.evaluation.trade_off:
                write_json(folder / "trade_off.json", _trade_off(results, evaluator))
            rows = {}
            for done, name in enumerate(methods, start=1):
                rows[name] = _row(methods[name], results[name], evaluator, folder / "heads" / name)
                rows[name] |= published_row(config.evaluation.published, name)
                tick(done, len(methods))
        report("evaluate", usage.seconds)
    about = {
        "name": folder.name,
        "sfu_version": sfu.__version__,
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in _PACKAGES}},
        "device": str(device) if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})",
        "threads": torch.get_num_threads(),
        "dtype": config.dtype,
        "started": started.isoformat(timespec="seconds"),
        "seconds": time.perf_counter() - clock,
        "overrides": list(overrides or []),
        "seeds": {"seed": config.seed, **seeds},
        "tune": {"rule": config.tune.value, "budget": config.tune_budget},
        "data": prepared.data,
        "forget": {"kind": prepared.split.kind, **asdict(config.forget)},
        "head": {
            "l2": config.head.l2, "bias": config.head.bias, "training": config.head.training.value,
            "gradient_norm": float(prepared.request.head.gradient_CE.norm()),
            "loss": prepared.request.head.loss.as_json(),
        },
    }  # fmt: skip
    return dict(finite({"schema": METRICS_SCHEMA, "run": about, "rows": rows}))


def _check_augmentations(config: RunConfig, methods: dict[str, UnlearningMethod]) -> None:
    wanting = [name for name, method in methods.items() if method.augmentations]
    if wanting and config.backbone.name == NO_BACKBONE:
        raise ConfigError(
            f"curvature.augment={list(methods[wanting[0]].augmentations)} (row {wanting[0]}) augments images, but "
            "backbone=none takes features as they are; choose a dataset of images and a backbone."
        )


def _tools(config: RunConfig, seeds: dict[str, int], tick: Callable[[int, int], None] | None = None) -> Tools:
    return Tools(
        seeds, tick, normalize_rows=config.dataset.normalize_rows, keep_path=config.evaluation.trade_off
    )  # fmt: skip


def _run_source_free(
    config: RunConfig,
    methods: dict[str, UnlearningMethod],
    prepared: Prepared,
    seeds: dict[str, int],
    device: torch.device,
    display: ProgressDisplay,
    report: Callable[[str, float], None],
) -> dict[str, RowResult]:
    results = {}
    own = [] if prepared.forget_images is None else [*prepared.forget_images.paths, views_folder(config.backbone)]
    with sealed(prepared.sources, allowed=own):
        views = stages.augment(config, device, prepared, methods.values(), display)
        for name, method in methods.items():
            if method.access is not Access.RETAINED:
                with display.stage(f"{name} (source-free)") as tick:
                    blind = method.access is Access.FORGET
                    request = prepared.request.without_summary() if blind else prepared.request
                    if method.augmentations:
                        request = replace(request, views_VFD=torch.stack([views[v] for v in method.augmentations]))
                    results[name] = stages.run_method(name, method, request, _tools(config, seeds, tick))
                report(name, results[name].usage.seconds)
    return results


def _run_with_data(
    config: RunConfig,
    methods: dict[str, UnlearningMethod],
    prepared: Prepared,
    seeds: dict[str, int],
    retained: RetainedSet,
    display: ProgressDisplay,
    report: Callable[[str, float], None],
) -> dict[str, RowResult]:
    results = {}
    for name, method in methods.items():
        if method.access is Access.RETAINED:
            with display.stage(f"{name} (with the retained data)") as tick:
                results[name] = stages.run_method(name, method, prepared.request, _tools(config, seeds, tick), retained)
            report(name, results[name].usage.seconds)
    return results


def _reference(
    config: RunConfig,
    methods: dict[str, UnlearningMethod],
    results: dict[str, RowResult],
    prepared: Prepared,
    seeds: dict[str, int],
    retained: RetainedSet,
) -> LinearHead | None:
    """Retrained's head: the row's, if there is one, else trained for the comparison alone; ``None`` if that fails."""
    for name, method in methods.items():
        outcome = results[name].unlearned
        if isinstance(method, Retrained):
            return None if outcome is None else outcome.head
    try:
        return Retrained(config.head).unlearn(prepared.request, _tools(config, seeds), retained).head
    except SfuError as error:
        log.warning("Retrained could not be trained, so nothing is compared with it: %s", error)
        return None


def _settled(result: RowResult, evaluator: Evaluator) -> RowResult:
    """With the setting chosen that is nearest to Retrained, where that is the rule."""
    if result.unlearned is None:
        return result
    try:
        return replace(result, unlearned=nearest(result.unlearned, evaluator.distance))
    except ConfigError as error:
        return replace(result, unlearned=None, error=f"ConfigError: {error}")


def _trade_off(results: dict[str, RowResult], evaluator: Evaluator) -> dict[str, Any]:
    """Accuracies along the path of every row: of one point for a method that takes no path."""
    return {
        name: evaluator.trade_off(result.unlearned.path or [result.unlearned.head.parameters_CE])
        for name, result in results.items()
        if result.unlearned is not None
    }


def _row(method: UnlearningMethod, result: RowResult, evaluator: Evaluator, stem: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"access": method.access.value, "tuning": method.tuning}
    if result.unlearned is not None:
        outcome = result.unlearned
        outcome.head.save(stem)
        row |= evaluator.evaluate(outcome.head)
        row |= {
            "applied": outcome.applied,
            "predicted_distance_gain": outcome.predicted_gain,
            "details": dict(outcome.details),
            "note": outcome.note,
        }
    else:
        row |= {"applied": False, "details": {}, "note": f"failed: {result.error}", "error": result.error}
    return row | {"seconds": result.usage.seconds, "peak_memory_mb": result.usage.peak_memory_mb}
