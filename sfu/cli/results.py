"""The command ``sfu-results``: list and remove cached results of earlier sweeps."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from sfu.cli.commands import IN_CACHE, add_ls_and_rm, remove_entries, run_command
from sfu.cli.forget import Cache, add_forget, forget
from sfu.errors import ConfigError
from sfu.files import human_size
from sfu.store import Store, cache_dir, size_of

_DAY = 86_400.0


def main(arguments: list[str] | None = None) -> None:
    """Entry point; exits with 1 after a clear message if anything failed."""
    description = "The heads and rows that sweeps have computed and cached (docs/sweeps.md)."
    parser = ArgumentParser(prog="sfu-results", description=description)
    commands = parser.add_subparsers(dest="command", required=True)
    removing = add_ls_and_rm(commands.add_parser, "results", _list, _remove)
    removing.add_argument("--unused", type=float, metavar="DAYS", help="what no run has used for so many days")
    add_forget(commands.add_parser, "results", _forget)
    run_command(parser, arguments, IN_CACHE)


def _list(given: Namespace) -> None:
    from sfu.experiment.result_store import KINDS, kind_of

    entries = Store(given.cache).entries()
    if not entries:
        print(f"No results are cached in {given.cache}.")
        return
    print("kind   entries         size   last used")
    for kind in KINDS:
        some = [entry for entry in entries if kind_of(entry) == kind]
        if some:
            print(f"{kind:<6} {len(some):>7,} {human_size(size_of(some)):>12}   {some[0].used:%Y-%m-%d}")
    print(f"{len(entries):,} in {given.cache}, {human_size(size_of(entries))} in all.")


def _remove(given: Namespace) -> None:
    if given.all == (given.unused is not None):
        raise ConfigError("rm needs --all or --unused DAYS.")
    if given.unused is not None and not given.unused >= 0:
        raise ConfigError(f"--unused {given.unused:g} is not a number of days. Give 0 or more.")
    store = Store(given.cache)
    entries = store.entries()
    if given.unused is not None:
        limit = store.now() - _DAY * given.unused
        entries = [entry for entry in entries if entry.used.timestamp() <= limit]
    try:
        remove_entries(entries, given.cache)
    finally:
        store.remove_leftovers()


def _forget(given: Namespace) -> None:
    forget(given, caches(given.cache))


def caches(root: Path) -> list[Cache]:
    """Return the caches of what runs have made of examples, besides features; ``root`` is that of results."""
    from sfu.experiment.result_store import kind_of

    cores, training = cache_dir("cores"), cache_dir("training")
    return [
        Cache(root, Store(root).entries(), kind_of),
        Cache(cores, Store(cores).entries(), lambda entry: "core"),
        Cache(training, Store(training).entries(), lambda entry: "checkpoint"),
    ]


if __name__ == "__main__":
    main()
