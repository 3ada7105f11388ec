"""Run one experiment from configuration to metrics: train, discard, unlearn, score."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import sfu
from sfu.data.backbones.backbone import NO_BACKBONE
from sfu.data.feature_data import FeatureData
from sfu.data.features.place import views_folder
from sfu.data.seal import sealed
from sfu.errors import ConfigError, SfuError
from sfu.evaluation.evaluate import Evaluator
from sfu.experiment import stages
from sfu.experiment.progress import ProgressDisplay
from sfu.experiment.reuse import StageResults
from sfu.experiment.stages import Prepared, RowResult
from sfu.experiment.validate import resolve_device, resolve_dtype, validate
from sfu.files import write_text
from sfu.heads.base import Head
from sfu.heads.linearised.head import LinearisedHead
from sfu.request import Access, ForgetRequest, MethodContext, RetainedSet
from sfu.results.artifacts import METRICS_SCHEMA, finite, save_split, write_json
from sfu.seeds import resolve_seeds
from sfu.settings import RunConfig
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.methods.retrained import Retrained
from sfu.unlearning.rows import make_methods
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


@dataclass(frozen=True)
class _Context:
    """What every stage of a run needs."""

    config: RunConfig
    methods: dict[str, UnlearningMethod]
    seeds: dict[str, int]
    device: torch.device
    dtype: torch.dtype
    display: ProgressDisplay
    report: Callable[[str, float], None]
    kept: StageResults

    def tools(self, tick: Callable[[int, int], None] | None = None) -> MethodContext:
        """What methods are lent."""
        normalize, keep_path = self.config.dataset.normalize_rows, self.config.evaluation.trade_off
        return MethodContext(self.seeds, tick, normalize_rows=normalize, keep_path=keep_path)

    def waiting(self, what: str) -> Callable[[], None]:
        """Says that another job is at work on the same thing."""
        return lambda: self.display.say(f"{what}: another job is computing the same; waiting for it")


def run(
    config: RunConfig,
    folder: Path,
    *,
    overrides: list[str] | None = None,
    show_progress: bool = True,
    on_stage: Callable[[str, float], None] | None = None,
    kept: StageResults | None = None,
) -> dict[str, Any]:
    """Run ``config``, leaving heads and split in ``folder``, and return the metrics (schema 1).

    Args:
        config: The whole configuration.
        folder: An existing folder.
        overrides: What the user changed, for the record.
        show_progress: Show a progress bar on a terminal.
        on_stage: Called with the name and seconds of every stage done.
        kept: Results of earlier runs to take and to add to; none by default.

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
    methods, seeds = make_methods(config), resolve_seeds(config)
    _check_augmentations(config, methods)
    report = on_stage or (lambda name, seconds: None)
    with ProgressDisplay(show_progress) as display:
        context = _Context(config, methods, seeds, device, dtype, display, report, kept or StageResults())
        prepared = _prepare(context, folder)
        results = _run_source_free(context, prepared)
        data = stages.reload(config, seeds, device, prepared)
        retained = RetainedSet(
            data.train_features_ND[prepared.split.retain_R], data.train_labels_N[prepared.split.retain_R]
        )
        results |= _run_with_data(context, prepared, retained)
        reference = _reference(context, results, prepared, retained)
        del retained
        rows = _evaluate(context, data, prepared, reference, results, folder)
    about = _about(context, prepared, folder, overrides or [])
    about |= {"started": started.isoformat(timespec="seconds"), "seconds": time.perf_counter() - clock}
    return dict(finite({"schema": METRICS_SCHEMA, "run": about, "rows": rows}))


def _about_core(head: Head) -> dict[str, Any]:
    """The linearised layers, for the record."""
    if not isinstance(head, LinearisedHead):
        return {}
    core = head.core
    return {"layers": list(core.components), "n_parameters": core.n_parameters, "core": core.digest}


def _check_augmentations(config: RunConfig, methods: dict[str, UnlearningMethod]) -> None:
    wanting = [name for name, method in methods.items() if method.augmentations]
    if wanting and config.backbone.name == NO_BACKBONE:
        raise ConfigError(
            f"curvature.augment={list(methods[wanting[0]].augmentations)} (row {wanting[0]}) augments images, but "
            "backbone=none takes features as they are; choose a dataset of images and a backbone."
        )


def _prepare(context: _Context, folder: Path) -> Prepared:
    """Train, save the head and the split, and discard the data."""
    with stages.measured(context.device) as usage:
        prepared = stages.prepare(
            context.config, context.seeds, context.device, context.dtype, list(context.methods.values()),
            context.display, context.kept,
        )  # fmt: skip
    context.report("prepare", usage.seconds)
    save_split(folder / "split.safetensors", prepared.split)
    if prepared.forget_files:
        write_text(folder / "forget_files.txt", "\n".join(prepared.forget_files) + "\n")
    prepared.request.head.save(folder / "heads" / "original")
    stages.discard(prepared)
    return prepared


