"""Take the result of a stage from the store, or make it and keep it.

The original head and each row are entries of their own; a whole run is one more, of its numbers alone, whose heads are
taken from the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from sfu.experiment.keys import StageKeys
from sfu.experiment.resources import Usage
from sfu.experiment.result_store import GRAM, ResultStore
from sfu.experiment.stages import RowResult
from sfu.files import copy_file, write_tensors, write_text
from sfu.heads.base import Head
from sfu.heads.linear import LinearHead
from sfu.heads.linearised.core import Core
from sfu.heads.linearised.files import CORE_PREFIX, load_head
from sfu.heads.linearised.head import LinearisedHead
from sfu.results.artifacts import read_metrics
from sfu.unlearning.base import UnlearningResult

_HEAD, _ROW = "head", "row.json"
_PATH, _TRIAL = "path.safetensors", "trial-{}"
_RUN_FILES = ("metrics.json", "split.safetensors", "forget_files.txt", "figure.png", "trade_off.json", "trade_off.png")


class StageResults:
    """The stages of one run; without a store everything is made and nothing kept."""

    def __init__(self, store: ResultStore | None = None, keys: StageKeys | None = None) -> None:
        """Give both, or neither."""
        self._store, self._keys = store, keys
        self.reused: list[str] = []
        """Names of what was taken from the store: ``head`` and rows."""

    def head(
        self, make: Callable[[], Head], device: torch.device, waiting: Callable[[], None], core: Core | None = None
    ) -> Head:
        """The original head, by ``make`` if it must be; ``waiting`` is called while another job makes it.

        Args:
            make: Trains it.
            device: Where it is wanted.
            waiting: Called if another job is at it.
            core: Of a linearised head.
        """
        if self._store is None or self._keys is None:
            return make()
        with self._store.locked(self._keys.head, waiting):
            kept = self._store.find(self._keys.head)
            if kept is not None:
                self.reused.append(_HEAD)
                return read_head(kept / _HEAD, core).to(device)
            made = make()
            self._store.put(self._keys.head, lambda folder: made.save(folder / _HEAD))
            return made

    def gram(self, make: Callable[[], Tensor]) -> Tensor:
        """The Gram matrix of the training rows, likewise: the same for every l2."""
        if self._store is None or self._keys is None:
            return make()
        with self._store.locked(self._keys.gram):
            kept = self._store.find(self._keys.gram)
            if kept is not None:
                return load_file(kept / GRAM)["gram"]
            made = make()
            self._store.put(self._keys.gram, lambda folder: write_tensors(folder / GRAM, {"gram": made}))
            return made

    def row(self, name: str, make: Callable[[], RowResult], head: Head, waiting: Callable[[], None]) -> RowResult:
        """A row's result, likewise, with ``head`` as the original; one that failed is not kept."""
        if self._store is None or self._keys is None:
            return make()
        key = self._keys.rows[name]
        with self._store.locked(key, waiting):
            kept = self._store.find(key)
            if kept is not None:
                self.reused.append(name)
                return _read_row(kept, head)
            made = make()
            if made.unlearned is not None:
                self._store.put(key, lambda folder: _write_row(made, folder))
            return made

    def there(self) -> list[str]:
        """Names of what is kept: ``head`` and rows."""
        if self._store is None or self._keys is None:
            return []
        return [name for name, key in {_HEAD: self._keys.head, **self._keys.rows}.items() if self._store.has(key)]

    def has_run(self) -> bool:
        """Whether the whole run is kept."""
        kept = self._store is not None and self._keys is not None and self._store.has(self._keys.run)
        return kept and self._keys is not None and len(self.there()) == 1 + len(self._keys.rows)

    def take_run(self, folder: Path) -> dict[str, Any] | None:
        """Put a whole run's result into ``folder`` and return its metrics; ``None`` if it, or a head, is not kept."""
        if self._store is None or self._keys is None:
            return None
        parts = {"original": self._keys.head, **self._keys.rows}
        found = {name: self._store.find(key) for name, key in parts.items()}
        heads = {name: kept for name, kept in found.items() if kept is not None}
        run = self._store.find(self._keys.run)
        if run is None or len(heads) < len(parts):
            return None
        for name in _RUN_FILES:
            if (run / name).is_file():
                copy_file(run / name, folder / name)
        for name, kept in heads.items():
            for path in kept.glob("*.*"):
                if path.stem == _HEAD:
                    copy_file(path, folder / "heads" / f"{name}{path.suffix}")
                elif path.name.startswith(CORE_PREFIX) and not (folder / "heads" / path.name).is_file():
                    copy_file(path, folder / "heads" / path.name)
        return read_metrics(folder / "metrics.json")

    def keep_run(self, folder: Path) -> None:
        """Keep the numbers of a run that is whole, from its folder."""
        if self._store is None or self._keys is None:
            return

        def write(where: Path) -> None:
            for name in _RUN_FILES:
                if (folder / name).is_file():
                    copy_file(folder / name, where / name)

        self._store.put(self._keys.run, write)


def _write_row(row: RowResult, folder: Path) -> None:
    assert row.unlearned is not None
    about = {"seconds": row.usage.seconds, "peak_memory_mb": row.usage.peak_memory_mb}
    write_text(folder / _ROW, json.dumps(about | _write_outcome(row.unlearned, folder, _HEAD)) + "\n")


def _write_outcome(outcome: UnlearningResult, folder: Path, stem: str) -> dict[str, Any]:
    """Heads and path into files; the rest is returned, for JSON."""
    outcome.head.save(folder / stem)
    if outcome.path:
        write_tensors(folder / f"{stem}.{_PATH}", {"path": torch.stack(outcome.path)})
    trials = [_write_outcome(trial, folder, _TRIAL.format(n)) for n, trial in enumerate(outcome.trials)]
    return {
        "applied": outcome.applied, "predicted_distance_gain": outcome.predicted_distance_gain,
        "details": dict(outcome.details), "note": outcome.note, "trials": trials,
    }  # fmt: skip


def _read_row(folder: Path, original: Head) -> RowResult:
    about = json.loads((folder / _ROW).read_text(encoding="utf-8"))
    usage = Usage(about.pop("seconds"), about.pop("peak_memory_mb"))
    return RowResult(usage, _read_outcome(about, folder, _HEAD, original))


def _read_outcome(about: dict[str, Any], folder: Path, stem: str, original: Head) -> UnlearningResult:
    core = original.core if isinstance(original, LinearisedHead) else None
    head = read_head(folder / stem, core).to(original.parameters_CE.device)
    path: tuple[Tensor, ...] = ()
    if (folder / f"{stem}.{_PATH}").is_file():
        path = tuple(load_file(folder / f"{stem}.{_PATH}")["path"].to(head.parameters_CE.device))
    trials = [_read_outcome(trial, folder, _TRIAL.format(n), original) for n, trial in enumerate(about.pop("trials"))]
    return UnlearningResult(head, path=path, trials=tuple(trials), **about)


def read_head(stem: Path, core: Core | None) -> Head:
    """A head of either kind."""
    return LinearHead.load(stem) if core is None else load_head(stem, core)
