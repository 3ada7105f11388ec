"""Check deletion records: each by its own hash, all of them as a chain, and the last against the head beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from sfu.errors import ArtifactError
from sfu.files import file_digest
from sfu.records.layout import BEFORE, HEAD, digests_of, is_head_folder, model_in, records_in
from sfu.records.record import DeletionRecord, FileDigests, read_deletion_record

_FILES = ("tensors", "settings", "secret", "model")


@dataclass(frozen=True)
class Verified:
    """What a check of records found.

    Attributes:
        records: The records that were read, by their number.
        problems: What is wrong, one sentence each; nothing if all is well.
        remarks: What could not be checked.
    """

    records: list[DeletionRecord]
    problems: list[str]
    remarks: list[str]


def verify(paths: Sequence[Path], expected: str | None = None) -> Verified:
    """Check records, given as files or as folders of ``sfu-unlearn``.

    Args:
        paths: Files and folders.
        expected: The hash that the last record must have.

    Raises:
        ArtifactError: A path holds no record.
    """
    files = [file for path in paths for file in _files(path)]
    problems: list[str] = []
    found: list[tuple[DeletionRecord, Path]] = []
    for file in dict.fromkeys(files):
        try:
            found.append((read_deletion_record(file), file))
        except ArtifactError as error:
            problems.append(str(error))
    found.sort(key=lambda one: one[0].number)
    problems += _in_chain(found)
    for record, file in found:
        text = file.with_suffix(".md")
        if text.is_file() and file_digest(text) != record.text:
            problems.append(f"{text} is not the text that {file.name} was made with.")
    remarks: list[str] = []
    for folder in dict.fromkeys(file.parent for file in files if is_head_folder(file.parent)):
        _check_head(folder, found, problems, remarks)
    if expected is not None and found and found[-1][0].hash != expected:
        problems.append(
            f"the last record is {found[-1][1]} with hash {found[-1][0].hash}, but {expected} is expected. A later "
            "record is missing, or the hash is that of another head."
        )
    return Verified([record for record, _ in found], problems, remarks)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.is_file():
            raise ArtifactError(f"{path} does not exist. Give a record or a folder that sfu-unlearn has written.")
        return [path]
    if not (found := records_in(path)):
        raise ArtifactError(f"{path} holds no record-1.json. Give a record or a folder that sfu-unlearn has written.")
    return found


def _in_chain(found: Sequence[tuple[DeletionRecord, Path]]) -> list[str]:
    problems = []
    if found and found[0][0].number > 1:
        first = found[0][0].number
        which = "record 1 is" if first == 2 else f"records 1 to {first - 1} are"
        problems.append(f"{which} missing. Give all records of the head.")
    for (earlier, path), (later, file) in pairwise(found):
        if later.number == earlier.number:
            problems.append(
                f"{path} and {file} are both record {later.number}. Give the records of one head, once each."
            )
        elif later.number > earlier.number + 1:
            problems.append(f"between {path} and {file}, {later.number - earlier.number - 1} records are missing.")
        elif later.previous != earlier.hash:
            problems.append(f"{file} does not follow {path}: its `previous` is another hash, so one was replaced.")
        elif later.before != earlier.after:
            problems.append(f"{file} was made from other files than those that {path} names.")
    if found and found[0][0].number == 1 and found[0][0].previous is not None:
        problems.append(f"{found[0][1]} is record 1, but names a record before it.")
    return problems


def _check_head(
    folder: Path, found: Sequence[tuple[DeletionRecord, Path]], problems: list[str], remarks: list[str]
) -> None:
    last = max((record for record, file in found if file.parent == folder), key=lambda one: one.number, default=None)
    if last is None:
        return
    held: FileDigests = digests_of(folder / HEAD, model_in(folder))
    for key in _FILES:
        digest, wanted = getattr(held, key), getattr(last.after, key)
        if digest is None and wanted is not None:
            remarks.append(f"The {key} of the head is not in {folder}, so it was not checked.")
        elif digest != wanted:
            problems.append(f"the {key} of the head in {folder} is not that of record {last.number}, the last there.")
    before = folder / BEFORE
    kept = last.done is not None and last.done.kept
    if kept and digests_of(before / HEAD, model_in(before)) != last.before:
        problems.append(f"{before} is not the head before record {last.number}, which was kept.")
    elif not kept and is_head_folder(before):
        problems.append(f"{before} is there, but record {last.number} kept no head.")
