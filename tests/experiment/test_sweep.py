"""Which jobs are a sweep's own, whatever their clocks say, and what becomes of those that are stopped."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from sfu.experiment.sweep import Sweep, collect
from sfu.processes import birth_of
from tests.reporting.report.folders import killed_status, write_run
from tests.reporting.samples import good_run


@pytest.mark.parametrize("minutes", [-1e6, -5, -1 / 30, 0, 5])
def test_jobs_belong_to_the_sweep_in_whose_folder_they_started_whatever_their_clocks_say(tmp_path, minutes):
    started = (datetime.now(UTC) + timedelta(minutes=minutes)).isoformat()
    write_run(tmp_path / "0", good_run(), job=0, overrides=("seed=0",))
    write_run(tmp_path / "other" / "7", good_run(), job=7)
    sweep = Sweep.starting_in(tmp_path)
    assert sweep.jobs() == []
    write_run(tmp_path / "0", good_run(), job=0, overrides=("seed=3",), started=started)
    write_run(tmp_path / "deep" / "er" / "1", None, job=1, state="failed", error="SfuError: x", started=started)
    assert [run.folder.name for run in sweep.jobs()] == ["0", "1"]
    (overrides, metrics), (_, failed) = collect(sweep)
    assert overrides == {"seed": "3"}
    assert metrics == good_run()
    assert failed == {"error": "job 1: SfuError: x"}


def test_jobs_whose_process_is_gone_do_not_stay_running(tmp_path):
    sweep = Sweep.starting_in(tmp_path)
    write_run(tmp_path / "0", None, job=0, **killed_status())
    sweep.settle()
    status = json.loads((tmp_path / "0" / "status.json").read_text())
    assert (status["state"], status["error"]) == ("interrupted", "interrupted: its process was killed")


def test_jobs_of_other_processes_are_not_asked_to_stop(tmp_path):
    sweep = Sweep.starting_in(tmp_path)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    about = {"pid": other.pid, "born": birth_of(other.pid), "host": platform.node()}
    write_run(tmp_path / "0", None, job=0, state="running", **about)
    sweep.stop_jobs()
    assert other.poll() is None
    other.send_signal(signal.SIGKILL)
    other.wait()
