"""The key of every stage's result: a digest of everything that decides it, known before any data are loaded.

It covers the settings, the seeds, the content of every file that is read, the kind of device, PyTorch's version and the
code of sfu itself (but for its reports), so that a change anywhere leads to another key and never to a stale result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import torch

import sfu
from sfu.data.content import dataset_content, file_contents
from sfu.experiment.validate import resolve_device
from sfu.results.artifacts import METRICS_SCHEMA
from sfu.seeds import resolve_seeds
from sfu.settings import RunConfig, Tune
from sfu.store import key_of
from sfu.unlearning.rows import RowSpec, row_specs

_OWN = ("dataset", "backbone", "head", "loss", "forget", "dtype")
"""Settings that decide every row; dataset and backbone by their content."""
_NEVER = (
    "methods",
    "variants",
    "curvature",
    "evaluation",
    "logger",
    "device",
    "threads",
    "seed",
    "seeds",
    "reuse",
    "published",
    "tune",
    "tune_budget",
)
"""Settings that decide no row, or (curvature) not as they stand in the run."""
_UNREAD = ("reporting",)


@dataclass(frozen=True)
class StageKeys:
    """Keys of one run's results: the Gram matrix, the original head, every row, and the run as a whole."""

    gram: str
    head: str
    rows: dict[str, str]
    run: str


def stage_keys(config: RunConfig) -> StageKeys:
    """The keys of a run.

    Raises:
        ConfigError: A setting cannot work.
        DataError: A file is missing.
    """
    seeds = resolve_seeds(config)
    base = {
        "code": code_digest(),
        "torch": torch.__version__,
        "device": resolve_device(config.device).type,
        "dtype": config.dtype,
        "data": dataset_content(config.dataset, config.backbone),
        "head": asdict(config.head),
        "loss": asdict(config.loss),
        "seeds": {name: seed for name, seed in seeds.items() if name != "evaluation"},
    }
    head = key_of(_plain({"stage": "head", **base}))
    gram = {"stage": "gram", **base, "head": [config.head.name, config.head.bias]}
    lists = [path for path in (config.forget.indices, config.forget.files) if path is not None]
    forget = {**asdict(config.forget), "indices": None, "files": None, "lists": _contents(lists)}
    rows = {name: _row_key(config, spec, {**base, "forget": forget}) for name, spec in row_specs(config).items()}
    judged = {"evaluation": asdict(config.evaluation), "seed": seeds["evaluation"], "schema": METRICS_SCHEMA}
    return StageKeys(key_of(_plain(gram)), head, rows, key_of({"stage": "run", "rows": list(rows.items()), **judged}))


def _row_key(config: RunConfig, spec: RowSpec, base: Mapping[str, Any]) -> str:
    sections = spec.kind.settings_used
    if sections is None:
        others = (field.name for field in fields(config) if field.name not in (*_OWN, *_NEVER))
        sections = (*others, "curvature")
    used: dict[str, Any] = {name: spec.curvature if name == "curvature" else getattr(config, name) for name in sections}
    reference = spec.curvature.reference_path
    tuned = spec.grid is not None and config.tune is not Tune.authors
    return key_of(
        _plain(
            {
                "stage": "row", **base, "method": spec.method, "settings": spec.settings,
                "used": used, "path": config.evaluation.trade_off,
                "tuning": [config.tune, config.tune_budget, spec.grid] if tuned else None,
                "reference": _contents([reference]) if "curvature" in used and reference else None,
            }
        )
    )  # fmt: skip


@cache
def code_digest() -> str:
    """SHA-256 over the source files of sfu that have a part in results."""
    package, digest = Path(sfu.__file__).parent, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        if path.relative_to(package).parts[0] not in _UNREAD:
            digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _contents(paths: list[str]) -> list[str]:
    return file_contents([Path(path).expanduser() for path in paths])


def _plain(value: Any) -> Any:
    """Enums by their value, through settings, mappings and lists; everything else as it is."""
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
