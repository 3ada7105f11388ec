"""The command ``sfu-rerun``: repeat a run from its folder, and say whether the result is the same."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfu.cli.commands import run_command
from sfu.errors import ArtifactError, ConfigError, SfuError
from sfu.names import visible

if TYPE_CHECKING:
    from sfu.results.comparison import Comparison

DIFFERS, REFUSED = 1, 2
_OF_A_REPETITION = ("seeds", "reuse", "logger", "hydra")
"""Settings that a repetition has of its own: it is one run, takes nothing from the cache, and is not logged."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point; exits with 0 if the runs agree, 1 if they differ, and 2 if the run cannot be repeated."""
    parser = ArgumentParser(
        prog="sfu-rerun",
        description="Repeat a run from its folder, and compare heads and figures within stated tolerances. Exits with "
        "0 if the two agree, 1 if they differ, and 2 if the run cannot be repeated.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a run folder")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="what to change, such as device=cuda")
    parser.add_argument("--out", type=Path, metavar="NEW", help="where to repeat it (default: FOLDER-rerun)")
    parser.set_defaults(run=_rerun)
    run_command(parser, arguments, failed=REFUSED)


def _rerun(given: Namespace) -> None:
    from sfu.results.artifacts import read_metrics
    from sfu.results.run_folder import read_run

    folder: Path = given.folder.expanduser().resolve()
    first = read_metrics(folder / "metrics.json")
    if read_run(folder).state not in ("finished", "failed", "unknown"):
        raise ArtifactError(f"the run in {folder} did not end. Give a folder of a finished run.")
    target: Path = (given.out.expanduser() if given.out else folder.with_name(f"{folder.name}-rerun")).resolve()
    if target.exists():
        raise ConfigError(f"{target} exists, and sfu-rerun replaces nothing. Remove it, or give another --out.")
    overrides = (first.get("run") or {}).get("overrides")
    if overrides is None:
        raise ArtifactError(f"{folder}/metrics.json does not say with what settings the run was made.")
    arguments = repetition(overrides, given.settings, target)
    print(f"sfu {' '.join(map(visible, arguments))}", flush=True)
    code = subprocess.run([sys.executable, "-m", "sfu", *arguments], check=False).returncode
    if not (target / "metrics.json").is_file():
        raise SfuError(f"the repetition failed with exit code {code}; its message is above.")
    comparison = _compare(folder, target)
    _print(comparison, folder, target)
    if not comparison.agrees:
        sys.exit(DIFFERS)


def repetition(overrides: Sequence[str], further: Sequence[str], target: Path) -> list[str]:
    """Return the arguments of ``sfu`` that repeat a run with these overrides in the folder ``target``."""
    own = [one for one in overrides if one.lstrip("+~").partition("=")[0].partition(".")[0] not in _OF_A_REPETITION]
    path = str(target).replace("\\", "\\\\").replace('"', '\\"')
    return [*own, *further, "reuse=never", "logger=none", f'hydra.run.dir="{path}"']


def _compare(folder: Path, target: Path) -> Comparison:
    from sfu.readers import read_yaml, refusing
    from sfu.results.artifacts import read_metrics
    from sfu.results.comparison import compare, head_differences

    def read(place: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        path = place / "config.yaml"
        with refusing(path, "Run again, or take another copy of it."):
            return read_metrics(place / "metrics.json"), read_yaml(path)

    return compare(read(folder), read(target), head_differences(folder, target))


def _print(comparison: Comparison, folder: Path, target: Path) -> None:
    width = max(map(len, ["row", *(row.name for row in comparison.rows)]))
    print(f"\n{'row':<{width}}  {'heads apart':>11}  result")
    for row in comparison.rows:
        head = "-" if row.head is None else f"{row.head:.1e}"
        told = "the same" if row.agrees else "differs"
        if row.figure:
            told += f" ({row.figure} {_short(row.first)} -> {_short(row.second)})"
        print(f"{visible(row.name):<{width}}  {head:>11}  {told}")
    for what, entries in (("environment", comparison.environment), ("setting", comparison.settings)):
        for name, first, second in entries:
            print(f"{what} {name}: {_short(first)} -> {_short(second)}")
    limit = comparison.tolerance
    print(
        f"Tolerated: heads {limit.head:g} and figures {limit.figure:g} relative, accuracies {limit.points:g} points.\n"
        f"{'The repetition agrees' if comparison.agrees else 'The repetition differs'}: {folder}\n-> {target}"
    )


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else visible(str(value))


if __name__ == "__main__":
    main()
