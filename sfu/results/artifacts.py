"""What a run leaves in its folder. Every file is written atomically, so it is either complete or absent.

config.yaml          the resolved configuration
status.json          running, finished, interrupted or failed (with the error), and the process that runs it
split.safetensors    forget_indices, retain_indices (training row numbers, int64)
examples.secret      digests of all examples of the data, by which a purge knows the run; for its owner alone
forget_files.txt     the files of the images to forget, if they are files
heads/NAME.*         Original and every row's head, safetensors + JSON; NAME.secret, for its owner: noise and Hessian
metrics.json         the result (schema 1), also as metrics.csv, table.md, figure.png
roc.json             the ROC curve of each attack on each row, with evaluation.attacks besides the paper's; also roc.png
trade_off.json       test and forget accuracy along the path of each row, with evaluation.trade_off; also trade_off.png
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field

from sfu.errors import ArtifactError
from sfu.files import SECRET, leftovers, write_tensors, write_text
from sfu.readers import (
    TEXT_BYTES,
    Count,
    Percent,
    Record,
    Scalar,
    Size,
    Versioned,
    Whole,
    parse_record,
    read_bytes,
    refusing,
)

if TYPE_CHECKING:
    from sfu.data.split import ForgetSplit

METRICS_SCHEMA = 1
FILES = (
    *("config.yaml", "status.json", "split.safetensors", "examples.secret", "forget_files.txt"),
    *("metrics.json", "metrics.csv", "table.md", "figure.png", "trade_off.json", "trade_off.png"),
    *("roc.json", "roc.png"),
)

Cell = Scalar | list[Any] | dict[str, Any]
"""What a row may say; lists and mappings are not shown."""


Share = Annotated[float, Field(ge=0, le=1)]
Interval = tuple[Share, Share]


class AttackRecord(Record):
    """The figures of one membership attack on a row; those that sfu does not know are kept."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Cell]

    auc: Share | None = None
    auc_interval: Interval | None = None
    auc_gap: Annotated[float, Field(ge=-1, le=1)] | None = None
    balanced_accuracy: Share | None = None
    tpr_at_1: Share | None = Field(None, alias="tpr_at_fpr_0.01")
    tpr_at_1_interval: Interval | None = Field(None, alias="tpr_at_fpr_0.01_interval")
    tpr_at_01: Share | None = Field(None, alias="tpr_at_fpr_0.001")
    tpr_at_01_interval: Interval | None = Field(None, alias="tpr_at_fpr_0.001_interval")
    epsilon_lower: Size | None = None
    n_members: Count | None = None
    n_others: Count | None = None
    shift: Size | None = None
    accuracy: Percent | None = None
    accuracy_std: Size | None = None
    note: str | None = None


class RowRecord(Record):
    """One row of metrics.json; metrics that sfu does not know are kept."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Cell]

    access: str | None = None
    tuning: str | None = None
    applied: bool | None = None
    note: str | None = None
    error: str | None = None
    details: dict[str, Cell] | None = None
    test_accuracy: Percent | None = None
    remain_accuracy: Percent | None = None
    forget_accuracy: Percent | None = None
    canary_accuracy: Percent | None = None
    mia: Percent | None = None
    mia_std: Size | None = None
    distance: Size | None = None
    agreement: Percent | None = None
    forget_kl: Size | None = None
    weight_distance: Size | None = None
    forget_kl_reversed: Size | None = None
    forget_js: Size | None = None
    forget_margin_difference: Size | None = None
    test_margin_difference: Size | None = None
    klom_forget: Size | None = None
    klom_test: Size | None = None
    retain_gradient_norm: Size | None = None
    seconds: Size | None = None
    peak_memory_mb: Size | None = None
    isolation: str | None = None
    attacks: dict[str, AttackRecord] | None = None


class _Named(Record):
    name: str | None = None


class _Data(_Named):
    path: str | None = None
    n_train: Count | None = None
    n_forget: Count | None = None
    n_retain: Count | None = None
    n_test: Count | None = None
    n_features: Count | None = None
    n_classes: Count | None = None
    class_names: list[str] | None = None
    backbone: _Named | None = None


class _Forget(Record):
    kind: str | None = None
    classes: list[Scalar] | None = None
    fraction: float | None = None


class _Head(Record):
    l2: Size | None = None
    bias: bool | None = None
    loss: _Named | None = None


class _Git(Record):
    commit: str
    changed: bool


class _Expected(Record):
    seconds: Size
    memory_mb: Size


class RunRecord(_Named):
    """What metrics.json says of the run, as far as sfu reads it."""

    sfu_version: str | None = None
    versions: dict[str, str] | None = None
    device: str | None = None
    dtype: str | None = None
    threads: Count | None = None
    tf32: bool | None = None
    git: _Git | None = None
    seconds: Size | None = None
    overrides: list[str] | None = None
    published: str | None = None
    reused: list[str] | None = None
    seeds: dict[str, Whole] | None = None
    data: _Data | None = None
    expected: _Expected | None = None
    forget: _Forget | None = None
    head: _Head | None = None


class MetricsRecord(Versioned):
    """The content of metrics.json."""

    run: RunRecord | None = None
    rows: dict[str, RowRecord]


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
    remedy = "Run again, or take another copy of it."
    with refusing(path, remedy):
        text = read_bytes(path, TEXT_BYTES)
        schema = parse_record(text, Versioned).version
        if schema == METRICS_SCHEMA:
            parse_record(text, MetricsRecord)
            return dict(finite(json.loads(text)))
    raise ArtifactError(f"{path} has schema {schema}, and this sfu reads {METRICS_SCHEMA}. Use the sfu that wrote it.")


def finite(value: Any) -> Any:
    """Return ``value`` with ``None`` for NaN and infinities, through mappings and lists."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
