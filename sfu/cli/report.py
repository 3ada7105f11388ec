"""The command ``sfu-report``: tables, pictures and one page to mail, from any number of runs and sweeps."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from sfu.cli.commands import run_command
from sfu.errors import ArtifactError, DataError

T = TypeVar("T")
DEFAULT_FOLDER = "report"


def main(arguments: list[str] | None = None) -> None:
    """Entry point; exits with 1 after a clear message if anything failed or no run has results."""
    parser = argparse.ArgumentParser(
        prog="sfu-report",
        description="Report on any number of runs. Runs are averaged over seeds; whatever else differs in their "
        "resolved configuration tells settings apart.",
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="folders of runs or sweeps, at any depth")
    parser.add_argument(
        "--by", action="append", default=[], metavar="KEY",
        help="settings of a table, such as head.l2 (repeatable); whatever else differs makes tables of its own",
    )  # fmt: skip
    parser.add_argument(
        "--over", action="append", metavar="KEY", help="average over this key, too (repeatable; seeds always)"
    )
    parser.add_argument(
        "--spread", choices=("stderr", "sd"), default="stderr", help="after ±: standard error (default) or deviation"
    )
    parser.add_argument(
        "--curve", action="append", default=[], metavar="KEY", help="draw curves over these keys alone (repeatable)"
    )
    parser.add_argument("--title", help="first line of the page")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"where files go (default: {DEFAULT_FOLDER})")
    parser.add_argument(
        "--print", dest="format", choices=("terminal", "markdown", "csv", "latex"), default="terminal",
        help="what to print (default: terminal)",
    )  # fmt: skip
    parser.add_argument("--no-files", action="store_true", help="print only")
    parser.set_defaults(run=_report)
    run_command(parser, arguments)


def _report(given: argparse.Namespace) -> None:
    from rich.console import Console

    from sfu.experiment.config import neutral_keys
    from sfu.reporting.report.build import build_report
    from sfu.reporting.report.grouping import SEEDS
    from sfu.reporting.report.write import TEXTS, print_report, save_report

    folder = None if given.no_files else _writable(given.out or Path(DEFAULT_FOLDER))
    report = build_report(
        given.paths,
        by=list(dict.fromkeys(given.by)),
        over=[*SEEDS, *(given.over or [])],
        curves=given.curve,
        neutral=neutral_keys(),
        spread="std" if given.spread == "sd" else "stderr",
        title=given.title,
        track=_progress,
    )
    try:
        if given.format == "terminal":
            print_report(report, Console())
        else:
            print(TEXTS[given.format](report), end="", flush=True)
    except (BrokenPipeError, SystemExit):  # the reader, such as `head`, has enough; the files are still wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not report.finished:
        raise DataError("No run has results, so there is nothing to report. The reasons are listed above.")
    if folder is not None:
        written = save_report(report, folder, given.curve, _progress)
        notices = sys.stdout if given.format == "terminal" else sys.stderr  # not among what a program reads
        print(f"Saved {written[0]} and {len(written) - 1} more files beside it", file=notices)


def _writable(folder: Path) -> Path:
    """Make a folder and try to write there, before any run is read.

    Raises:
        ArtifactError: Nothing can be written there.
    """
    probe = folder / ".sfu-report"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ArtifactError(f"--out {folder} cannot be written ({error.strerror}). Choose another folder.") from error
    return folder


def _progress(items: Sequence[T], what: str) -> Iterable[T]:
    """Return the items, with a bar on standard error if that is a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(items, what, console=console, transient=True, disable=not console.is_terminal)


if __name__ == "__main__":
    main()