def _run_source_free(context: _Context, prepared: Prepared) -> dict[str, RowResult]:
    config, results = context.config, dict[str, RowResult]()
    own = [] if prepared.forget_images is None else [*prepared.forget_images.paths, views_folder(config.backbone)]
    with sealed(prepared.sources, allowed=own):
        views = stages.augment(config, context.device, prepared, context.methods.values(), context.display)
        for name, method in context.methods.items():
            if method.access is not Access.RETAINED:
                blind = method.access is Access.FORGET
                request = prepared.request.without_summary() if blind else prepared.request
                if method.augmentations:
                    request = replace(request, views_VFD=torch.stack([views[v] for v in method.augmentations]))
                results[name] = _run_row(context, name, method, request, None)
    return results


def _run_with_data(context: _Context, prepared: Prepared, retained: RetainedSet) -> dict[str, RowResult]:
    return {
        name: _run_row(context, name, method, prepared.request, retained)
        for name, method in context.methods.items()
        if method.access is Access.RETAINED
    }


def _run_row(
    context: _Context, name: str, method: UnlearningMethod, request: ForgetRequest, retained: RetainedSet | None
) -> RowResult:
    sees = "source-free" if retained is None else "with the retained data"
    with context.display.stage(f"{name} ({sees})") as tick:
        make = partial(stages.run_method, name, method, request, context.tools(tick), retained)
        result = context.kept.row(name, make, request.head, context.waiting(name))
    context.report(name, result.usage.seconds)
    return result


def _reference(
    context: _Context, results: dict[str, RowResult], prepared: Prepared, retained: RetainedSet
) -> Head | None:
    """Retrained's head: the row's, if there is one, else trained for the comparison alone; ``None`` if that fails."""
    for name, method in context.methods.items():
        outcome = results[name].unlearned
        if isinstance(method, Retrained):
            return None if outcome is None else outcome.head
    try:
        return Retrained(context.config.head).unlearn(prepared.request, context.tools(), retained).head
    except SfuError as error:
        log.warning("Retrained could not be trained, so nothing is compared with it: %s", error)
        return None


def _evaluate(
    context: _Context,
    data: FeatureData,
    prepared: Prepared,
    reference: Head | None,
    results: dict[str, RowResult],
    folder: Path,
) -> dict[str, Any]:
    rows = {}
    with context.display.stage("evaluating") as tick, stages.measured(context.device) as usage:
        evaluator = Evaluator(
            data, prepared.split, prepared.request.head, reference,
            membership_splits=context.config.evaluation.membership_splits, seed=context.seeds["evaluation"],
        )  # fmt: skip
        results = {name: _settled(result, evaluator) for name, result in results.items()}
        if context.config.evaluation.trade_off:
            write_json(folder / "trade_off.json", _trade_off(results, evaluator))
        for done, (name, method) in enumerate(context.methods.items(), start=1):
            rows[name] = _row(method, results[name], evaluator, folder / "heads" / name)
            tick(done, len(context.methods))
    context.report("evaluate", usage.seconds)
    return rows


def _about(context: _Context, prepared: Prepared, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """What ``metrics.json`` says of the run as a whole."""
    config, device, head = context.config, context.device, prepared.request.head
    return {
        "name": folder.name,
        "sfu_version": sfu.__version__,
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in _PACKAGES}},
        "device": str(device) if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})",
        "threads": torch.get_num_threads(),
        "dtype": config.dtype,
        "overrides": list(overrides),
        "published": config.published,
        "reused": context.kept.reused,
        "seeds": {"seed": config.seed, **context.seeds},
        "data": prepared.data,
        "forget": {"kind": prepared.split.kind, **asdict(config.forget)},
        "tune": {"rule": config.tune.value, "budget": config.tune_budget},
        "head": {
            "l2": config.head.l2, "bias": config.head.bias, "training": config.head.training.value,
            "gradient_norm": float(head.gradient_CE.norm()), "loss": head.loss.as_json(),
            **_about_core(head),
        },
    }  # fmt: skip


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
            "predicted_distance_gain": outcome.predicted_distance_gain,
            "details": dict(outcome.details),
            "note": outcome.note,
        }
    else:
        row |= {"applied": False, "details": {}, "note": f"failed: {result.error}", "error": result.error}
    return row | {"seconds": result.usage.seconds, "peak_memory_mb": result.usage.peak_memory_mb}
