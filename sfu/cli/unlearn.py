"""The command ``sfu-unlearn``: serve a deletion request from a file, and check the records of such requests."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfu import __version__
from sfu.cli.commands import run_command
from sfu.data.settings import KINDS, RANDOM
from sfu.errors import ConfigError, DataError, SfuError
from sfu.files import SECRET, copy_file, folder_lock
from sfu.lazy import first_imports
from sfu.names import counted, visible

if TYPE_CHECKING:
    import numpy as np

    from sfu.records.head_folder import Source
    from sfu.records.record import Searched
    from sfu.unlearning.result import UnlearningResult

_WIDTH = 80
WITHHELD, ALTERED, REFUSED = 3, 1, 2
_OPTIONS = {
    'curvature={"force": True}': "--force", "curvature.force=true": "--force", "copies=True": "--copies",
    'request="selected"': "--request selected", "curvature.unlabelled=": "--unlabelled ",
}  # fmt: skip
"""What the arguments of :func:`sfu.unlearn` are called here."""
_DESCRIPTION = """\
Forget training rows: take one source-free step of a head, and write the new
head with a deletion record. Without --apply, only say what would be done.

  sfu-unlearn head forget.npz --out forgotten --apply
  sfu-unlearn model.safetensors forget.npz --layer fc --training training.json
  sfu-unlearn forgotten more.npz --in-place --apply
  sfu-unlearn verify forgotten
"""
_EPILOG = """\
Exits with 0 if the step was taken (or would be), 3 if it is withheld, and 2
if something is wrong with what was given. docs/records.md is a walk-through.
"""
_NOT_TOUCHED = (
    "The training rows themselves, the file of this request, features of them in other files, and backups.",
    "Earlier copies of the head and of the model, among them the one that the step started from.",
    "Run folders, and what loggers have written or uploaded (W&B, TensorBoard).",
)
_BACKBONE = (
    "The backbone below the head: it was trained on these rows, too, and keeps what it learned from them.",
    "The backbone below the head: no training on these rows was declared. If there was any, it keeps what it learned.",
)
_REST = "The rest of the checkpoint: all other layers, and optimiser states and averages if it holds any."
_NOT_SEARCHED = "The caches of sfu: not searched. `sfu-features forget` and `sfu-results forget` search them."
_FEATURES = "The cache of features: not searched, because it knows images and not rows (`sfu-features forget --files`)."


def main(arguments: list[str] | None = None) -> None:
    """Entry point; the exit codes are those of the help, and 1 for a record that fails its check."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["verify"]:
        run_command(_verify_parser(), given[1:], failed=REFUSED)
    else:
        run_command(_parser(), given, failed=REFUSED)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="sfu-unlearn", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "head", type=Path, metavar="HEAD",
        help="a saved head without its suffix, a folder that sfu-unlearn wrote, or with --layer the checkpoint of a "
        "whole model (.safetensors, or .pt with weights alone)",
    )  # fmt: skip
    parser.add_argument(
        "forget", type=Path, metavar="FORGET",
        help="the rows to forget: .npz, .safetensors, .parquet, .arrow or .feather with features [F, D], labels [F] "
        "and, if the head was trained with sample weights, weights [F]",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="NEW", help="folder to make for the new head and the record")
    parser.add_argument("--in-place", action="store_true", help="replace the folder HEAD in one step")
    parser.add_argument("--apply", action="store_true", help="write; without it, only say what would be done")
    parser.add_argument("--layer", help="name of the layer in the checkpoint, such as fc")
    parser.add_argument("--training", type=Path, metavar="FILE", help="JSON: how that layer was trained")
    parser.add_argument("--request", choices=KINDS, default=RANDOM, help="what the rows are (default: %(default)s)")
    parser.add_argument(
        "--unlabelled", type=Path, action="append", default=[], metavar="FILE",
        help="features of unlabelled rows like the training rows (repeatable)",
    )  # fmt: skip
    parser.add_argument(
        "--copies", action="store_true", help="the training set held equal rows as often as they are given"
    )
    parser.add_argument("--force", action="store_true", help="take the step even if it is predicted to do harm")
    parser.add_argument("--seed", type=int, default=0, help="of folds and perturbations (default: %(default)s)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write a copy of the record here, too")
    parser.add_argument(
        "--search-caches", action="store_true", help="record what the caches of sfu hold that was made of these rows"
    )
    parser.set_defaults(run=_unlearn)
    return parser


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


