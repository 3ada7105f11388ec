"""What the commands share: how they end, and ``ls`` and ``rm`` on the entries of a cache."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from sfu.data.features.ranks import launched_by_torchrun
from sfu.errors import ArtifactError, ConfigError, SfuError
from sfu.names import show_warnings_safely, visible
from sfu.processes import exit_code_of, signals_as_exceptions
from sfu.store import Entry, Store, cache_dir

if TYPE_CHECKING:
    from sfu.experiment.config import RunConfig

IN_CACHE = "; what is in the cache stays there"


def add_ls_and_rm(
    add_parser: Callable[..., ArgumentParser],
    kind: str,
    ls: Callable[[Namespace], None],
    rm: Callable[[Namespace], None],
) -> ArgumentParser:
    """Add the commands ``ls`` and ``rm`` for a kind of cache; return the parser of ``rm`` for options of its own."""
    listing = add_parser("ls", help="show what is cached, the last used first")
    removing = add_parser("rm", help="remove what is cached")
    for parser, command in ((listing, ls), (removing, rm)):
        parser.set_defaults(run=command)
        parser.add_argument("--cache", type=Path, default=cache_dir(kind), help="folder (default: %(default)s)")
    removing.add_argument("--all", action="store_true", help="everything")
    return removing


def run_command(parser: ArgumentParser, arguments: list[str] | None, interrupted: str = "", *, failed: int = 1) -> None:
    """Call the ``run`` of the parsed arguments; exit with the code ``failed`` after a clear message if it fails.

    It exits with 130 after Ctrl-C and with 143 after SIGTERM.
    """
    given = parser.parse_args(arguments)
    show_warnings_safely()
    # a rank that waits for the others inside PyTorch runs no handler, and torchrun would wait 30 s for it
    handling = nullcontext() if launched_by_torchrun() else signals_as_exceptions()
    try:
        with handling:
            given.run(given)
    except KeyboardInterrupt as stop:
        print(f"{parser.prog}: interrupted{interrupted}.", file=sys.stderr)
        sys.exit(exit_code_of(stop))
    except (SfuError, OSError) as error:
        shown = visible(str(error), keep="\n")
        print(f"{parser.prog}: {shown}", file=sys.stderr)
        sys.exit(failed)


def remove_entries(entries: Sequence[Entry], root: Path) -> None:
    """Remove entries and say so; those that a run is using stay.

    Raises:
        ArtifactError: An entry cannot be removed; the others are.
    """
    problems: list[ArtifactError] = []
    for entry in entries:
        try:
            Store(entry.folder.parent).remove(entry.key)
        except ArtifactError as error:
            problems.append(error)
    removed = len(entries) - len(problems)
    if removed:
        print(f"Removed {removed:,} {'entry' if removed == 1 else 'entries'} from {root}.")
    elif not problems:
        print(f"Nothing to remove in {root}.")
    if problems:
        raise problems[0]


def compose_settings(settings: list[str]) -> RunConfig:
    """Return the typed configuration of ``key=value`` settings.

    Raises:
        ConfigError: A setting is unknown or of the wrong type.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    from sfu.config_files import MAIN_CONFIG, config_dir
    from sfu.experiment.config import register, typed_config
    from sfu.experiment.explain import explain, wrong_choice
    from sfu.experiment.quoting import unreadable

    register()
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            config = typed_config(compose(MAIN_CONFIG, overrides=settings))
    except HydraException as error:
        raise ConfigError(unreadable(settings) or explain(error)) from error
    except (ValueError, TypeError) as error:
        problem = wrong_choice(settings)
        if problem is None:
            raise
        raise ConfigError(problem) from error
    return config
