"""Runs that are stopped by a signal, a full disk or a folder that goes leave no process, no lie and the right code."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from sfu.experiment.job import _recorded
from sfu.processes import Stopped
from sfu.results.run_folder import read_run
from tests.experiment.cases import sfu, write_folder
from tests.reporting.scripts import load_script

QUICK = ("methods=[original,retrained,closed_form]", "evaluation.membership_splits=2", "isolate=false")
FOREVER = ("methods=[slow]", "+variants.slow={base:neg_grad,settings:{epochs:1000000,lr:1e-9}}")


started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_runs_on() -> Iterator[None]:
    """A test that fails leaves no run that never ends."""
    yield
    while started:
        process = started.pop()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def start(module: str, *arguments: str, mark: str = "") -> subprocess.Popen[str]:
    """Start a command; a suite in the background of a shell ignores SIGINT, and the command would, too."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], env={**os.environ, load_script("kill_runs").MARK: mark},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    started.append(process)
    return process


def wait_until(true: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not after {seconds} s"
        time.sleep(0.02)


def state(folder: Path) -> str:
    return str(json.loads((folder / "status.json").read_text())["state"])


def stopped(process: subprocess.Popen[str], how: str, mark: str) -> str:
    """Send the signal, and return the output once the process and all that it has started are gone, in 5 s."""
    os.killpg(process.pid, signal.SIGINT) if how == "SIGINT" else process.send_signal(getattr(signal, how))
    process.wait(30)
    wait_until(lambda: not load_script("kill_runs").marked(mark), 5)
    return process.communicate()[0]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGKILL", -9)])
def test_jobs_side_by_side_end_with_their_sweep(tmp_path, feature_file, how, code):
    mark, data = uuid4().hex, ("dataset=features", f"dataset.path={feature_file}")
    arguments = (*data, "launcher=local_2", "logger=none", "seed=0,1,2", *FOREVER, f"hydra.sweep.dir={tmp_path}")
    process = start("sfu", "-m", *arguments, mark=mark)
    jobs = [tmp_path / "0", tmp_path / "1"]
    wait_until(lambda: all((job / "split.safetensors").exists() for job in jobs))
    assert {read_run(job).state for job in jobs} == {"running"}
    output = stopped(process, how, mark)
    assert process.returncode == code
    assert {read_run(job).state for job in jobs} == {"killed" if how == "SIGKILL" else "interrupted"}
    if how != "SIGKILL":
        assert {state(job) for job in tmp_path.glob("[0-9]")} == {"interrupted"}
        assert {read_run(job).problem for job in jobs} == {"interrupted by SIGTERM"}  # asked, and not killed at once
        started = len(list(tmp_path.glob("[0-9]/status.json")))  # two, or three if one was about to start
        assert f"0 of {started} runs" in output
        assert "Traceback" not in output


@pytest.mark.parametrize("stop", [Stopped(signal.SIGTERM), KeyboardInterrupt()])
def test_an_error_that_comes_of_being_stopped_is_no_failure(tmp_path, stop):
    """A signal may arrive within an import, which then fails by itself."""

    def imported(stopped: bool) -> None:
        try:
            if stopped:
                raise stop
        finally:
            raise ImportError("cannot import name")

    for stopped, wanted in ((True, "interrupted"), (False, "failed")):
        with pytest.raises(ImportError), _recorded(tmp_path, [], None):
            imported(stopped)
        assert state(tmp_path) == wanted


def of_rows(mark: str) -> list[int]:
    """The server of rows, and the row that it has forked."""
    found = []
    for pid in load_script("kill_runs").marked(mark):
        with contextlib.suppress(OSError):
            if b"serve_children" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.slow
def test_a_terminated_run_closes_its_record_and_ends_its_row(tmp_path, feature_file):
    mark, data = uuid4().hex, ("dataset=features", f"dataset.path={feature_file}")
    process = start("sfu", *data, *FOREVER, f"hydra.run.dir={tmp_path}", mark=mark)
    wait_until(lambda: len(of_rows(mark)) == 2)
    output = stopped(process, "SIGTERM", mark)
    assert process.returncode == 143
    assert output.splitlines()[-1] == "sfu: interrupted. Results that were finished are saved."
    assert read_run(tmp_path).problem == "interrupted by SIGTERM"
    (recorded,) = (tmp_path / "wandb").glob("offline-run-*")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(recorded)]
    records = map(json.loads, subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())
    assert [record["exit"]["exit_code"] for record in records if record["type"] == "exit"] == [143]


def test_a_terminated_extraction_keeps_what_it_has(tmp_path):
    images, cache, mark = write_folder(tmp_path / "images", per_class=1200), tmp_path / "cache", uuid4().hex
    arguments = ("dataset=image_folder", f"dataset.path={images}", "backbone=pixels", f"backbone.cache={cache}")
    process = start("sfu.cli.features", "extract", *arguments, mark=mark)
    wait_until(lambda: list(cache.glob("*/entry.json")))
    output = stopped(process, "SIGTERM", mark)
    assert process.returncode == 143
    assert output.splitlines()[-1] == "sfu-features: interrupted; what is in the cache stays there."


