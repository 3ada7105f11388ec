from __future__ import annotations

import ast
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sfu.errors import ArtifactError
from sfu.processes import birth_of
from sfu.results.run_folder import read_run, run_folders
from tests.reporting.report.folders import CONFIG, killed_status, write_run
from tests.reporting.samples import good_run


def test_a_whole_run(tmp_path):
    run = read_run(write_run(tmp_path / "a", good_run(), overrides=("+head.l2=5e-4", "seed=0")), with_config=True)
    assert (run.state, run.problem, run.job) == ("finished", None, None)
    assert run.overrides == {"head.l2": "5e-4", "seed": "0"}
    assert run.config == CONFIG
    assert run.metrics == good_run()
    assert run.started.isoformat() == "2026-11-27T23:08:00+00:00"


def test_folders_at_any_depth_each_once_and_none_of_the_loggers(tmp_path):
    for name in ("x/0", "x/y/z/1", "x/0/wandb/offline/files", "x/0/heads", "x/0/tensorboard"):
        write_run(tmp_path / name, good_run())
    found = run_folders(tmp_path, tmp_path / "x", tmp_path / "x" / "0" / "metrics.json")
    assert sorted(path.relative_to(tmp_path).as_posix() for path in found) == ["x/0", "x/y/z/1"]


def test_a_path_that_does_not_exist(tmp_path):
    with pytest.raises(ArtifactError, match=r"nowhere does not exist \(looked from"):
        run_folders(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("status", "state", "problem"),
    [
        ({"state": "failed", "error": "ConfigError: head.l2\nmore"}, "failed", "ConfigError: head.l2"),
        ({"state": "interrupted", "error": "interrupted"}, "interrupted", "interrupted"),
        ({"state": "running"}, "running", "not finished: still running, or killed"),
        ({"state": "running", "host": "elsewhere", "pid": 1}, "running", "not finished: still running, or killed"),
        ({"state": "running", "host": platform.node(), "pid": os.getpid()}, "running", "not finished"),
        ({"state": "running", "host": platform.node(), "pid": 10**30}, "killed", "killed midway"),
        ({"state": "running", "host": platform.node(), "pid": os.getpid(), "born": 3}, "unknown", "status.json cannot"),
        ({"state": "finished"}, "finished", "metrics.json cannot be read"),
        ({"state": ""}, "unknown", "status.json cannot be read (state=''"),
        ({"state": "failed", "error": " \n"}, "failed", "failed"),
        ({"job": True}, "unknown", "status.json cannot be read (job=True"),
        ({"state": 3}, "unknown", "status.json cannot be read ("),
        ({"started": "yesterday"}, "unknown", "status.json cannot be read ("),
    ],
)
def test_unfinished_runs_say_why(tmp_path, status, state, problem):
    run = read_run(write_run(tmp_path / "a", None, **status))
    assert run.state == state
    assert run.problem.startswith(problem)
    assert run.metrics is None


def test_a_killed_run_is_known_to_be_killed(tmp_path):
    run = read_run(write_run(tmp_path / "a", None, **killed_status()))
    assert (run.state, run.problem) == ("killed", "killed midway")


def test_a_killed_run_is_known_although_another_process_has_its_number_now(tmp_path):
    here = {"state": "running", "host": platform.node(), "pid": os.getpid(), "born": birth_of(os.getpid())}
    assert read_run(write_run(tmp_path / "a", None, **here)).state == "running"
    earlier = here | {"born": f"{here['born']}0"}
    assert read_run(write_run(tmp_path / "b", None, **earlier)).state == "killed"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2, "rows": {}}'])
def test_damaged_and_foreign_metrics_are_a_problem_not_an_error(tmp_path, text):
    folder = write_run(tmp_path / "a", good_run())
    (folder / "metrics.json").write_text(text)
    run = read_run(folder)
    assert run.metrics is None
    assert run.problem.startswith("metrics.json ")
    assert str(tmp_path) not in run.problem


@pytest.mark.parametrize("text", ["a: [", "- 1", "\x00"])
def test_a_damaged_configuration_is_a_problem(tmp_path, text):
    folder = write_run(tmp_path / "a", good_run())
    (folder / "config.yaml").write_text(text)
    run = read_run(folder, with_config=True)
    assert run.config is None
    assert run.problem.startswith("config.yaml cannot be read")


def test_numbers_alone_are_a_finished_run_and_a_failed_row_keeps_the_others(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.json").write_text(json.dumps(good_run()))
    assert (read_run(tmp_path / "a").state, read_run(tmp_path / "a").problem) == ("finished", None)
    run = read_run(write_run(tmp_path / "b", good_run(), state="failed", error="SfuError: 1 of 5 rows failed"))
    assert run.metrics is not None
    assert run.problem == "SfuError: 1 of 5 rows failed"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_a_folder_that_cannot_be_listed_costs_a_line():
    script = (
        "import os, sys; from pathlib import Path; import sfu.results.run_folder as runs; os.setuid(65534); "
        "found = map(runs.read_run, runs.run_folders(Path(sys.argv[1]))); "
        "print([(run.folder.name, run.state, run.problem) for run in found])"
    )
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        write_run(Path(name) / "good", good_run())
        write_run(Path(name) / "closed", good_run()).chmod(0o700)
        done = subprocess.run([sys.executable, "-c", script, name], capture_output=True, text=True, check=True)
    assert sorted(ast.literal_eval(done.stdout)) == [
        (
            "closed",
            "unknown",
            "status.json cannot be read (Permission denied). Make it readable, or remove the folder.",
        ),
        ("good", "finished", None),
    ]
