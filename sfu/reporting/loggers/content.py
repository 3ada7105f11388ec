"""What loggers record, as plain names and values; the same names whatever the logger.

``rows/<method>/<metric>``, ``rows/<method>/details/<key>``, ``stages/<name>/seconds`` and ``run/<key>``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sfu.results.rows import flatten_row, is_scalar, rows_of


def where_of(run_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is recorded of where a run stands: its name and folder."""
    return {key: run_info[key] for key in ("name", "folder") if key in run_info}


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


def files_of(folder: Path) -> dict[str, list[Path]]:
    """Return a run's files that are worth uploading: the heads, and the result with its configuration.

    The split and the names of the images to forget are never uploaded, because they say who asked to be forgotten.
    """
    found = {
        "heads": sorted((folder / "heads").glob("*")),
        "result": [path for name in ("metrics.json", "config.yaml") if (path := folder / name).is_file()],
    }
    return {name: paths for name, paths in found.items() if paths}