def test_a_folder_that_is_taken_away_fails_the_run_and_names_the_first_file(tmp_path, monkeypatch, capsys):
    folder, gone = tmp_path / "run", tmp_path / "gone"

    def take_away() -> None:
        wait_until((folder / "heads" / "original.json").exists)
        folder.rename(gone)

    thread = threading.Thread(target=take_away)
    thread.start()
    code = sfu(monkeypatch, *QUICK, "logger=none", "head.training=sgd", f"hydra.run.dir={folder}")
    thread.join()
    assert code == 1
    assert re.search(
        r"run/heads/\w+\.\w+ cannot be written, because the folder .*run was removed", capsys.readouterr().err
    )
    assert not (folder / "status.json").exists()
    assert not (folder / "metrics.json").exists()


IN_SMALL_FOLDERS = """
import contextlib, io, json, os, subprocess, sys
from pathlib import Path
from hydra.core.global_hydra import GlobalHydra
from sfu.cli import run

def mounted(options):
    folder = Path(PLACE, options.replace("=", "-").replace(",", "-"))
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=1000," + options, "tmpfs", folder], check=True)
    return folder

def sfu(*arguments):
    GlobalHydra.instance().clear()
    os.environ.pop("HYDRA_FULL_ERROR", None)
    sys.argv = ["sfu", *arguments]
    with contextlib.redirect_stderr(io.StringIO()) as error, contextlib.redirect_stdout(io.StringIO()):
        try:
            run.main()
            code = 0
        except SystemExit as stop:
            code = stop.code
    return code, error.getvalue()
"""


FULL_DISKS = f"""
for size in (4, 16, 28, 124, 164, 520):
    folder = mounted(f"size={{size}}k") / "run"
    code, error = sfu(*{QUICK}, "logger=none", f"hydra.run.dir={{folder}}")
    path = folder / "status.json"
    print(json.dumps([code, error, json.loads(path.read_text())["state"] if path.exists() else "none"]))
"""
CACHES = f"""
for options in ("size=17k", "size=1m,ro"):
    folder = mounted(options)
    os.environ["SFU_CACHE"] = str(folder)
    runs = f"hydra.sweep.dir={{folder}}-runs"
    code, error = sfu("-m", "seed=0,1", *{QUICK}, "methods=[original]", "logger=none", runs)
    print(json.dumps([code, error, json.loads(Path(f"{{folder}}-runs/sweep.json").read_text())["n_runs"]]))
"""


@pytest.fixture(scope="module")
def in_small_folders(tmp_path_factory: pytest.TempPathFactory) -> list[list[object]]:
    """What runs on six full disks, and then with two caches, say in one process that can mount folders of a size."""
    tmp_path, unshare = tmp_path_factory.mktemp("small"), shutil.which("unshare")
    allowed = unshare and subprocess.run([unshare, "-rm", "mount", "-t", "tmpfs", "tmpfs", tmp_path], check=False)
    if not allowed or allowed.returncode:
        pytest.skip("this system mounts nothing for tests")
    program = IN_SMALL_FOLDERS.replace("PLACE", repr(str(tmp_path))) + FULL_DISKS + CACHES
    environment = {**os.environ, "SFU_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [unshare, "-rm", sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_full_disk_fails_the_run_and_names_the_first_file(in_small_folders):
    *full, enough = in_small_folders[:6]
    assert enough == [0, "", "finished"]
    first = [
        re.search(r"sfu: (cannot use )?\S*/run/(\S+) (cannot be written )?\(.*No space", error) for _, error, _ in full
    ]
    assert [code for code, _, _ in full] == [1] * 5
    *early, last = [found and found.group(2) for found in first]
    assert early == [".hydra/hydra.yaml", "config.yaml", "examples.secret", "heads/retrained.secret"]
    assert last in ("metrics.json", "metrics.csv", "table.md")
    assert [state for _, _, state in full] == ["none", "failed", "failed", "failed", "failed"]


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_costs_the_cache(in_small_folders):
    assert len(in_small_folders) == 8
    for code, error, count in in_small_folders[6:]:
        assert (code, count) == (0, 2)
        assert str(error).count("The run goes on without caching") == 1, error


def test_a_table_that_cannot_be_written_is_no_success(tmp_path, monkeypatch, capsys):
    (tmp_path / "sweep.md").mkdir()
    assert sfu(monkeypatch, "-m", "seed=0,1", *QUICK, "logger=none", f"hydra.sweep.dir={tmp_path}") == 1
    captured = capsys.readouterr()
    assert "sweep.md cannot be written" in captured.err
    assert "n = 2" in captured.out
