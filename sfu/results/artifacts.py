"""What a run leaves in its folder. Every file is written atomically, so it is either complete or absent.

config.yaml          the resolved configuration
status.json          running, finished, interrupted or failed (with the error), and the process that runs it
split.safetensors    forget_indices, retain_indices (training row numbers, int64)
forget_files.txt     the files of the images to forget, if they are files
heads/NAME.*         Original and every row's head, safetensors + JSON; NAME.secret, for its owner: noise and Hessian
metrics.json         the result (schema 1), also as metrics.csv, table.md, figure.png
trade_off.json       test and forget accuracy along the path of each row, with evaluation.trade_off; also trade_off.png
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfu.errors import ArtifactError
from sfu.files import SECRET, leftovers, write_tensors, write_text

if TYPE_CHECKING:
    from sfu.data.split import ForgetSplit

METRICS_SCHEMA = 1
FILES = (
    *("config.yaml", "status.json", "split.safetensors", "forget_files.txt"),
    *("metrics.json", "metrics.csv", "table.md", "figure.png", "trade_off.json", "trade_off.png"),
)


def write_json(path: Path, value: Any) -> None:
    """Write JSON without NaN and infinity, on which readers do not agree.

    Raises:
        ArtifactError: The file cannot be written.
        ValueError: ``value`` holds NaN or infinity.
    """
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def overwrite_json(path: Path, value: Any) -> None:
    """Write JSON over a small file where it stands if the disk has no room for a second one; else remove the file."""
    with suppress(ArtifactError):
        write_json(path, value)
        return
    try:
        with path.open("r+", encoding="utf-8") as file:
            json.dump(value, file, indent=2, allow_nan=False)
            file.truncate()
    except OSError:
        with suppress(OSError):
            path.unlink()


def remove_results(folder: Path) -> None:
    """Remove what an earlier run left in a folder that is used again, so that no old result stands beside a new one.

    Raises:
        ArtifactError: A file cannot be removed.
    """
    heads = [path for path in (folder / "heads").glob("*") if path.suffix in (".json", ".safetensors", SECRET)]
    try:
        for path in [*(folder / name for name in FILES), *heads, *leftovers(folder), *leftovers(folder / "heads")]:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ArtifactError(
            f"The results in {folder} cannot be removed ({error}). Choose another hydra.run.dir."
        ) from error


def save_split(path: Path, split: ForgetSplit) -> None:
    """Write the row numbers of both sides as safetensors."""
    write_tensors(path, {"forget_indices": split.forget_F, "retain_indices": split.retain_R}, {"kind": split.kind})


def read_metrics(path: Path) -> dict[str, Any]:
    """Read a metrics.json.

    Raises:
        ArtifactError: It is missing, damaged, or of another schema.
    """
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read ({error}).") from error
    schema = metrics.get("schema") if isinstance(metrics, dict) else None
    if schema != METRICS_SCHEMA:
        raise ArtifactError(f"{path} has schema {schema}; this sfu reads schema {METRICS_SCHEMA}.")
    return dict(metrics)


def finite(value: Any) -> Any:
    """Return ``value`` with ``None`` for NaN and infinities, through mappings and lists."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
