"""Read what a deletion request is served from, and write the folder of what comes of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sfu.errors import ArtifactError, DataError
from sfu.files import copy_file, file_digest, write_folder, write_text
from sfu.records.chain import verify
from sfu.records.layout import BEFORE, HEAD, MODELS, digests_of, head_files, is_head_folder, model_in, records_in
from sfu.records.record import (
    SCHEMA,
    Asked,
    DeletionRecord,
    Done,
    Estimated,
    Event,
    FileDigests,
    Purged,
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
    module_or_none = None if model is None or last.layer is None else read_layer(model, last.layer)
    head, records = _linear(load_head(path / HEAD)), tuple(records_in(path))
    return Source(head, last.after, model, last.layer, module_or_none, records)


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


def write_request(
    source: Source, result: UnlearningResult, rounded: float | None, asked: Asked, not_touched: list[str],
    folder: Path, *, version: str, in_place: bool = False, keep: bool = False,
) -> DeletionRecord:  # fmt: skip
    """Write the unlearned head, the model and all records to a folder that appears complete or not at all.

    Args:
        source: What the request was served from.
        result: What came of it; the step was applied.
        rounded: What :func:`fit_layer` returned for it.
        asked: What was asked.
        not_touched: What was not changed, sentence by sentence.
        folder: The folder; hold its lock (:func:`sfu.files.folder_lock`).
        version: That of sfu.
        in_place: Whether it takes the place of the one that is there.
        keep: Whether the head that is there is kept in the new folder, so that :func:`undo` finds it.

    Raises:
        ArtifactError: Something cannot be written.
    """
    from sfu.heads.checkpoint import write_layer

    def write(temporary: Path) -> None:
        result.head.save(temporary / HEAD)
        if source.model is not None and source.layer is not None and source.module is not None:
            model = temporary / MODELS[source.model.suffix != ".safetensors"]
            write_layer(source.model, source.layer, source.module, model)
        if keep:
            (temporary / BEFORE).mkdir()
            _take(head_files(folder), temporary / BEFORE, link=in_place)

    event = Event(event="request", asked=asked, done=_done(source, result, rounded, keep), estimated=_estimated(result))
    return _write(source, event, not_touched, folder, write, version, in_place)


def undo(folder: Path, version: str) -> DeletionRecord:
    """Put back the head that :func:`write_request` kept, with a record of that.

    Args:
        folder: The folder; hold its lock.
        version: That of sfu.

    Raises:
        ArtifactError: The folder is not as sfu left it, holds no such head, or cannot be written.
    """
    source = read_source(folder)
    last = read_deletion_record(source.records[-1])
    if not is_head_folder(folder / BEFORE):
        raise ArtifactError(
            f"{folder} does not hold the head before its last request, so nothing can be undone. A request keeps it "
            "with --keep-old."
        )

    def write(temporary: Path) -> None:
        _take(head_files(folder / BEFORE), temporary, link=True)

    return _write(source, Event(event="undo", undone=last.number), [], folder, write, version, in_place=True)


def write_purge(source: Source, purged: Purged, not_touched: list[str], folder: Path, version: str) -> DeletionRecord:
    """Write the record of a purge, and the folder without the head before and without a ledger.

    Args:
        source: What the folder holds.
        purged: What was removed elsewhere, and whether the head before and the ledger go now.
        not_touched: What was not searched, sentence by sentence.
        folder: The folder; hold its lock.
        version: That of sfu.

    Raises:
        ArtifactError: Something cannot be written.
    """

    def write(temporary: Path) -> None:
        _take(head_files(folder), temporary, link=True)
        if purged.ledger:
            source.head.without_ledger().save(temporary / HEAD)

    return _write(source, Event(event="purge", purged=purged), not_touched, folder, write, version, in_place=True)


def _take(files: Sequence[Path], folder: Path, *, link: bool) -> None:
    """Copy files to a folder; a link saves the time and the space where the first of them is to go."""
    for file in files:
        try:
            if not link:
                raise OSError
            os.link(file, folder / file.name)
        except OSError:
            copy_file(file, folder / file.name)


def _write(
    source: Source, event: Event, not_touched: list[str], folder: Path, write_files: Callable[[Path], None],
    version: str, in_place: bool,
) -> DeletionRecord:  # fmt: skip
    """Write a folder of what ``write_files`` writes, the records so far, and a record of the event."""
    made: list[DeletionRecord] = []

    def write(temporary: Path) -> None:
        write_files(temporary)
        parts = [part for path in source.records for part in (path, path.with_suffix(".md")) if part.is_file()]
        _take(parts, temporary, link=in_place)
        last = read_deletion_record(source.records[-1]) if source.records else None
        after = digests_of(temporary / HEAD, model_in(temporary))
        content, text = _record(last, (source.files, after), event, source.layer, not_touched, version)
        path = temporary / f"record-{content['number']}.json"
        write_text(path.with_suffix(".md"), text)
        write_text(path, as_text(content))
        made.append(read_deletion_record(path))

    write_folder(folder, write, replace=in_place)
    return made[0]


def _done(source: Source, result: UnlearningResult, rounded: float | None, kept: bool) -> Done:
    before, after = source.head.forgotten, result.head.forgotten
    served = sum({"request": 1, "undo": -1}.get(read_deletion_record(path).event, 0) for path in source.records)
    return Done(
        verdict=cast(Any, result.verdict), reasons=list(result.reasons), method=result.method or "", note=result.note,
        rows=after.rows - before.rows, row_digests=sorted(one.hex() for one in after.digests - before.digests),
        n_train=(source.head.n_train, result.head.n_train), rounded=rounded, kept=kept,
        earlier_requests=before.requests - served,
    )  # fmt: skip


def _estimated(result: UnlearningResult) -> Estimated:
    interval = result.details.get("l2_interval")
    return Estimated(
        share=result.predicted_share, share_interval=result.predicted_share_interval,
        distance=result.predicted_distance, l2=result.head.l2,
        l2_interval=(interval[0], interval[1]) if isinstance(interval, tuple) else None,
    )  # fmt: skip


def _record(
    last: DeletionRecord | None, files: tuple[FileDigests, FileDigests], event: Event, layer: str | None,
    not_touched: list[str], version: str,
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """Return the content of a record, and its Markdown form."""
    import torch

    number, time = (1 if last is None else last.number + 1), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    versions = f"sfu {version} and PyTorch {torch.__version__}"
    text = as_markdown(number, time, versions, files, event, layer, not_touched)
    content = {
        "schema": SCHEMA, "number": number, "previous": None if last is None else last.hash, "time": time,
        "sfu": version, "torch": str(torch.__version__), "before": files[0].model_dump(),
        "after": files[1].model_dump(), "layer": layer, **event.model_dump(mode="json"), "not_touched": not_touched,
        "text": hashlib.sha256(text.encode()).hexdigest(),
    }  # fmt: skip
    return {**content, "hash": hash_of(content)}, text
