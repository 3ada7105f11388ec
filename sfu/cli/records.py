"""``sfu-unlearn verify``, ``undo`` and ``purge``: what a folder and its records need besides requests."""

from __future__ import annotations

import re
import sys
import textwrap
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from sfu import __version__
from sfu.errors import ConfigError
from sfu.files import folder_lock
from sfu.names import counted, visible

if TYPE_CHECKING:
    from sfu.cli.purge import Found
    from sfu.records.record import DeletionRecord

ALTERED = 1
_WIDTH = 80
_KEEP_THE_HASH = (
    "Keep this hash where nobody can change it. Records that were cut off at the end\n"
    "show only against it: sfu-unlearn verify ... --expect HASH."
)
_NOT_SEARCHED = (
    "Files that you made: the dataset, the file of this request, exported features, backups.",
    "Other copies of the head, among them the one that the first step started from, if it is in no run folder: "
    "together with this head, they can tell of the rows.",
    "Caches elsewhere (`backbone.cache`, another `SFU_CACHE`). If the rows are features of images: what was made of "
    "these images by other backbones. `sfu-features forget` and `sfu-results forget` find it by the images.",
    "What loggers have uploaded.",
)
_NO_RUNS = "Run folders: none was named (`--runs`)."


def _verify_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="sfu-unlearn verify",
        description="Check deletion records: whether one was altered or is missing, and whether the head is that of "
        "the last. Exits with 0 if all is well, 1 if not, and 2 if there is no record.",
    )
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD", help="records, or folders of sfu-unlearn")
    parser.add_argument("--expect", type=_hash, metavar="HASH", help="the hash that the last record must have")
    parser.set_defaults(run=_verify)
    return parser


def _undo_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="sfu-unlearn undo",
        description="Put back the head and the model before the last request, which was served with --keep-old, and "
        "record that.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a folder of sfu-unlearn")
    parser.set_defaults(run=_undo)
    return parser


def _purge_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="sfu-unlearn purge",
        description="Remove what sfu's caches and run folders hold that was made of rows, and the old head and the "
        "ledger of FOLDER, and record that. Without --apply, only say what would be removed.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of sfu-unlearn that gets the record")
    parser.add_argument("forget", type=Path, nargs="+", metavar="FORGET", help="files of the rows, as for sfu-unlearn")
    parser.add_argument(
        "--runs", type=Path, action="append", default=[], metavar="FOLDER",
        help="folder of run folders, such as outputs; what is removed of a run are its heads (repeatable)",
    )  # fmt: skip
    parser.add_argument("--apply", action="store_true", help="remove; without it, only say what would be removed")
    parser.set_defaults(run=_purge)
    return parser


COMMANDS: dict[str, Callable[[], ArgumentParser]] = {
    "verify": _verify_parser, "undo": _undo_parser, "purge": _purge_parser,
}  # fmt: skip
"""The parsers of the commands, by name."""


def _hash(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise ArgumentTypeError(f"{text!r} is no hash. Give the 64 hexadecimal digits that an earlier check printed.")
    return text


def _verify(given: Namespace) -> None:
    from sfu.records.chain import verify

    found = verify([path.expanduser() for path in given.records], given.expect)
    for record in found.records:
        print(f"record {record.number}  {record.time}  {_in_short(record)}")
    for sentence in (*found.problems, *found.remarks):
        print(textwrap.fill(visible(sentence), _WIDTH, break_long_words=False, break_on_hyphens=False))
    if found.problems:
        print(f"Not verified: {counted(len(found.problems), 'problem')}.")
        sys.exit(ALTERED)
    print(f"Verified. The last hash is\n{found.records[-1].hash}")
    if given.expect is None:
        print(_KEEP_THE_HASH)


def _in_short(record: DeletionRecord) -> str:
    if record.done is not None:
        return f"{counted(record.done.rows, 'row')}, {record.done.verdict.replace('_', ' ')}"
    if record.purged is not None:
        return f"purge of {counted(record.purged.rows, 'row')}"
    return f"record {record.undone} undone"


def _undo(given: Namespace) -> None:
    from sfu.records.head_folder import undo

    folder = _folder(given)
    with folder_lock(folder):
        record = undo(folder, __version__)
    print(f"The head and the model before record {record.undone} are back in {folder}.")
    _tell(record)


def _purge(given: Namespace) -> None:
    from sfu.cli.purge import find
    from sfu.records.forget_files import read_forget_files
    from sfu.records.head_folder import read_source, write_purge
    from sfu.records.layout import BEFORE, is_head_folder
    from sfu.records.record import Purged

    folder, runs = _folder(given), [path.expanduser() for path in given.runs]
    with folder_lock(folder) if given.apply else nullcontext():
        source = read_source(folder)
        features = read_forget_files([path.expanduser() for path in given.forget])["features"]
        found = find(features, runs)
        has_ledger, has_old = source.head.forgotten.ledger is not None, is_head_folder(folder / BEFORE)
        _print_found(found)
        for there, what in ((has_old, "the head before the last request"), (has_ledger, "the ledger of the head")):
            if there:
                print(f"{folder}: {what}.")
        if not given.apply:
            print("Nothing was removed (no --apply).")
            return
        found.remove()
        entries, heads = found.counts()
        purged = Purged(rows=len(features), caches=entries, runs=heads, kept_head=has_old, ledger=has_ledger)
        told = [*([] if runs else [_NO_RUNS]), *_NOT_SEARCHED]
        record = write_purge(source, purged, told, folder, __version__)
    _tell(record)


def _print_found(found: Found) -> None:
    for root, purge in found.caches.items():
        if purge.made_of_them or purge.unknown:
            print(
                f"{root}: {len(purge.made_of_them):,} entries were made of data that held one of these rows, and "
                f"{len(purge.unknown):,} do not say what they were made of."
            )
    for folders, why in ((found.runs, "held one of these rows"), (found.unknown_runs, "are not known")):
        for folder in folders:
            print(f"{folder}: heads of a run whose data {why}.")


def _folder(given: Namespace) -> Path:
    from sfu.records.layout import folder_of, is_head_folder

    folder = folder_of(given.folder.expanduser()).resolve()
    if not is_head_folder(folder):
        raise ConfigError(f"{given.folder} is no folder that sfu-unlearn wrote. Give such a folder.")
    return folder


def _tell(record: DeletionRecord) -> None:
    print(f"This is record {record.number}. Its hash is\n{record.hash}")
