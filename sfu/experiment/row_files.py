"""Run one method and measure it, and write its result as files that the cache, and the row's own process, hand on."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sfu.experiment.cache import HEAD
from sfu.experiment.context import RowResult
from sfu.experiment.resources import Usage, measured
from sfu.files import write_tensors, write_text
from sfu.heads.cores.core import Core
from sfu.heads.files import load_head
from sfu.readers import Record, Size, floats, read_record, read_tensors, refusing
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.results.artifacts import Cell, finite
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.batches import unlearn_in_batches
from sfu.unlearning.result import UnlearningResult
from sfu.unlearning.step_curvature import StepCurvature

log = logging.getLogger(__name__)

_ROW, _PATH, _CURVATURE, _TRIAL = "row.json", "path.safetensors", "curvature.safetensors", "trial-{}"
_REMEDY = "Remove it with sfu-results rm, and it is computed again."


class _TrialRecord(Record):
    """What ``row.json`` says of a result besides its head and path."""

    applied: bool
    predicted_distance_gain: float | None
    details: dict[str, Cell]
    note: str | None
    trials: list[_TrialRecord]
    predicted_share: float | None = None
    predicted_share_interval: tuple[float, float] | None = None


class _RowRecord(_TrialRecord):
    """The content of ``row.json``."""

    seconds: Size
    peak_memory_mb: Size | None
    isolation: str | None


def run_method(
    name: str,
    method: UnlearningMethod,
    request: ForgetRequest,
    context: MethodContext,
    retained: RetainedSet | None,
    parts: int = 1,
) -> RowResult:
    """Run one method and measure it, on so many parts of the request in turn. An error ends this row, not the run."""
    unlearned, error = None, None
    with measured(request.head.parameters_CE.device) as usage:
        try:
            serve = method.unlearn if parts == 1 else partial(unlearn_in_batches, method.unlearn, n_batches=parts)
            unlearned = serve(request, context, retained)
            if not torch.isfinite(unlearned.head.parameters_CE).all():
                unlearned, error = None, "the unlearned head has NaN or infinite parameters"
        except Exception as caught:
            error = described(caught)
            log.debug("%s failed", name, exc_info=True)
    return RowResult(usage, unlearned, error)


def described(error: BaseException) -> str:
    """Return an error's type and text; the type alone if its text cannot be had."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def write_row(row: RowResult, folder: Path) -> None:
    """Write a row that succeeded."""
    assert row.unlearned is not None
    about = {**asdict(row.usage), "isolation": row.isolation, **_write_result(row.unlearned, folder, HEAD)}
    write_text(folder / _ROW, json.dumps(finite(about)) + "\n")


def read_row(folder: Path, core: Core | None, device: torch.device) -> RowResult:
    """Read what :func:`write_row` wrote; linearised heads have the ``core``.

    Raises:
        ArtifactError: A file is missing or damaged, or a value is wrong.
    """
    about = read_record(folder / _ROW, _RowRecord, _REMEDY)
    result = _read_result(about, folder, HEAD, core, device)
    return RowResult(Usage(about.seconds, about.peak_memory_mb), result, isolation=about.isolation)


def _write_result(result: UnlearningResult, folder: Path, stem: str) -> dict[str, Any]:
    """Write heads and path as files; return everything else for JSON."""
    result.head.save(folder / stem)
    if result.path:
        write_tensors(folder / f"{stem}.{_PATH}", {"path": torch.stack(result.path)})
    if result.curvature is not None:
        write_tensors(folder / f"{stem}.{_CURVATURE}", result.curvature.tensors(), private=True)
    trials = [_write_result(trial, folder, _TRIAL.format(n)) for n, trial in enumerate(result.trials)]
    return {
        "applied": result.applied, "predicted_distance_gain": result.predicted_distance_gain,
        "predicted_share": result.predicted_share, "predicted_share_interval": result.predicted_share_interval,
        "details": dict(result.details), "note": result.note, "trials": trials,
    }  # fmt: skip


def _read_result(
    about: _TrialRecord, folder: Path, stem: str, core: Core | None, device: torch.device
) -> UnlearningResult:
    head, path = load_head(folder / stem, core).to(device), folder / f"{stem}.{_PATH}"
    points: tuple[Tensor, ...] = ()
    if path.is_file():
        with refusing(path, _REMEDY):
            points = tuple(floats(read_tensors(path, _REMEDY), "path", 3).to(device))
            if points and points[0].shape != head.parameters_CE.shape:
                raise ValueError(f"its points are {list(points[0].shape)}, not {list(head.parameters_CE.shape)}")
    curvature = None
    if (kept := folder / f"{stem}.{_CURVATURE}").is_file():
        with refusing(kept, _REMEDY):
            found, axes = read_tensors(kept, _REMEDY), {"estimate": 3, "end": 2, "numbers": 1}
            parts = [floats(found, name, count).to(device) for name, count in axes.items()]
            if parts[1].shape != head.parameters_CE.shape:
                raise ValueError(f"its end is {list(parts[1].shape)}, not {list(head.parameters_CE.shape)}")
            curvature = StepCurvature.restored(*parts)
    trials = [_read_result(trial, folder, _TRIAL.format(n), core, device) for n, trial in enumerate(about.trials)]
    return UnlearningResult(
        head, about.applied, about.predicted_distance_gain, about.details, about.note, points, tuple(trials),  # type: ignore[arg-type]
        predicted_share=about.predicted_share, predicted_share_interval=about.predicted_share_interval,
        curvature=curvature,
    )  # fmt: skip
