"""Run one method, measured, and write its result into a cache entry or read it from one."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from sfu.experiment.cache import HEAD
from sfu.experiment.resources import Usage, measured
from sfu.files import write_tensors, write_text
from sfu.heads.base import Head
from sfu.heads.linear import LinearHead
from sfu.heads.linearised.core import Core
from sfu.heads.linearised.files import load_head
from sfu.heads.linearised.head import LinearisedHead
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.base import UnlearningMethod, UnlearningResult

log = logging.getLogger(__name__)

_ROW, _PATH, _TRIAL = "row.json", "path.safetensors", "trial-{}"


@dataclass(frozen=True)
class RowResult:
    """The outcome of one method: what it returned, or the error that stopped it."""

    usage: Usage
    unlearned: UnlearningResult | None
    error: str | None = None


def run_method(
    name: str, method: UnlearningMethod, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None
) -> RowResult:
    """Run one method and measure it. An error ends this row, not the run."""
    unlearned, error = None, None
    with measured(request.head.parameters_CE.device) as usage:
        try:
            unlearned = method.unlearn(request, context, retained)
            if not torch.isfinite(unlearned.head.parameters_CE).all():
                unlearned, error = None, "the unlearned head has NaN or infinite parameters"
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            log.debug("%s failed", name, exc_info=True)
    return RowResult(usage, unlearned, error)


def write_row(row: RowResult, folder: Path) -> None:
    """Write a row that succeeded."""
    assert row.unlearned is not None
    usage = {"seconds": row.usage.seconds, "peak_memory_mb": row.usage.peak_memory_mb}
    write_text(folder / _ROW, json.dumps(usage | _write_result(row.unlearned, folder, HEAD)) + "\n")


def read_row(folder: Path, original: Head) -> RowResult:
    """Read what :func:`write_row` wrote; ``original`` is the head before unlearning."""
    about = json.loads((folder / _ROW).read_text(encoding="utf-8"))
    usage = Usage(about.pop("seconds"), about.pop("peak_memory_mb"))
    return RowResult(usage, _read_result(about, folder, HEAD, original))


def read_head(stem: Path, core: Core | None) -> Head:
    """Read a linear head, or, given its core, a linearised one."""
    return LinearHead.load(stem) if core is None else load_head(stem, core)


def _write_result(result: UnlearningResult, folder: Path, stem: str) -> dict[str, Any]:
    """Write heads and path as files; return everything else for JSON."""
    result.head.save(folder / stem)
    if result.path:
        write_tensors(folder / f"{stem}.{_PATH}", {"path": torch.stack(result.path)})
    trials = [_write_result(trial, folder, _TRIAL.format(n)) for n, trial in enumerate(result.trials)]
    return {
        "applied": result.applied, "predicted_gain": result.predicted_gain, "details": dict(result.details),
        "note": result.note, "trials": trials,
    }  # fmt: skip


def _read_result(about: dict[str, Any], folder: Path, stem: str, original: Head) -> UnlearningResult:
    core = original.core if isinstance(original, LinearisedHead) else None
    device = original.parameters_CE.device
    path: tuple[Tensor, ...] = ()
    if (folder / f"{stem}.{_PATH}").is_file():
        path = tuple(load_file(folder / f"{stem}.{_PATH}")["path"].to(device))
    trials = tuple(
        _read_result(trial, folder, _TRIAL.format(n), original) for n, trial in enumerate(about.pop("trials"))
    )
    return UnlearningResult(read_head(folder / stem, core).to(device), path=path, trials=trials, **about)
