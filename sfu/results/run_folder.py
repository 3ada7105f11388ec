"""A run's folder as found on disk: finished, failed, interrupted, killed midway, damaged, or of another schema."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from sfu.errors import ArtifactError
from sfu.processes import is_gone
from sfu.readers import Count, Record, read_record, read_yaml, refusing
from sfu.results.artifacts import read_metrics

_NOT_RUNS = frozenset({"wandb", "heads", "tensorboard", ".hydra", ".git"})
"""Folders inside a run that hold no runs."""


_REMEDY = "Run again, or remove the folder."


class StatusRecord(Record):
    """The content of status.json."""

    state: Literal["running", "finished", "failed", "interrupted"]
    started: datetime
    overrides: list[str]
    error: str | None = None
    job: Count | None = None
    host: str | None = None
    pid: int | None = None
    born: str | None = None

    @property
    def is_killed(self) -> bool:
        """Whether the process that wrote it is known to have ended without a word."""
        if self.state != "running" or self.host != platform.node() or self.pid is None or self.pid <= 0:
            return False
        return is_gone(self.pid, self.born)

    @property
    def problem(self) -> str | None:
        """Why there are no results, or only some; None for a finished run."""
        if self.state == "running":
            return "killed midway" if self.is_killed else "not finished: still running, or killed"
        return None if self.state == "finished" else ((self.error or "").strip() or self.state).splitlines()[0]

    def describe(self, folder: Path) -> FoundRun:
        """Return the run without its results."""
        return FoundRun(
            folder,
            state="killed" if self.is_killed else self.state,
            problem=self.problem,
            overrides=dict(item.lstrip("+~").split("=", 1) for item in self.overrides if "=" in item),
            job=self.job,
            pid=self.pid,
            started=self.started if self.started.tzinfo else self.started.replace(tzinfo=UTC),
        )


@dataclass(frozen=True)
class FoundRun:
    """What one folder holds.

    Attributes:
        state: ``finished``, ``failed``, ``interrupted``, ``running``, ``killed``, or ``unknown`` where nothing says so.
        problem: Why this run has no results, or only some; None for a complete one.
        overrides: What was given on the command line.
        job: Its number in a sweep.
        pid: The number of its process.
        metrics: The content of metrics.json; a run with a failed row has one, too.
        config: The resolved configuration, nested; None where it cannot be read.
    """

    folder: Path
    state: str
    problem: str | None
    overrides: dict[str, str] = field(default_factory=dict)
    job: int | None = None
    pid: int | None = None
    started: datetime | None = None
    metrics: dict[str, Any] | None = None
    config: dict[str, Any] | None = None

    @property
    def given(self) -> str:
        """What was given on the command line, as text."""
        return " ".join(f"{key}={value}" for key, value in self.overrides.items())


def run_folders(*paths: Path) -> list[Path]:
    """Find every folder at or below ``paths`` that holds a status.json or a metrics.json, each once.

    A folder that cannot be listed is among them, since it may hold a run.

    Raises:
        ArtifactError: A path does not exist.
    """
    found: dict[Path, Path] = {}

    def note(error: OSError) -> None:
        found.setdefault(Path(error.filename).resolve(), Path(error.filename))

    for path in paths:
        if not path.exists():
            raise ArtifactError(
                f"{path} does not exist (looked from {Path.cwd()}). Name folders of runs or sweeps, such as outputs."
            )
        for name, below, files in os.walk(path if path.is_dir() else path.parent, onerror=note):
            below[:] = sorted(folder for folder in below if folder not in _NOT_RUNS)
            if "status.json" in files or "metrics.json" in files:
                found.setdefault(Path(name).resolve(), Path(name))
    return list(found.values())


def read_run(folder: Path, *, with_config: bool = False) -> FoundRun:
    """Read what a run left (its config.yaml only on request); whatever is wrong with it becomes its ``problem``."""
    path, metrics, config, problem = folder / "status.json", None, None, None
    found = FoundRun(folder, "finished", None)  # a folder without a status holds the numbers of a finished run
    try:
        with refusing(path, "Make it readable, or remove the folder."):
            has_status = path.exists()
        if has_status:
            status = read_record(path, StatusRecord, _REMEDY)
            found, problem = status.describe(folder), status.problem
    except ArtifactError as error:
        return FoundRun(folder, "unknown", _brief(error, folder))
    try:
        metrics = read_metrics(folder / "metrics.json")
    except ArtifactError as error:
        problem = problem or _brief(error, folder)
    try:
        if with_config:
            with refusing(folder / "config.yaml", _REMEDY):
                config = read_yaml(folder / "config.yaml")
    except ArtifactError as error:
        problem = problem or _brief(error, folder)
    return replace(found, problem=problem, metrics=metrics, config=config)


def _brief(error: ArtifactError, folder: Path) -> str:
    return str(error).replace(f"{folder}{os.sep}", "")
