"""The deletion record: what was done to a head, on whose request, and what was not, without any content of an example.

A record is JSON whose ``hash`` is the SHA-256 of all else in it, as canonical JSON (:func:`hash_of`), and whose
``previous`` is the ``hash`` of the record before it. No PyTorch is imported.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from sfu.errors import ArtifactError
from sfu.readers import Count, Record, Size, Versioned, parse_record, read_bytes, refusing

SCHEMA = 1
_BYTES, _ITEMS = 64 << 20, 1_100_000  # a million forgotten rows
_REMEDY = "Take another copy of the record."
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
RowDigest = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Share = Annotated[float, Field(ge=-1, le=1)]
Interval = tuple[float, float]


class _Exact(Record):
    model_config = ConfigDict(extra="forbid")


class FileDigests(_Exact):
    """SHA-256 of the files of a head; ``None`` for those it does not have.

    Attributes:
        tensors: ``head.safetensors``.
        settings: ``head.json``.
        secret: ``head.secret``.
        model: The checkpoint of the whole model.
    """

    tensors: Digest | None = None
    settings: Digest | None = None
    secret: Digest | None = None
    model: Digest | None = None


class Asked(_Exact):
    """What was asked.

    Attributes:
        kind: What the rows were declared to be: ``random``, ``class``, ``person`` or ``selected``.
        files: Number of files of rows; they were served as one request.
        rows: Number of rows in them.
        unlabelled: Number of rows of each unlabelled set.
        seed: Seed of folds and perturbations.
        copies: Whether rows that were given several times counted as often.
        on_doubt: Whether a step that is predicted to do harm was to be withheld (``withhold``) or taken (``apply``).
    """

    kind: str
    files: Annotated[Count, Field(gt=0)]
    rows: Count
    unlabelled: list[Count]
    seed: Count
    copies: bool
    on_doubt: Literal["withhold", "apply"]


class Done(_Exact):
    """What was done.

    Attributes:
        verdict: Whether the step was taken.
        reasons: Codes of the reservations, if there are any.
        method: The method and its estimator.
        note: What sfu says of the step.
        rows: Number of rows that were taken out now; the others had been before, or are equal to others.
        row_digests: Keyed digests of these rows, sorted. The key is in ``head.secret`` alone.
        n_train: Number of training rows before and after.
        earlier_requests: Requests that the head had served before the first record.
        kept: Whether the head before is kept beside the new one, until the next request.
        rounded: Share of the change that is lost to the dtype of the checkpoint.
    """

    verdict: Literal["applied", "applied_with_reservations"]
    reasons: list[str]
    method: str
    note: str | None
    rows: Count
    row_digests: list[RowDigest]
    n_train: tuple[Count, Count]
    earlier_requests: Count
    kept: bool
    rounded: Size | None


class Estimated(_Exact):
    """What is estimated from the rows.

    Attributes:
        share: Share of the squared distance to a retrained head that the step, or all requests so far, removed.
        share_interval: It lies in here nine times in ten.
        distance: Distance to the retrained head that is left, of which 1 is that of doing nothing.
        l2: The l2 that the step used.
        l2_interval: The interval of an l2 that was estimated.
    """

    share: Share | None
    share_interval: Interval | None
    distance: Size | None
    l2: Size
    l2_interval: Interval | None


class Removed(_Exact):
    """What was removed of one kind.

    Attributes:
        made_of_them: Entries or folders whose data held one of the rows.
        unknown: Those that do not say what they were made of.
    """

    made_of_them: Count
    unknown: Count


class Purged(_Exact):
    """What was removed from the disk because it was made of the rows.

    Attributes:
        rows: Number of rows that were looked for.
        caches: Entries of the caches, by the name of the cache.
        runs: Heads of run folders.
        kept_head: Whether the head before the last request was removed.
        ledger: Whether the head lost its sums over forgotten rows.
    """

    rows: Count
    caches: dict[str, Removed]
    runs: Removed
    kept_head: bool
    ledger: bool


class Event(_Exact):
    """What happened: one of the four is there, with ``estimated`` for a request.

    Attributes:
        event: ``request``: a step was taken. ``undo``: the step of the last request was taken back. ``purge``: files
            that were made of rows were removed.
        asked: What was asked, if it is a request.
        done: What was done for it.
        estimated: What is estimated.
        undone: Number of the record whose step was taken back.
        purged: What was removed.
    """

    event: Literal["request", "undo", "purge"]
    asked: Asked | None = None
    done: Done | None = None
    estimated: Estimated | None = None
    undone: Count | None = None
    purged: Purged | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        there = {name for name in _PARTS if getattr(self, name) is not None}
        if there != {name for name, event in _PARTS.items() if event == self.event}:
            raise ValueError(f"a record of the event {self.event} cannot have {', '.join(sorted(there)) or 'nothing'}")
        return self


_PARTS = {"asked": "request", "done": "request", "estimated": "request", "undone": "undo", "purged": "purge"}


class DeletionRecord(Event, Versioned):
    """One event in the life of a head.

    Attributes:
        number: 1 for the first record of a head, 2 for the next.
        previous: ``hash`` of the record before; ``None`` for the first.
        time: When the record was made, in UTC, ``2026-11-29T15:30:00Z``.
        sfu: Version of sfu.
        torch: Version of PyTorch.
        before: Digests of the files that the head came from.
        after: Digests of the files that were written.
        layer: The layer of the checkpoint, if there is one.
        not_touched: What was not changed, sentence by sentence.
        text: SHA-256 of the Markdown form.
        hash: SHA-256 of all else, as canonical JSON.
    """

    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = Field(alias="schema")
    number: Annotated[Count, Field(gt=0)]
    previous: Digest | None
    time: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
    sfu: str
    torch: str
    before: FileDigests
    after: FileDigests
    layer: str | None
    not_touched: list[str]
    text: Digest
    hash: Digest


def hash_of(content: dict[str, Any]) -> str:
    """Return the SHA-256 of a record's canonical JSON, without its ``hash``, in hex.

    Canonical JSON has sorted keys, no spaces, and no characters beyond ASCII: ``json.dumps(content, sort_keys=True,
    separators=(",", ":"))``.
    """
    content = {key: value for key, value in content.items() if key != "hash"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def as_text(content: dict[str, Any]) -> str:
    """Return a record as it is written to a file."""
    return json.dumps(content, indent=2) + "\n"


def read_deletion_record(path: Path) -> DeletionRecord:
    """Return the record in a file, every byte of which is as sfu wrote it.

    Raises:
        ArtifactError: The file cannot be read, is of another schema, holds a wrong value, or was altered.
    """
    with refusing(path, _REMEDY):
        text = read_bytes(path, _BYTES)
        version = parse_record(text, Versioned, _ITEMS).version
        if version != SCHEMA:
            raise ArtifactError(f"{path} has schema {version}, but this sfu reads schema {SCHEMA}. Use a newer sfu.")
        record, content = parse_record(text, DeletionRecord, _ITEMS), json.loads(text)
    if hash_of(content) != record.hash:
        raise ArtifactError(
            f"{path} was altered: the SHA-256 of its content is {hash_of(content)[:16]}..., but its hash is "
            f"{record.hash[:16]}.... {_REMEDY}"
        )
    if as_text(content).encode() != text:
        raise ArtifactError(f"{path} was altered: it is not laid out as sfu writes records. {_REMEDY}")
    return record
