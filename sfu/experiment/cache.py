"""Read the result of a stage from the cache, or compute it and cache it.

The original head and every row are entries of their own. A whole run is one more entry that holds its figures only; its
heads come from the other entries.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from sfu.data.examples import EXAMPLES, note_examples, read_digests, write_run_examples
from sfu.errors import ArtifactError
from sfu.experiment.keys import StageKeys
from sfu.files import copy_file
from sfu.heads.settings import CORE_PREFIX
from sfu.results.artifacts import read_metrics
from sfu.store import Store

HEAD = "head"
"""Name of the original head's entry in ``metrics.json``, and stem of the head's files in every entry."""
_RUN_FILES = (
    *("metrics.json", "split.safetensors", "forget_files.txt", "figure.png", "trade_off.json", "trade_off.png"),
    *("roc.json", "roc.png"),
)

Result = TypeVar("Result")


class StageCache:
    """Cached results of one run's stages.

    Attributes:
        store: The entries of all runs.
        keys: The keys of this run's stages.
        reused: Names of the results that were read from the cache: ``head`` and rows.
    """

    def __init__(self, store: Store, keys: StageKeys) -> None:
        self.store, self.keys = store, keys
        self.reused: list[str] = []

    def cached(
        self,
        key: str,
        make: Callable[[], Result],
        write: Callable[[Result, Path], object],
        read: Callable[[Path], Result],
        *,
        name: str | None = None,
        waiting: Callable[[], None] | None = None,
        worth_caching: Callable[[Result], bool] = lambda made: True,
    ) -> Result:
        """Read the entry of a stage, or call ``make`` and cache what it returns.

        Only one process computes an entry at a time; the others wait and read it. If the cache cannot be written, it is
        computed all the same, and not cached.

        Args:
            key: The stage's key.
            make: Computes the result.
            write: Writes a result into a folder.
            read: Reads a result from the folder of an entry. One that it refuses with :class:`ArtifactError` is made
                again.
            name: What to call the result in :attr:`reused`.
            waiting: Called when another process is computing the same entry.
            worth_caching: Whether to cache a result.
        """
        found = self.store.read(key, read)  # reading needs no lock, so a cache may be read-only
        if found is None:
            with ExitStack() as stack:
                with self.store.optional():
                    stack.enter_context(self.store.locked(key, waiting))
                found = self.store.read(key, read)
                if found is None:
                    made = make()
                    if worth_caching(made):
                        with self.store.optional():
                            self.store.put(key, lambda folder: write(made, folder), about=self._about)
                    return made
        if name is not None:
            self.reused.append(name)
        return found

    def available(self) -> list[str]:
        """Names of the results that are cached: ``head`` and rows."""
        return [name for name, key in {HEAD: self.keys.head, **self.keys.rows}.items() if self.store.has(key)]

    def has_run(self) -> bool:
        """Whether the whole run is cached."""
        return all(self.store.has(key) for key in (self.keys.run, self.keys.head, *self.keys.rows.values()))

    def restore_run(self, folder: Path) -> dict[str, Any] | None:
        """Copy a cached run into ``folder`` and return its metrics, or ``None`` if any part of it is not cached."""
        metrics = self.store.read(self.keys.run, self._read_metrics)
        entries = {name: self.store.find(key) for name, key in {"original": self.keys.head, **self.keys.rows}.items()}
        heads = {name: entry for name, entry in entries.items() if entry is not None}
        if metrics is None or len(heads) < len(entries):
            return None
        _copy_run_files(self.store.root / self.keys.run, folder)
        if (listed := self.examples()) is not None:
            write_run_examples(folder, listed)
        for name, entry in heads.items():
            for path in entry.glob("*.*"):
                if path.stem == HEAD:
                    copy_file(path, folder / "heads" / f"{name}{path.suffix}")
                elif path.name.startswith(CORE_PREFIX) and not (folder / "heads" / path.name).is_file():
                    copy_file(path, folder / "heads" / path.name)
        return metrics

    def _read_metrics(self, entry: Path) -> dict[str, Any]:
        metrics = read_metrics(entry / "metrics.json")
        if set(metrics["rows"]) != set(self.keys.rows) or not metrics.get("run"):
            raise ArtifactError(f"{entry} does not hold the rows of this run.")
        return metrics

    def save_run(self, folder: Path) -> None:
        """Cache the figures of a complete run from its folder."""
        with self.store.optional():
            self.store.put(self.keys.run, lambda entry: _copy_run_files(folder, entry), about=self._about)

    def note_examples(self, digests: Callable[[], list[bytes]]) -> None:
        """Cache the digests of the run's examples, unless they are; all entries name them."""
        with self.store.optional():
            note_examples(self.store, self.keys.examples, digests)

    def examples(self) -> frozenset[bytes] | None:
        """Return the digests that :meth:`note_examples` has cached; ``None`` if there are none."""
        return read_digests(self.store.root / self.keys.examples / EXAMPLES)

    @property
    def _about(self) -> dict[str, object]:
        return {"examples": self.keys.examples}


def _copy_run_files(source: Path, target: Path) -> None:
    for name in _RUN_FILES:
        if (source / name).is_file():
            copy_file(source / name, target / name)
