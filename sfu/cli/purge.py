"""What ``sfu-unlearn purge`` removes: whatever the caches and run folders hold that was made of given feature rows.

Shapes: F rows, D features.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sfu.cli.commands import remove_entries
from sfu.cli.results import caches
from sfu.data.examples import RUN_EXAMPLES, Purge, find_entries, read_digests, row_digests
from sfu.errors import ArtifactError
from sfu.lazy import torch
from sfu.records.record import Removed
from sfu.results.run_folder import read_run, run_folders
from sfu.store import Entry, Store, cache_dir

if TYPE_CHECKING:
    from torch import Tensor

_HEADS = "heads"


@dataclass(frozen=True)
class Found:
    """What was made of the rows, or does not say what it was made of.

    Attributes:
        caches: What is to go from each cache, by its folder.
        runs: Run folders whose data held a row.
        unknown_runs: Run folders that do not say what their data held.
    """

    caches: dict[Path, Purge]
    runs: list[Path]
    unknown_runs: list[Path]

    def counts(self) -> tuple[dict[str, Removed], Removed]:
        """Return the number of entries of each cache, and of run folders."""
        entries = {
            root.name: Removed(made_of_them=len(purge.made_of_them), unknown=len(purge.unknown))
            for root, purge in self.caches.items()
        }
        return entries, Removed(made_of_them=len(self.runs), unknown=len(self.unknown_runs))

    def remove(self) -> None:
        """Remove all of it: entries of caches, and of run folders the heads and the list of examples.

        Raises:
            ArtifactError: An entry is in use, or something cannot be removed; all else is.
        """
        problems: list[ArtifactError] = []
        for root, purge in self.caches.items():
            try:
                remove_entries([*purge.made_of_them, *purge.unknown], root)
            except ArtifactError as error:
                problems.append(error)
            Store(root).remove_leftovers(older_than=0.0)
        for folder in (*self.runs, *self.unknown_runs):
            try:
                _remove(folder / _HEADS)
                (folder / RUN_EXAMPLES).unlink(missing_ok=True)
                print(f"Removed the heads of {folder}.")
            except OSError as error:
                problems.append(ArtifactError(f"the heads of {folder} cannot be removed ({error}). Remove them."))
        if problems:
            raise problems[0]


def find(features_FD: np.ndarray, runs: Sequence[Path]) -> Found:
    """Find what was made of some rows: in the caches of features, results, cores and checkpoints, and in run folders.

    A cache of features is searched by content; all else names the digests of its examples.

    Raises:
        ArtifactError: A folder of runs does not exist, or a run is under way.
    """
    digests = frozenset(digest for rows in _forms(torch.from_numpy(features_FD)) for digest in row_digests(rows))
    found = {cache_dir("features"): _in_features(digests)}
    found |= {cache.root: find_entries(cache.entries, [digests]) for cache in caches(cache_dir("results"))}
    made, unknown = list[Path](), list[Path]()
    for folder in run_folders(*runs):
        if not (folder / _HEADS).is_dir():
            continue
        if read_run(folder).state == "running":
            raise ArtifactError(f"the run in {folder} is under way, and would write heads again. Wait, or stop it.")
        listed = read_digests(folder / RUN_EXAMPLES)
        if listed is None:
            unknown.append(folder)
        elif not digests.isdisjoint(listed):
            made.append(folder)
    return Found(found, made, unknown)


def _in_features(digests: frozenset[bytes]) -> Purge:
    from sfu.data.features.store import cached_features

    purge = Purge([], [], set())
    for entry in cached_features(cache_dir("features")):
        holds = _holds(entry, digests)
        if holds is None:
            purge.unknown.append(entry)
        elif holds:
            purge.made_of_them.append(entry)
    return purge


def _holds(entry: Entry, digests: frozenset[bytes]) -> bool | None:
    """Whether a row is among an entry's features, as they are or with norm 1; ``None`` if a chunk cannot be read."""
    from sfu.data.features.store import chunks_of

    try:
        return any(not digests.isdisjoint(row_digests(rows)) for chunk in chunks_of(entry) for rows in _forms(chunk))
    except (ArtifactError, ValueError):
        return None


def _forms(features_MD: Tensor) -> list[np.ndarray]:
    """Rows as they are, and with norm 1 as ``dataset.normalize_rows`` computes it."""
    return [features_MD.numpy(), torch.nn.functional.normalize(features_MD.float(), dim=1).numpy()]


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
