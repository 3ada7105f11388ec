"""``sfu-rerun``: a run is repeated from its folder, and what differs is said."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from sfu.cli.rerun import main, repetition
from sfu.results.comparison import OTHER, SAME, SINGLE, compare, head_differences
from tests.conftest import make_arrays
from tests.experiment.cases import sfu
from tests.unlearning.cases import trained

METHODS = "methods=[original,retrained,closed_form]"


def rerun(*arguments: str) -> int:
    try:
        main([*arguments])
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


@pytest.mark.slow
def test_a_run_repeats_itself_and_a_changed_setting_shows(tmp_path, monkeypatch, capfd):
    first = tmp_path / "first"
    np.savez(tmp_path / "data.npz", **make_arrays(300))
    arguments = ["dataset=features", f"dataset.path={tmp_path}/data.npz", METHODS, "logger=none", "seed=3"]
    assert sfu(monkeypatch, *arguments, f"hydra.run.dir={first}") == 0
    about = json.loads((first / "metrics.json").read_text())["run"]
    assert about["tf32"] is False
    assert about["git"] is None or re.fullmatch("[0-9a-f]{40}", about["git"]["commit"])
    capfd.readouterr()
    assert rerun(str(first)) == 0
    shown = capfd.readouterr().out
    for row in ("original", "retrained", "closed_form"):
        assert re.search(rf"^{row} +\d\.\de[+-]\d\d  the same$", shown, re.M), shown
    assert f"The repetition agrees: {first}\n-> {first}-rerun" in shown
    assert "heads 1e-10 and figures 1e-08 relative, accuracies 0 points" in shown

    def in_this_process(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, sfu(monkeypatch, *command[3:]))

    monkeypatch.setattr(subprocess, "run", in_this_process)
    monkeypatch.setattr("sfu.experiment.pipeline._git_state", lambda package: None)
    assert rerun(str(first), "head.l2=0.5", "--out", str(tmp_path / "other")) == 1
    shown = capfd.readouterr().out
    assert re.search(r"^setting head\.l2: 0\.001 -> 0\.5$", shown, re.M)
    assert "differs" in shown


def test_what_cannot_be_repeated_is_refused(tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    for about, further, message in (
        (None, [], "metrics.json"),
        ({}, [], "does not say with what settings"),
        ({"overrides": []}, ["--out", str(tmp_path)], "exists, and sfu-rerun replaces nothing"),
    ):
        if about is not None:
            (folder / "metrics.json").write_text(json.dumps({"schema": 1, "run": about, "rows": {}}))
        assert rerun(str(folder), *further) == 2
        assert message in capsys.readouterr().err
    status = {"state": "running", "started": "2026-11-29T10:00:00+00:00", "overrides": [], "pid": os.getpid()}
    (folder / "status.json").write_text(json.dumps(status | {"host": platform.node()}))
    assert rerun(str(folder)) == 2
    assert "did not end. Give a folder of a finished run." in capsys.readouterr().err


def test_a_repetition_is_one_run_without_cache_and_logger(tmp_path):
    given = [
        "+experiment=debug",
        "seeds=10",
        "seed=4",
        "reuse=always",
        "logger=wandb",
        "logger.mode=online",
        "head.l2=1",
    ]
    assert repetition(given, ["device=cpu"], tmp_path / "a=b, c") == [
        "+experiment=debug", "seed=4", "head.l2=1", "device=cpu", "reuse=never", "logger=none",
        f'hydra.run.dir="{tmp_path}/a=b, c"',
    ]  # fmt: skip


def test_heads_are_compared_by_their_parameters(tmp_path):
    head = trained()
    for name, scale in (("one", 1.0), ("two", 1 + 1e-6)):
        replace(head, parameters_CE=head.parameters_CE * scale).save(tmp_path / name / "heads" / "a")
    head.save(tmp_path / "one" / "heads" / "b")
    found = head_differences(tmp_path / "one", tmp_path / "two")
    assert found["a"] == pytest.approx(1e-6)
    assert found["b"] is None


def metrics(**changes: object) -> dict[str, object]:
    run = {"sfu_version": "1", "versions": {"torch": "2.9"}, "device": "cpu", "threads": 2, "dtype": "float64"}
    row = {"access": "forget", "test_accuracy": 70.0, "distance": 0.25, "seconds": 1.0, "note": "x", "applied": True}
    return {
        "schema": 1, "run": run | {key: value for key, value in changes.items() if key in run},
        "rows": {"a": row | {key: value for key, value in changes.items() if key in row}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "head", "agrees"),
    [
        ({}, 0.0, True),
        ({"seconds": 50.0, "note": "y"}, 1e-11, True),
        ({}, 1e-9, False),
        ({"distance": 0.25 * (1 + 1e-7)}, 0.0, False),
        ({"test_accuracy": 70.01}, 0.0, False),
        ({"applied": False}, 0.0, False),
        ({"distance": None}, 0.0, False),
        ({}, None, False),
        ({"device": "cuda", "test_accuracy": 70.09, "distance": 0.25 * (1 + 9e-5)}, 9e-7, True),
        ({"device": "cuda"}, 2e-6, False),
        ({"device": "cuda", "test_accuracy": 70.2}, 0.0, False),
        ({"versions": {"torch": "3"}, "dtype": "float32", "test_accuracy": 70.4}, 9e-4, True),
    ],
)
def test_tolerances_follow_from_what_the_runs_share(changes, head, agrees):
    found = compare((metrics(), {"head": {"l2": 1}}), (metrics(**changes), {"head": {"l2": 1}}), {"a": head})
    assert found.agrees is agrees
    wanted = SINGLE if changes.get("dtype") == "float32" else OTHER if "device" in changes else SAME
    assert found.tolerance == wanted


def test_settings_that_are_a_repetitions_own_do_not_count():
    one, two = (
        {"logger": {"name": "wandb"}, "reuse": "sweeps", "device": "cpu"},
        {"logger": {"name": "none"}, "reuse": "never"},
    )
    assert compare((metrics(), one), (metrics(), two), {"a": 0.0}).agrees
    assert not compare((metrics(), {"seed": 1}), (metrics(), {"seed": 2}), {"a": 0.0}).agrees