def _hash(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise ArgumentTypeError(f"{text!r} is no hash. Give the 64 hexadecimal digits that an earlier check printed.")
    return text


def _verify(given: Namespace) -> None:
    from sfu.records.chain import verify

    found = verify([path.expanduser() for path in given.records], given.expect)
    for record in found.records:
        asked = f"{counted(record.done.rows, 'row')}, {record.done.verdict.replace('_', ' ')}"
        print(f"record {record.number}  {record.time}  {asked}")
    for sentence in (*found.problems, *found.remarks):
        print(textwrap.fill(visible(sentence), _WIDTH, break_long_words=False, break_on_hyphens=False))
    if found.problems:
        print(f"Not verified: {counted(len(found.problems), 'problem')}.")
        sys.exit(ALTERED)
    print(f"Verified. The last hash is\n{found.records[-1].hash}")
    if given.expect is None:
        print(
            "Keep this hash where nobody can change it. Records that were cut off at the end\n"
            "show only against it: sfu-unlearn verify ... --expect HASH."
        )


def _unlearn(given: Namespace) -> None:
    from sfu.records.layout import folder_of

    paths = {key: value.expanduser() for key, value in vars(given).items() if isinstance(value, Path)}
    given = Namespace(**{**vars(given), **paths, "unlabelled": [path.expanduser() for path in given.unlabelled]})
    given.head = folder_of(given.head)
    _check_output(given)
    target: Path | None = given.head.resolve() if given.in_place else given.out
    with folder_lock(target) if given.apply and target is not None else nullcontext():
        _serve(given, target)


def _check_output(given: Namespace) -> None:
    """Refuse what can be seen to be wrong before anything is read.

    Raises:
        ConfigError: Arguments contradict each other, or what would be written is there already.
        DataError: A file is missing or of another type.
    """
    from sfu.data.tables import ROW_SUFFIXES, require_rows
    from sfu.records.layout import is_head_folder

    if given.seed < 0:
        raise ConfigError(f"--seed {given.seed} is below 0. Give a whole number of at least 0.")
    for option, path in (("FORGET", given.forget), *(("--unlabelled", path) for path in given.unlabelled)):
        if not path.is_file():
            raise DataError(f"{option} {path} is no file (relative paths start at {Path.cwd()}). Give its path.")
        if path.suffix not in ROW_SUFFIXES:
            raise DataError(
                f"{option} {path} ends in '{path.suffix}'. sfu-unlearn reads {', '.join(ROW_SUFFIXES)}: pass images "
                "through the backbone, and save the rows with numpy.savez(FILE, features=..., labels=...), or as "
                "Parquet with these columns."
            )
        require_rows(path, option)
    if given.in_place and given.out is not None:
        raise ConfigError("--in-place writes to HEAD, and --out to another folder. Give one of them.")
    if given.apply and not (given.in_place or given.out):
        raise ConfigError(
            "--apply needs a place to write to. Give --out NEW, or --in-place for a folder of sfu-unlearn."
        )
    if given.out is not None and given.out.resolve() == given.head.resolve():
        raise ConfigError(f"--out {given.out} is HEAD itself. Give --in-place in place of --out, or another folder.")
    if given.in_place and not is_head_folder(given.head):
        raise ConfigError(
            f"--in-place replaces a folder that sfu-unlearn wrote, and {given.head} is none. Give --out NEW."
        )
    if (given.layer is None) != (given.training is None):
        given_one, other = ("--training", "--layer") if given.layer is None else ("--layer", "--training")
        raise ConfigError(f"{given_one} is given without {other}. A checkpoint of a whole model needs both.")
    if given.layer is not None and is_head_folder(given.head):
        raise ConfigError(f"--layer and --training are known in {given.head} from its first request. Leave them out.")
    for option, path in (("--out", given.out), ("--record", given.record)):
        if path is not None and os.path.lexists(path) and not (option == "--out" and is_head_folder(path)):
            raise ConfigError(f"{option} {path} exists, and sfu-unlearn replaces nothing. Choose another path.")


def _serve(given: Namespace, target: Path | None) -> None:
    from sfu.records.head_folder import fit_layer, read_source
    from sfu.records.layout import is_head_folder, records_in
    from sfu.records.record import read_deletion_record
    from sfu.records.training import read_training

    training = None if given.training is None else read_training(given.training)
    path = given.head if is_head_folder(given.head) or training else _stem(given.head)
    with first_imports():
        from sfu.unlearning.unlearn import unlearn
    from sfu.curvature.unlabelled import read_unlabelled
    from sfu.unlearning.result import ALREADY_FORGOTTEN

    source, arrays, served = read_source(path, given.layer, training), _rows(given.forget), None
    if target is not None and not given.in_place and is_head_folder(target):
        served = read_source(target)
        if read_deletion_record(served.records[-1]).before != source.files:
            raise _exists(target)
        source = served
    n_rows = len(arrays["labels"])
    try:
        unlabelled = read_unlabelled([str(path) for path in given.unlabelled], source.head.n_features)
        result = unlearn(
            source.head, arrays["features"], arrays["labels"], unlabelled=list(unlabelled) or None,
            request=given.request, weights=arrays.get("weights"), copies=given.copies,
            curvature={"force": True} if given.force else None, seed=given.seed,
        )  # fmt: skip
    except SfuError as error:
        raise type(error)(_in_options(str(error))) from error
    result = replace(result, note=result.note and _in_options(result.note))
    result, rounded = fit_layer(source, result) if result.applied else (result, None)
    done = not result.applied and result.reasons == (ALREADY_FORGOTTEN,)
    if served is not None and not done:
        raise _exists(target)
    if done:
        print(_line("", f"{given.forget}: all rows had been forgotten before. There is nothing left to do."))
    else:
        print(_report(given, source, result, n_rows))
    if not (done or result.applied):
        print("Nothing was written, because the step is withheld.")
        sys.exit(WITHHELD)
    if not given.apply or target is None:
        print("Nothing was written (no --apply).")
        return
    if not done:
        _write(given, source, result, rounded, arrays, [len(rows) for rows in unlabelled], target)
    if given.record is not None and is_head_folder(target):
        copy_file(records_in(target)[-1], given.record)


def _in_options(text: str) -> str:
    """Return what :func:`sfu.unlearn` says with its arguments as options of this command."""
    for argument, option in _OPTIONS.items():
        text = text.replace(argument, option)
    return text


def _exists(target: Path | None) -> ConfigError:
    return ConfigError(
        f"--out {target} exists and was made by another request, and sfu-unlearn replaces nothing. Choose another path."
    )


def _rows(path: Path) -> dict[str, Any]:
    """Return the arrays of a file of rows.

    Raises:
        DataError: It cannot be read, or lacks one.
    """
    from sfu.data.tables import held, read_rows

    arrays = read_rows(path, ("features", "labels", "weights"), "FORGET")
    for key in ("features", "labels"):
        if key not in arrays:
            raise DataError(
                f"FORGET={path} has no '{key}', but {held(path)}. Save the rows with numpy.savez(FILE, features=..., "
                "labels=...), or as Parquet with a list of numbers in each row of 'features'."
            )
    return arrays


def _stem(path: Path) -> Path:
    """Return the path of a head without the suffix of one of its files.

    Raises:
        ConfigError: There is none, perhaps because a checkpoint is given without its layer.
    """
    stem = path.with_suffix("") if path.suffix in (".json", SECRET, ".safetensors") else path
    if stem.with_name(stem.name + ".json").is_file():
        return stem
    if path.is_file():
        from sfu.heads.checkpoint import linear_layers

        raise ConfigError(
            f"{path} is no head of sfu. If it is the checkpoint of a whole model, give --layer and --training. "
            f"{linear_layers(path)}"
        )
    raise ConfigError(
        f"there is no head at {path} (relative paths start at {Path.cwd()}). Give the path of a head's files without "
        "their suffixes, a folder that sfu-unlearn wrote, or a checkpoint with --layer and --training."
    )


def _report(given: Namespace, source: Source, result: UnlearningResult, n_rows: int) -> str:
    """Say what the step is and what it is worth, in lines of at most 80 columns."""
    share, interval = result.predicted_share, result.predicted_share_interval
    predicted = "not predicted for this head and request"
    if share is not None and interval is not None:
        predicted = (
            f"{share:.0%} of the squared distance to retraining is gone ({interval[0]:.0%} to {interval[1]:.0%}, nine "
            f"times in ten); a distance of {result.predicted_distance:.2f} is left, of which 1 is that of doing nothing"
        )
    l2_interval = result.details.get("l2_interval")
    of = f" ({l2_interval[0]:.3g} to {l2_interval[1]:.3g}, estimated)" if isinstance(l2_interval, tuple) else ""
    layer = "" if source.layer is None else f", layer {source.layer}"
    would = "" if given.apply or not result.applied else "would be "
    lines = {
        "head": f"{given.head}{layer}: {source.head!r}",
        "forget": f"{given.forget}: {counted(n_rows, 'row')}, request={given.request}",
        "method": result.method or "",
        "verdict": would + result.verdict.replace("_", " "),
        **({"reasons": ", ".join(result.reasons)} if result.reasons else {}),
        **({"note": result.note} if result.note else {}),
        **({"predicted": predicted} if result.applied else {}),
        "l2": f"{result.head.l2:.3g}{of}",
    }
    return "\n".join(_line(label, visible(text)) for label, text in lines.items())


def _line(label: str, text: str) -> str:
    start = f"{label:<11}" if label else ""
    return textwrap.fill(
        text, _WIDTH - 1, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False
    )


def _write(
    given: Namespace, source: Source, result: UnlearningResult, rounded: float | None, arrays: dict[str, Any],
    n_unlabelled: list[int], target: Path,
) -> None:  # fmt: skip
    from sfu.records.head_folder import write_head
    from sfu.records.record import Asked

    n_rows = len(arrays["labels"])
    asked = Asked(
        kind=given.request, rows=n_rows, unlabelled=n_unlabelled, seed=given.seed, copies=given.copies,
        force=given.force,
    )  # fmt: skip
    found = _search(arrays["features"]) if given.search_caches else None
    untouched = [
        _BACKBONE[source.head.recipe.frozen_backbone], *([] if source.model is None else [_REST]), *_NOT_TOUCHED,
        *([_NOT_SEARCHED] if found is None else [*map(_told, found, found.values()), _FEATURES]),
    ]  # fmt: skip
    record = write_head(
        source, result, rounded, asked, found, untouched, target, version=__version__, in_place=given.in_place
    )
    print(
        f"Wrote {given.head if given.in_place else given.out} with record {record.number}. Its hash is\n{record.hash}"
    )


def _search(features: np.ndarray) -> dict[str, Searched]:
    """Return what the caches of results, cores and checkpoints hold that was made of some feature rows."""
    from sfu.cli.results import caches
    from sfu.data.examples import find_entries, row_digests
    from sfu.records.record import Searched
    from sfu.store import cache_dir

    rows = [frozenset([digest]) for digest in row_digests(features)]
    purges = {cache.root.name: find_entries(cache.entries, rows) for cache in caches(cache_dir("results"))}
    return {
        name: Searched(made_of_them=len(purge.made_of_them), unknown=len(purge.unknown))
        for name, purge in purges.items()
    }


def _told(cache: str, found: Searched) -> str:
    return (
        f"The cache of {cache}: {found.made_of_them:,} entries were made of these rows, and {found.unknown:,} do not "
        "say what they were made of. `sfu-results forget` removes them."
    )


if __name__ == "__main__":
    main()
