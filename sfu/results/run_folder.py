"""A run's folder as found on disk: finished, failed, interrupted, killed midway, damaged, or of another schema."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sfu.errors import ArtifactError
from sfu.processes import is_gone
from sfu.results.artifacts import read_metrics

_NOT_RUNS = frozenset({"wandb", "heads", "tensorboard", ".hydra", ".git"})
"""Folders inside a run that hold no runs."""


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

    Raises:
        ArtifactError: A path does not exist, or a folder cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise ArtifactError(f"{error.filename} cannot be searched for runs ({error.strerror}).") from error

    found: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise ArtifactError(f"{path} does not exist (looked from {Path.cwd()}).")
        for name, below, files in os.walk(path if path.is_dir() else path.parent, onerror=refuse):
            below[:] = sorted(folder for folder in below if folder not in _NOT_RUNS)
            if "status.json" in files or "metrics.json" in files:
                found.setdefault(Path(name).resolve(), Path(name))
    return list(found.values())


def read_run(folder: Path, *, with_config: bool = False) -> FoundRun:
    """Read what a run left (its config.yaml only on request); whatever is wrong with it becomes its ``problem``."""
    try:
        status = _read_status(folder / "status.json")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return FoundRun(folder, "unknown", f"status.json is damaged ({type(error).__name__}: {error})")
    metrics, problem = None, _why_unfinished(status)
    try:
        metrics = read_metrics(folder / "metrics.json")
    except ArtifactError as error:
        problem = problem or str(error).replace(f"{folder}{os.sep}", "")
    config = None
    if with_config:
        try:
            config = _read_config(folder / "config.yaml")
        except (OSError, ValueError) as error:
            problem = problem or f"config.yaml cannot be read ({getattr(error, 'strerror', None) or error})"
    job, pid = status.get("job"), status.get("pid")
    return FoundRun(
        folder,
        state=status["state"],
        problem=problem,
        overrides=dict(item.lstrip("+~").split("=", 1) for item in status["overrides"] if "=" in item),
        job=job if isinstance(job, int) else None,
        pid=pid if isinstance(pid, int) else None,
        started=status.get("started"),
        metrics=metrics,
        config=config,
    )


def _read_status(path: Path) -> dict[str, Any]:
    """Read status.json; a folder without one holds the numbers of a finished run.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: It is damaged.
    """
    if not path.exists():
        return {"state": "finished", "overrides": []}
    status = dict(json.loads(path.read_text(encoding="utf-8")))
    started = datetime.fromisoformat(status["started"])
    status["started"] = started if started.tzinfo else started.replace(tzinfo=UTC)
    if not isinstance(status["state"], str) or not all(isinstance(item, str) for item in status["overrides"]):
        raise ValueError("state and overrides must be text")
    if status["state"] == "running" and _is_gone(status):
        status["state"] = "killed"
    return status


def _is_gone(status: dict[str, Any]) -> bool:
    """True if the process that wrote the record is known to have ended; False if that cannot be told."""
    pid, born = status.get("pid"), status.get("born")
    if status.get("host") != platform.node() or not isinstance(pid, int) or pid <= 0:
        return False
    return is_gone(pid, born if isinstance(born, str) else None)


def _why_unfinished(status: dict[str, Any]) -> str | None:
    known = {"finished": None, "killed": "killed midway", "running": "not finished: still running, or killed"}
    state = status["state"]
    return known[state] if state in known else str(status.get("error") or state).strip().splitlines()[0]


def _read_config(path: Path) -> dict[str, Any]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where it is there
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), loader)  # safe: plain values alone
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    if not isinstance(config, dict):
        raise ValueError("it holds no mapping")
    return {str(key): value for key, value in config.items()}
