"""What loggers record, as plain names and values; the same names whatever the logger.

``rows/<method>/<metric>``, ``rows/<method>/details/<key>``, ``stages/<name>/seconds`` and ``run/<key>``.

A logger may upload what it is given. It is therefore given the settings and the parts of the record that are listed
here, and nothing else: no paths, no names of files, classes or machines, no overrides, no messages of errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sfu.results.rows import flatten_row, is_scalar, rows_of

UPLOADED_SETTINGS = (
    "dataset.name", "dataset.test_fraction", "dataset.normalize_rows", "dataset.limit_per_class",
    "dataset.core_fraction", "backbone.name", "backbone.dtype", "backbone.size", "head", "loss", "curvature", "newton",
    "forget.fraction", "forget.choose", "forget.parts", "canaries.count", "canaries.kind", "canaries.strength",
    "evaluation", "methods", "tune", "tune_budget", "seed", "dtype",
)  # fmt: skip
"""Settings that loggers are given, with all below them; of these, no text but names that sfu knows, and names of rows
(:func:`sfu.experiment.config.public_settings`)."""

UPLOADED_RECORD = (
    "name", "sfu_version", "versions", "device", "threads", "dtype", "started", "seconds", "reused", "seeds.seed",
    "tune", "data.name", "data.backbone.name", "data.n_train", "data.n_forget", "data.n_retain", "data.n_test",
    "data.n_features", "data.n_classes", "forget.kind", "forget.fraction", "head.l2", "head.bias", "head.training",
    "head.gradient_norm", "head.n_parameters", "head.loss.name",
)  # fmt: skip
"""What loggers are given of ``run`` in metrics.json. Of a row they are given all but the message of its error."""

FAILED = "failed; the message is in the run's folder"
_HEADS = (".json", ".safetensors")


def picked(values: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return those entries of nested mappings that ``keys`` name, such as ``head.l2``, and that are there."""
    found: dict[str, Any] = {}
    for key in keys:
        *parents, last = key.split(".")
        source: Any = values
        for parent in parents:
            source = source.get(parent) if isinstance(source, Mapping) else None
        if isinstance(source, Mapping) and last in source:
            place = found
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = source[last]
    return found


def public_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return what loggers are given of a metrics.json."""
    rows = {
        name: {**row, "note": FAILED, "error": FAILED} if row.get("error") else dict(row)
        for name, row in rows_of(metrics).items()
    }
    return {"schema": metrics.get("schema"), "run": picked(metrics.get("run") or {}, UPLOADED_RECORD), "rows": rows}


def stage_name(stage: str) -> str:
    """Return the name under which a stage's seconds are recorded."""
    return f"stages/{stage}/seconds"


def summary_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scalars of a result by their name; what is null is left out."""
    found: dict[str, Any] = {}
    for name, row in rows_of(metrics).items():
        for key, value in flatten_row(row).items():
            if value is not None:
                found[f"rows/{name}/{key.replace('details.', 'details/', 1)}"] = value
    for key, value in (metrics.get("run") or {}).items():
        if value is not None and is_scalar(value):
            found[f"run/{key}"] = value
    return found


def heads_of(folder: Path) -> list[Path]:
    """Return the files of a run's heads without their secrets."""
    return sorted(path for path in (folder / "heads").glob("*") if path.suffix in _HEADS)
