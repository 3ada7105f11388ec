"""The key of every stage's result: a digest of everything that decides it, known before any data are loaded.

It covers the settings, the seeds, the content of every file that is read, the kind of device, the number of threads and
the processor's instruction set (sums in another order end in other digits), PyTorch's version and the code of sfu
(except for its reports) and of installed plug-ins, so that a change anywhere leads to another key and never to a stale
result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import sfu
from sfu.data.load import dataset_content, file_contents
from sfu.experiment.config import RunConfig, plain
from sfu.experiment.validate import resolve_device
from sfu.isolation.sandbox import protections
from sfu.registry import plugin_files
from sfu.results.artifacts import METRICS_SCHEMA
from sfu.store import key_of
from sfu.unlearning.rows import RowSpec, row_specs
from sfu.unlearning.settings import Tune

_WITHOUT_RESULTS = ("reporting",)


@dataclass(frozen=True)
class StageKeys:
    """Keys of one run's results: the digests of its examples, the original head, every row, and the run as a whole."""

    examples: str
    head: str
    rows: dict[str, str]
    run: str


def stage_keys(config: RunConfig) -> StageKeys:
    """Return the keys of a run.

    Raises:
        ConfigError: A setting cannot work.
        DataError: A file is missing.
    """
    seeds = config.seed_for.resolve(config.seed)
    base = {
        "code": code_digest(),
        "torch": torch.__version__,
        "device": resolve_device(config.device).type,
        "threads": config.threads or torch.get_num_threads(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "dtype": config.dtype,
        "data": {"settings": _effective(config.dataset), **dataset_content(config.dataset, config.backbone)},
        "head": _effective(config.head),
        "loss": _effective(config.loss),
        "canaries": _effective(config.canaries),
        "seeds": {name: seed for name, seed in seeds.items() if name != "evaluation"},
    }
    lists = [path for path in (config.forget.indices, config.forget.files) if path is not None]
    forget = {**_effective(config.forget), "lists": _contents(lists)}
    rows = {name: _row_key(config, spec, {**base, "forget": forget}) for name, spec in row_specs(config).items()}
    evaluated = {"evaluation": _effective(config.evaluation), "seed": seeds["evaluation"], "schema": METRICS_SCHEMA}
    run = key_of({"stage": "run", "rows": list(rows.items()), **evaluated})
    examples = key_of({"stage": "examples", "data": base["data"]})
    return StageKeys(examples, key_of({"stage": "head", **base}), rows, run)


def _row_key(config: RunConfig, spec: RowSpec, base: Mapping[str, Any]) -> str:
    used = {name: spec.curvature if name == "curvature" else getattr(config, name) for name in spec.kind.groups_used()}
    tuned = spec.grid is not None and config.tune is not Tune.authors
    record = {
        "stage": "row", **base, "method": spec.kind.registered_name, "settings": spec.settings, "used": used,
        "path": config.evaluation.trade_off,
        "curvature": config.evaluation.theory,
        "isolation": protections(isolate=config.isolate),
        "tuning": [config.tune, config.tune_budget, spec.grid] if tuned else None,
        "files": _contents(spec.curvature.files()) if "curvature" in used else [],
    }  # fmt: skip
    return key_of(plain(record, effective=True))


@cache
def code_digest() -> str:
    """Return the SHA-256 over the source files that have a part in results: sfu's, and those of plug-ins."""
    package, digest = Path(sfu.__file__).parent, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        if path.relative_to(package).parts[0] not in _WITHOUT_RESULTS:
            digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes())
    for path in plugin_files():
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _effective(settings: Any) -> Any:
    return plain(settings, effective=True)


def _contents(paths: list[str]) -> list[str]:
    return file_contents([Path(path).expanduser() for path in paths])
