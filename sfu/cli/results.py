"""The command ``sfu-results``: see which results of earlier sweeps are kept, and remove them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sfu.cache_dir import cache_dir
from sfu.errors import ConfigError


def main(arguments: list[str] | None = None) -> None:
    """Entry point; exits with 1 after a clear message if anything failed."""
    given = _parser().parse_args(arguments)
    try:
        if given.command == "rm":
            _remove(given)
        else:
            _list(given.cache)
    except (ConfigError, OSError) as error:
        print(f"sfu-results: {error}", file=sys.stderr)
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sfu-results", description="The heads and rows that sweeps have computed and kept (docs/sweeps.md)."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("ls", help="show what is kept")
    removing = commands.add_parser("rm", help="remove what is kept")
    removing.add_argument("--unused", type=float, metavar="DAYS", help="what no run has used for so many days")
    removing.add_argument("--all", action="store_true", help="everything")
    for command in (listing, removing):
        command.add_argument("--cache", type=Path, default=cache_dir("results"), help="folder (default: %(default)s)")
    return parser


def _list(root: Path) -> None:
    from sfu.experiment.result_listing import list_entries, size_of
    from sfu.files import human_size

    entries = list_entries(root)
    if not entries:
        print(f"No results are kept in {root}.")
        return
    print("kind   entries         size   last used")
    for kind in ("gram", "head", "row", "run"):
        some = [entry for entry in entries if entry.kind == kind]
        if some:
            print(f"{kind:<6} {len(some):>7,} {human_size(size_of(some)):>12}   {some[0].used:%Y-%m-%d}")
    print(f"{len(entries):,} in {root}, {human_size(size_of(entries))} in all.")


def _remove(given: argparse.Namespace) -> None:
    from sfu.experiment.result_listing import remove_entries

    if given.all == (given.unused is not None):
        raise ConfigError("rm needs --all or --unused DAYS.")
    if given.unused is not None and not given.unused >= 0:
        raise ConfigError(f"--unused {given.unused:g}; give a number of days of at least 0.")
    gone = remove_entries(given.cache, unused_days=0.0 if given.all else given.unused)
    many = "entry" if len(gone) == 1 else "entries"
    print(f"Removed {len(gone):,} {many} from {given.cache}." if gone else f"Nothing to remove in {given.cache}.")


if __name__ == "__main__":
    main()
