"""Read what a deletion request is served from, and write the folder of what comes of it."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sfu.errors import ArtifactError, DataError
from sfu.files import file_digest, write_folder, write_text
from sfu.records.chain import verify
from sfu.records.layout import HEAD, MODELS, digests_of, is_head_folder, model_in, records_in
from sfu.records.record import (
    SCHEMA,
    Asked,
    DeletionRecord,
    Done,
    Estimated,
    FileDigests,
    Searched,
    as_text,
    hash_of,
    read_deletion_record,
)
from sfu.records.text import as_markdown
from sfu.records.training import TrainingFile

if TYPE_CHECKING:
    from torch import nn

    from sfu.heads.base import Head
    from sfu.unlearning.result import UnlearningResult


@dataclass(frozen=True)
class Source:
    """What a request is served from.

    Attributes:
        head: The head.
        files: Digests of its files.
        model: The checkpoint of the whole model, if there is one.
        layer: Name of its layer.
        module: That layer, in the checkpoint's dtype.
        records: Paths of the records so far, the first at the front.
    """

    head: Head
    files: FileDigests
    model: Path | None = None
    layer: str | None = None
    module: nn.Linear | None = field(default=None, repr=False)
    records: tuple[Path, ...] = ()


def read_source(path: Path, layer: str | None = None, training: TrainingFile | None = None) -> Source:
    """Read what a request is served from.

    Args:
        path: A folder that ``sfu-unlearn`` wrote, the stem of a saved head, or a checkpoint of a whole model.
        layer: Name of the checkpoint's layer.
        training: How that layer was trained.

    Raises:
        ArtifactError: A file is missing, damaged or altered.
        DataError: The checkpoint cannot be read, or has no such layer; or the head is not linear.
        ConfigError: The training does not fit the layer.
    """
    from sfu.heads.checkpoint import read_layer
    from sfu.heads.files import load_head

    if layer is not None and training is not None:
        module = read_layer(path, layer)
        return Source(training.head(module), FileDigests(model=file_digest(path)), path, layer, module)
    if not is_head_folder(path):
        return Source(_linear(load_head(path)), digests_of(path))
    if not records_in(path):
        raise ArtifactError(f"{path} holds a head without a record. Give the head itself, {path / HEAD}.")
    found = verify([path])
    if wrong := [*found.problems, *found.remarks]:
        raise ArtifactError(f"{path} is not as sfu-unlearn left it: {wrong[0]} Put back the files that differ.")
    last, model = found.records[-1], model_in(path)
    layer = last.done.layer
    module_or_none = None if model is None or layer is None else read_layer(model, layer)
    return Source(_linear(load_head(path / HEAD)), last.after, model, layer, module_or_none, tuple(records_in(path)))


def _linear(head: Head) -> Head:
    if head.feature_weights_CD is None:
        raise DataError(
            f"the head is a {type(head).__name__}, and sfu-unlearn serves linear heads, whose rows are features. Use "
            "sfu.unlearn."
        )
    return head


def fit_layer(source: Source, result: UnlearningResult) -> tuple[UnlearningResult, float | None]:
    """Write the new weights into the layer of the checkpoint, in its dtype.

    Return the result, with a reservation if rounding undoes much of the step, and the share of the change that it
    undoes; ``None`` without a checkpoint.

    Raises:
        DataError: The dtype cannot hold the weights.
    """
    from sfu.heads.linear import LinearHead
    from sfu.heads.plain_layer import MUCH_LOST, write_weights
    from sfu.unlearning.result import Remark

    head = result.head
    if source.module is None or not isinstance(head, LinearHead):
        return result, None
    lost = write_weights(source.module, head.weight_CD, head.parameters_CE[:, -1] if head.bias else None)
    if lost <= MUCH_LOST:
        return result, lost
    dtype = str(source.module.weight.dtype).removeprefix("torch.")
    remark = Remark("rounding", f"rounding to {dtype} moves the weights by {lost:.0%} of the step")
    note = "; ".join(filter(None, (result.note, remark.text)))
    return replace(result, reasons=(*result.reasons, remark.code), note=note), lost


def write_head(
    source: Source, result: UnlearningResult, rounded: float | None, asked: Asked,
    caches: dict[str, Searched] | None, not_touched: list[str], folder: Path, *, version: str, in_place: bool = False,
) -> DeletionRecord:  # fmt: skip
    """Write the unlearned head, the model and all records to a folder that appears complete or not at all.

    Args:
        source: What the request was served from.
        result: What came of it; the step was applied.
        rounded: What :func:`fit_layer` returned for it.
        asked: What was asked.
        caches: Caches that were searched for the rows, by their name.
        not_touched: What was not changed, sentence by sentence.
        folder: The folder; hold its lock (:func:`sfu.files.folder_lock`).
        version: That of sfu.
        in_place: Whether it takes the place of the one that is there.

    Raises:
        ArtifactError: Something cannot be written.
    """
    from sfu.heads.checkpoint import write_layer

    made: list[DeletionRecord] = []

    def write(temporary: Path) -> None:
        result.head.save(temporary / HEAD)
        model = None
        if source.model is not None and source.layer is not None and source.module is not None:
            model = temporary / MODELS[source.model.suffix != ".safetensors"]
            write_layer(source.model, source.layer, source.module, model)
        for path in source.records:
            for part in (path, path.with_suffix(".md")):
                if part.is_file():
                    shutil.copyfile(part, temporary / part.name)
        files = source.files, digests_of(temporary / HEAD, model)
        last = read_deletion_record(source.records[-1]) if source.records else None
        done, estimated = _done(source, result, rounded), _estimated(result)
        content, text = _record(last, files, asked, done, estimated, caches, not_touched, version)
        path = temporary / f"record-{content['number']}.json"
        write_text(path.with_suffix(".md"), text)
        write_text(path, as_text(content))
        made.append(read_deletion_record(path))

    write_folder(folder, write, replace=in_place)
    return made[0]


def _done(source: Source, result: UnlearningResult, rounded: float | None) -> Done:
    before, after = source.head.forgotten, result.head.forgotten
    return Done(
        verdict=cast(Any, result.verdict), reasons=list(result.reasons), method=result.method or "", note=result.note,
        rows=after.rows - before.rows, row_digests=sorted(one.hex() for one in after.digests - before.digests),
        n_train=(source.head.n_train, result.head.n_train), layer=source.layer, rounded=rounded,
        earlier_requests=before.requests - len(source.records),
    )  # fmt: skip


def _estimated(result: UnlearningResult) -> Estimated:
    interval = result.details.get("l2_interval")
    return Estimated(
        share=result.predicted_share, share_interval=result.predicted_share_interval,
        distance=result.predicted_distance, l2=result.head.l2,
        l2_interval=(interval[0], interval[1]) if isinstance(interval, tuple) else None,
    )  # fmt: skip


def _record(
    last: DeletionRecord | None, files: tuple[FileDigests, FileDigests], asked: Asked, done: Done, estimated: Estimated,
    caches: dict[str, Searched] | None, not_touched: list[str], version: str,
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """Return the content of a record, and its Markdown form."""
    import torch

    number, time = (1 if last is None else last.number + 1), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    versions = f"sfu {version} and PyTorch {torch.__version__}"
    text = as_markdown(number, time, versions, files, asked, done, estimated, not_touched)
    content = {
        "schema": SCHEMA, "number": number, "previous": None if last is None else last.hash, "time": time,
        "sfu": version, "torch": str(torch.__version__), "before": files[0].model_dump(),
        "after": files[1].model_dump(), "asked": asked.model_dump(), "done": done.model_dump(mode="json"),
        "estimated": estimated.model_dump(mode="json"),
        "caches": None if caches is None else {name: found.model_dump() for name, found in caches.items()},
        "not_touched": not_touched, "text": hashlib.sha256(text.encode()).hexdigest(),
    }  # fmt: skip
    return {**content, "hash": hash_of(content)}, text
