"""A report as data: its sections, the runs that are not in them and why, settings, versions, and its limits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sfu.errors import DataError
from sfu.reporting.report.grouping import (
    SEEDS,
    Section,
    check_keys,
    configured,
    flatten,
    merge_repeats,
    sections,
    under,
    values_by_key,
)
from sfu.results.aggregate import Spread, in_order
from sfu.results.run_folder import FoundRun, read_run, run_folders

HIDDEN = ("logger",)
Track = Callable[[Sequence[Any], str], Iterable[Any]]


@dataclass(frozen=True)
class Report:
    """All that a report says: its tables, every run that was found, and those that no table has.

    ``sections`` are those with results. ``repeated`` holds pairs of a run and a later one with the same settings and
    seed, which replaces it. ``left_out`` are the runs that no section has.
    """

    title: str
    sections: list[Section]
    runs: list[FoundRun]
    repeated: list[tuple[FoundRun, FoundRun]]
    left_out: list[FoundRun]

    def name_of(self, run: FoundRun) -> str:
        """Return a run's folder without what all of them have in common."""
        return run.folder.name if len(self.runs) == 1 else os.path.relpath(run.folder.resolve(), self._common_folder)

    @cached_property
    def _common_folder(self) -> str:
        return os.path.commonpath([run.folder.resolve() for run in self.runs])

    @property
    def finished(self) -> list[FoundRun]:
        """Runs with results."""
        return [run for run in self.runs if run.metrics is not None]

    @property
    def troubled(self) -> list[FoundRun]:
        """Runs with a problem: failed, killed, damaged, or of another schema."""
        return [run for run in self.runs if run.problem is not None]

    @property
    def unlisted(self) -> list[FoundRun]:
        """Runs with a problem that no table names among its failed ones."""
        return [run for run in self.troubled if run.metrics is not None or run in self.left_out]

    def settings(self) -> list[tuple[str, list[str]]]:
        """Return every key and the values it had, in the order of the configuration."""
        values = values_by_key(flatten(run.config) for run in self.runs)
        return [(key, in_order(map(public, given))) for key, given in values.items() if not under(key, HIDDEN)]

    def versions(self) -> list[tuple[str, list[str]]]:
        """Return the versions of sfu, Python and the libraries, device and precision, as the runs recorded them."""
        recorded = []
        for run in self.finished:
            about = (run.metrics or {}).get("run") or {}
            entries = {"sfu": about.get("sfu_version"), **(about.get("versions") or {})}
            entries |= {key: about.get(key) for key in ("device", "dtype", "threads")}
            recorded.append({str(key): str(value) for key, value in entries.items() if value is not None})
        return list(values_by_key(recorded).items())


def public(text: str) -> str:
    """Return a value without the name of the reader's home folder: reports are mailed."""
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text


def build_report(
    paths: Sequence[Path],
    *,
    by: Sequence[str] = (),
    over: Sequence[str] = SEEDS,
    curves: Sequence[str] = (),
    neutral: Iterable[str] = (),
    spread: Spread = "stderr",
    title: str | None = None,
    track: Track = lambda items, _: items,
) -> Report:
    """Read every run at or below ``paths`` and put them into tables; see ``sections`` for ``by`` and ``over``.

    Args:
        paths: Folders of runs or of sweeps, or files in a run's folder.
        curves: Keys to draw curves over, checked before anything is drawn.
        neutral: Keys, with all below them, that do not change results.
        title: The first line; None: what the sections are about.
        track: Passes the folders on and shows progress.

    Raises:
        ArtifactError: A path does not exist.
        DataError: There is no run at all.
        ConfigError: A key of ``by``, ``over`` or ``curves`` is unknown.
    """
    folders = run_folders(*paths)
    if not folders:
        raise DataError(
            f"There are no runs in {', '.join(map(str, paths))}. A run's folder holds status.json and metrics.json; "
            "give the folder that `sfu` printed after `Saved in`."
        )
    runs = [read_run(folder, with_config=True) for folder in track(folders, "reading runs")]
    placed = [run for run in runs if run.config is not None and (run.metrics is not None or run.problem is not None)]
    merged, repeated = merge_repeats([configured(run, neutral) for run in placed])
    check_keys(merged, "--curve", curves)
    made = sections(merged, by, over, spread)
    found = [section for section in made if section.has_results]
    without = [run.folder for section in made if not section.has_results for run in section.runs]
    name = title or "sfu: " + ("; ".join(dict.fromkeys(section.title for section in found[:3])) or "no results")
    name += f" and {len(found) - 3} more" if title is None and len(found) > 3 else ""
    return Report(name, found, runs, repeated, [run for run in runs if run not in placed or run.folder in without])


def limits(report: Report) -> list[str]:
    """Say what these runs do not show; what no run shows is in the page's template."""
    found = []
    counts = [group.n for section in report.sections for group in section.table.groups if group.rows]
    if counts and min(counts) < 2:
        found.append("Some settings were run once. Those numbers have no spread, and their last digits mean nothing.")
    elif counts and min(counts) < 5:
        found.append(f"A spread over {min(counts)} runs is itself uncertain. With 3 runs it is easily off by half.")
    if report.troubled:
        found.append(f"{len(report.troubled)} of {len(report.runs)} runs have a problem, listed below.")
    if any(len(values) > 1 for key, values in report.versions() if key in ("sfu", "torch", "device", "dtype")):
        found.append("The runs were made by different versions or on different devices (see Versions).")
    return found
