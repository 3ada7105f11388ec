"""The command ``sfu-unlearn``: serve a deletion request from a file, and check the records of such requests."""

from __future__ import annotations

import os
import sys
import textwrap
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfu import __version__
from sfu.cli.commands import run_command
from sfu.cli.records import COMMANDS
from sfu.curvature.settings import OnDoubt
from sfu.data.settings import KINDS, RANDOM
from sfu.errors import ConfigError, DataError, SfuError
from sfu.files import SECRET, copy_file, folder_lock
from sfu.lazy import first_imports
from sfu.names import counted, visible

if TYPE_CHECKING:
    from sfu.records.head_folder import Source
    from sfu.unlearning.result import UnlearningResult

_WIDTH = 80
WITHHELD, REFUSED = 3, 2
_OPTIONS = {
    'on_doubt="apply"': "--on-doubt apply", "curvature.on_doubt=apply": "--on-doubt apply", "copies=True": "--copies",
    'request="selected"': "--request selected", "curvature.unlabelled=": "--unlabelled ",
    "time_limit=": "--time-limit ",
}  # fmt: skip
"""What the arguments of :func:`sfu.unlearn` are called here."""
_DESCRIPTION = """\
Forget training rows: take one source-free step of a head, and write the new
head with a deletion record. Without --apply, only say what would be done.

  sfu-unlearn head forget.npz --out forgotten --apply
  sfu-unlearn model.safetensors forget.npz --layer fc --training training.json
  sfu-unlearn forgotten more.npz --in-place --apply
  sfu-unlearn undo forgotten
  sfu-unlearn purge forgotten forget.npz --runs outputs --apply
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
    "The caches of sfu. `sfu-unlearn purge` removes what caches and run folders hold that was made of these rows.",
)
_BACKBONE = (
    "The backbone below the head: it was trained on these rows, too, and keeps what it learned from them.",
    "The backbone below the head: no training on these rows was declared. If there was any, it keeps what it learned.",
)
_REST = "The rest of the checkpoint: all other layers, and optimiser states and averages if it holds any."


def main(arguments: list[str] | None = None) -> None:
    """Entry point; the exit codes are those of the help, and 1 for a record that fails its check."""
    given = sys.argv[1:] if arguments is None else arguments
    if given and given[0] in COMMANDS:
        run_command(COMMANDS[given[0]](), given[1:], failed=REFUSED)
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
        "forget", type=Path, nargs="+", metavar="FORGET",
        help="the rows to forget: .npz, .safetensors, .parquet, .arrow or .feather with features [F, D], labels [F] "
        "and, if the head was trained with sample weights, weights [F]; with --backbone, a folder with a folder of "
        "images for each class; several are one request",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="NEW", help="folder to make for the new head and the record")
    parser.add_argument("--in-place", action="store_true", help="replace the folder HEAD in one step")
    parser.add_argument(
        "--keep-old", action="store_true", help="with --in-place, keep the old head until the next request"
    )
    parser.add_argument("--apply", action="store_true", help="write; without it, only say what would be done")
    parser.add_argument("--layer", help="name of the layer in the checkpoint, such as fc")
    parser.add_argument("--training", type=Path, metavar="FILE", help="JSON: how that layer was trained")
    parser.add_argument(
        "--backbone", nargs="+", default=[], metavar=("NAME", "KEY=VALUE"),
        help="FORGET are folders of images: the network below the head, as for sfu, and settings of it, such as "
        "backbone.size=224; its weights are those of the checkpoint, if HEAD is one",
    )  # fmt: skip
    parser.add_argument("--request", choices=KINDS, default=RANDOM, help="what the rows are (default: %(default)s)")
    parser.add_argument(
        "--unlabelled", type=Path, action="append", default=[], metavar="FILE",
        help="features of unlabelled rows like the training rows (repeatable)",
    )  # fmt: skip
    parser.add_argument(
        "--copies", action="store_true", help="the training set held equal rows as often as they are given"
    )
    parser.add_argument(
        "--on-doubt", choices=[one.value for one in OnDoubt], default=OnDoubt.withhold.value,
        help="what to do with a step that is predicted to do harm (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="stop after so long, with nothing written")
    parser.add_argument("--seed", type=int, default=0, help="of folds and perturbations (default: %(default)s)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write a copy of the record here, too")
    parser.set_defaults(run=_unlearn)
    return parser


def _unlearn(given: Namespace) -> None:
    from sfu.records.layout import folder_of

    paths = {key: value.expanduser() for key, value in vars(given).items() if isinstance(value, Path)}
    lists = {key: [path.expanduser() for path in getattr(given, key)] for key in ("forget", "unlabelled")}
    given = Namespace(**{**vars(given), **paths, **lists})
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
    files = {"FORGET": [] if given.backbone else given.forget, "--unlabelled": given.unlabelled}
    for path in given.forget if given.backbone else ():
        if not path.is_dir():
            raise DataError(f"FORGET {path} is no folder. With --backbone, give a folder of one folder for each class.")
    for option, path in ((option, path) for option, paths in files.items() for path in paths):
        if not path.is_file():
            raise DataError(f"{option} {path} is no file (relative paths start at {Path.cwd()}). Give its path.")
        if path.suffix not in ROW_SUFFIXES:
            raise DataError(
                f"{option} {path} ends in '{path.suffix}'. sfu-unlearn reads {', '.join(ROW_SUFFIXES)}: give images "
                "with --backbone, and save the rows with numpy.savez(FILE, features=..., labels=...), or as Parquet "
                "with these columns."
            )
        require_rows(path, option)
    if given.in_place and given.out is not None:
        raise ConfigError("--in-place writes to HEAD, and --out to another folder. Give one of them.")
    if given.apply and not (given.in_place or given.out):
        raise ConfigError(
            "--apply needs a place to write to. Give --out NEW, or --in-place for a folder of sfu-unlearn."
        )
    if given.keep_old and not given.in_place:
        raise ConfigError("--keep-old is for --in-place: with --out, HEAD stays as it is. Leave it out.")
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
    from sfu.records.forget_files import read_forget_files
    from sfu.records.head_folder import fit_layer, read_source
    from sfu.records.layout import is_head_folder, records_in
    from sfu.records.record import read_deletion_record
    from sfu.records.training import read_training

    training = None if given.training is None else read_training(given.training)
    path = given.head if is_head_folder(given.head) or training else _stem(given.head)
    with first_imports():
        from sfu.unlearning.unlearn import unlearn
    from sfu.cli.forget_images import read_images
    from sfu.curvature.unlabelled import read_unlabelled
    from sfu.unlearning.result import ALREADY_FORGOTTEN

    source, served = read_source(path, given.layer, training), None
    if target is not None and not given.in_place and is_head_folder(target):
        served = read_source(target)
        if read_deletion_record(served.records[-1]).before != source.files:
            raise _exists(target)
        source = served
    arrays = read_images(given.forget, given.backbone, source) if given.backbone else read_forget_files(given.forget)
    n_rows = len(arrays["labels"])
    try:
        unlabelled = read_unlabelled([str(path) for path in given.unlabelled], source.head.n_features)
        result = unlearn(
            source.head, arrays["features"], arrays["labels"], unlabelled=list(unlabelled) or None,
            request=given.request, weights=arrays.get("weights"), copies=given.copies,
            on_doubt=given.on_doubt, time_limit=given.time_limit, seed=given.seed,
        )  # fmt: skip
    except SfuError as error:
        raise type(error)(_in_options(str(error))) from error
    result = replace(result, note=result.note and _in_options(result.note))
    result, rounded = fit_layer(source, result) if result.applied else (result, None)
    done = not result.applied and result.reasons == (ALREADY_FORGOTTEN,)
    if served is not None and not done:
        raise _exists(target)
    if done:
        print(_line("", f"{_names(given)}: all rows had been forgotten before. There is nothing left to do."))
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


def _names(given: Namespace) -> str:
    return ", ".join(map(str, given.forget))


def _in_options(text: str) -> str:
    """Return what :func:`sfu.unlearn` says with its arguments as options of this command."""
    for argument, option in _OPTIONS.items():
        text = text.replace(argument, option)
    return text


def _exists(target: Path | None) -> ConfigError:
    return ConfigError(
        f"--out {target} exists and was made by another request, and sfu-unlearn replaces nothing. Choose another path."
    )


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
        "forget": f"{_names(given)}: {counted(n_rows, 'row')}, request={given.request}",
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
    from sfu.records.head_folder import write_request
    from sfu.records.record import Asked

    n_rows = len(arrays["labels"])
    asked = Asked(
        kind=given.request, files=len(given.forget), rows=n_rows, unlabelled=n_unlabelled, seed=given.seed,
        copies=given.copies, on_doubt=given.on_doubt,
    )  # fmt: skip
    untouched = [
        _BACKBONE[source.head.recipe.frozen_backbone],
        *([] if source.model is None else [_REST]),
        *_NOT_TOUCHED,
    ]
    record = write_request(
        source, result, rounded, asked, untouched, target, version=__version__, in_place=given.in_place,
        keep=given.keep_old,
    )  # fmt: skip
    print(
        f"Wrote {given.head if given.in_place else given.out} with record {record.number}. Its hash is\n{record.hash}"
    )


if __name__ == "__main__":
    main()
