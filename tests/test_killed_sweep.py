"""A sweep that is killed and started again ends in the same table, and repeats nothing that was finished."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.experiment.cases import sfu

SWEEP = (
    "-m",
    "seed=0,1",
    "threads=1",
    "isolate=false",
    "logger=none",
    "methods=[original,closed_form]",
    "evaluation.membership_splits=2",
)


def cached_files(root: Path) -> dict[Path, int]:
    """When each file of a whole entry was written (``entry.json`` itself is touched by every use)."""
    entries = [path.parent for path in root.glob("*/entry.json")]
    return {path: path.stat().st_mtime_ns for entry in entries for path in entry.iterdir() if path.name != "entry.json"}


def numbers(folder: Path) -> dict[str, Any]:
    """The sweep's means and deviations, without times and sizes."""
    (group,) = json.loads((folder / "sweep.json").read_text())["groups"]
    return {
        f"{row}.{metric}.{part}": entry[part]
        for row, about in group["rows"].items()
        for metric, entry in about["metrics"].items()
        if metric not in ("seconds", "peak_memory_mb")
        for part in ("mean", "std", "n")
        if entry[part] is not None
    }


@pytest.mark.slow
def test_a_sweep_killed_midway_goes_on_where_it_was(tmp_path, feature_file, monkeypatch):
    sweep = (*SWEEP, "dataset=features", f"dataset.path={feature_file}")
    first = tmp_path / "first"
    process = subprocess.Popen(
        [sys.executable, "-m", "sfu", *sweep, f"hydra.sweep.dir={first}"], cwd=tmp_path, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (first / "1" / "status.json").is_file():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert json.loads((first / "0" / "status.json").read_text())["state"] == "finished"
    assert json.loads((first / "1" / "status.json").read_text())["state"] == "running"
    assert not (first / "sweep.json").exists()
    before = cached_files(Path(os.environ["SFU_CACHE"]) / "results")
    assert len(before) >= 3  # the head and the rows of job 0, at least

    again = tmp_path / "again"
    assert sfu(monkeypatch, *sweep, f"hydra.sweep.dir={again}") == 0
    after = cached_files(Path(os.environ["SFU_CACHE"]) / "results")
    assert {path: after[path] for path in before} == before
    reused = [json.loads((again / str(job) / "metrics.json").read_text())["run"]["reused"] for job in range(2)]
    assert reused[0] == ["run"]
    assert "run" not in reused[1]
    seconds = [json.loads((folder / "0" / "metrics.json").read_text())["rows"]["closed_form"]["seconds"]
               for folder in (first, again)]  # fmt: skip
    assert seconds[0] == seconds[1]

    monkeypatch.setenv("SFU_CACHE", str(tmp_path / "empty"))
    whole = tmp_path / "whole"
    assert sfu(monkeypatch, *sweep, f"hydra.sweep.dir={whole}") == 0
    assert numbers(again) == pytest.approx(numbers(whole), rel=1e-6, abs=1e-9)
