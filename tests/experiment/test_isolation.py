"""A source-free row runs in a process that can reach nothing but its request: tried by methods that try to."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from sfu.experiment.job import open_cache
from sfu.experiment.row_process import read_back
from sfu.isolation.sandbox import available, split_around
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.rows import make_methods
from tests.conftest import make_arrays
from tests.experiment.attacks import (
    FILES,
    NETWORK,
    PROCESSES,
    Careless,
    Dies,
    FindsFiles,
    HandsBackLinks,
    Odd,
    Patches,
    Reaches,
    SearchesMemory,
    Stays,
    marked_rows,
)
from tests.experiment.cases import Probe, config_for, run

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
MARKER = np.float32(123456.78)
INVERTED = bytes(255 - byte for byte in MARKER.tobytes())
enforced = pytest.mark.skipif(not (available().files and available().network), reason="this kernel has no Landlock")


@pytest.fixture
def marked_file(tmp_path: Path) -> Path:
    """A feature file whose training rows can be told in memory: marker, number, features."""
    arrays = make_arrays(seed=5)
    rows = arrays["train_features"]
    rows[:, 0], rows[:, 1] = MARKER, np.arange(1, len(rows) + 1)
    arrays["test_features"][:, :2] = 0
    path = tmp_path / "data" / "marked.npz"
    path.parent.mkdir()
    np.savez(path, **arrays)
    return path


def rows_of(path: Path, folder: Path, methods: Mapping[str, UnlearningMethod], **changes: object) -> dict[str, dict]:
    return run(config_for(path, **changes), folder, methods=methods)["rows"]


@enforced
def test_no_file_of_the_dataset_can_be_reached_by_any_spelling(tmp_path, marked_file):
    linked = marked_file.with_name("hard.npz")
    os.link(marked_file, linked)
    before = marked_file.read_bytes()
    methods = {how: Reaches(how, marked_file) for how in FILES}
    methods |= {f"linked_{how}": Reaches(how, linked) for how in ("pathlib", "os_open", "libc")}
    rows = rows_of(marked_file, tmp_path / "run", methods)
    reached = {name: row["note"] for name, row in rows.items() if not row.get("error")}
    assert not reached
    assert not any("distance" in row for row in rows.values())
    assert {row["isolation"] for row in rows.values()} == {"process, files, network"}
    assert marked_file.read_bytes() == before


def test_every_attack_on_files_works_where_nothing_is_enforced(tmp_path, monkeypatch):
    """The attacks above are real: outside the sandbox each of them gets somewhere."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    refused = {}
    for how, attack in FILES.items():
        path = tmp_path / "folder" / "features.npz"
        path.parent.mkdir(exist_ok=True)
        np.savez(path, **make_arrays())
        Path(tempfile.gettempdir(), "link").unlink(missing_ok=True)
        try:
            attack(path)
        except (PermissionError, FileNotFoundError, subprocess.CalledProcessError) as error:
            refused[how] = error
        except Exception:  # it read the file, and this is none of its format
            continue
    assert not refused


@enforced
def test_caches_the_run_folder_and_installed_datasets_cannot_be_reached(tmp_path, marked_file, monkeypatch):
    import sklearn

    cache = tmp_path / "sfu-cache"
    monkeypatch.setenv("SFU_CACHE", str(cache))
    config = config_for(marked_file, reuse="always")
    run(config, tmp_path / "first", cache=open_cache(config, in_sweep=True))
    assert any(cache.rglob("row.json"))
    installed = Path(sklearn.__file__).parent / "datasets" / "data"
    folders = {"cache": cache, "run": tmp_path / "second", "others": tmp_path / "first", "installed": installed}
    rows = rows_of(marked_file, tmp_path / "second", {name: FindsFiles((at,)) for name, at in folders.items()})
    assert {name: row["note"] for name, row in rows.items()} == dict.fromkeys(folders, "read 0 files")


@enforced
@pytest.mark.parametrize("folder", [False, True])
def test_a_row_cannot_have_the_caller_read_another_head_for_it(tmp_path, marked_file, folder):
    run(config_for(marked_file), tmp_path / "first")
    other = tmp_path / "first" / "heads" / "retrained.json"
    row = rows_of(marked_file, tmp_path / "run", {"links": HandsBackLinks(other, folder)})["links"]
    assert "PermissionError" in row["error"]  # no link can be made
    assert "distance" not in row


def test_what_is_no_plain_folder_of_files_is_not_read(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "head.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ValueError, match="link is no folder"):
        read_back(tmp_path / "link", None, CPU)
    with pytest.raises(ValueError, match=r"head\.json is no regular file"):
        read_back(tmp_path / "real", None, CPU)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("shape", "does not fit a LinearHead"), ("interrupt", "KeyboardInterrupt"),
        ("exit", "SystemExit: a good reason"),
        ("long", "RuntimeError: xxx"), ("closed", None), ("threads", None), ("deep", None),
    ],
)  # fmt: skip
def test_odd_behaviour_ends_the_row_at_most(tmp_path, marked_file, how, says):
    rows = rows_of(marked_file, tmp_path / "run", {"odd": Odd(how), "after": Odd("fine")})
    assert "error" not in rows["after"]
    if says is None:
        assert "error" not in rows["odd"]
    else:
        assert says in rows["odd"]["error"]
        assert len(rows["odd"]["error"]) < 20_000


@enforced
def test_a_row_cannot_outlive_its_end(tmp_path, marked_file):
    rows = rows_of(marked_file, tmp_path / "run", {"stays": Stays()})
    assert "cannot be read" in rows["stays"]["error"]
    assert not [folder for folder in Path("/proc").glob("[0-9]*") if is_orphan(folder)]


def is_orphan(folder: Path) -> bool:
    """Whether a process of a row has lost its server."""
    with contextlib.suppress(OSError):
        if b"serve_children" in (folder / "cmdline").read_bytes():
            return "\nPPid:\t1\n" in (folder / "status").read_text()
    return False


def test_a_class_of_a_script_runs_in_the_script(tmp_path, marked_file):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        from dataclasses import dataclass
        from pathlib import Path

        from sfu.experiment.pipeline import run
        from sfu.unlearning.base import UnlearningMethod
        from sfu.unlearning.result import UnlearningResult
        from tests.experiment.cases import config_for


        @dataclass(frozen=True)
        class Mine(UnlearningMethod):
            def unlearn(self, request, context, retained=None):
                return UnlearningResult(request.head)


        folder = Path(sys.argv[2])
        folder.mkdir()
        row = run(config_for(Path(sys.argv[1])), folder, methods={"mine": Mine()}, show_progress=False)["rows"]["mine"]
        assert "error" not in row, row
        assert row["isolation"] == "none"
    """)
    )
    command = [sys.executable, str(script), str(marked_file), str(tmp_path / "out")]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


def test_runs_in_two_threads_do_not_disturb_each_other(tmp_path, marked_file):
    alone = rows_of(marked_file, tmp_path / "alone", {"probe": Probe()})["probe"]
    with ThreadPoolExecutor(2) as pool:
        tasks = [
            pool.submit(rows_of, marked_file, tmp_path / str(n), {"probe": Probe(), "odd": Odd("fine")})
            for n in range(2)
        ]  # fmt: skip
        both = [task.result() for task in tasks]
    assert [rows["probe"].get("error") for rows in both] == [None, None]
    assert [rows["odd"]["distance"] for rows in both] == [alone["distance"]] * 2


@enforced
def test_no_other_process_and_no_address_can_be_reached(tmp_path, marked_file):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        methods = {how: Reaches(how, os.getpid()) for how in PROCESSES}
        methods |= {how: Reaches(how, address) for how in NETWORK}
        rows = rows_of(marked_file, tmp_path / "run", methods)
        assert not {name: row["note"] for name, row in rows.items() if not row.get("error")}
        NETWORK["tcp"](address).close()  # it is open to others


@pytest.mark.parametrize("isolate", [True, False])
def test_a_row_that_changes_its_request_changes_no_other_row_and_no_cached_result(tmp_path, marked_file, isolate):
    config = config_for(marked_file, isolate=isolate)
    config.methods = ["closed_form", "retrained"]
    alone = run(config, tmp_path / "alone")["rows"]["closed_form"]
    methods = {"careless": Careless(), **make_methods(config), "again": Careless()}
    beside = run(config, tmp_path / "beside", methods=methods)["rows"]
    assert beside["careless"]["distance"] != 1
    for key in ("distance", "test_accuracy", "forget_accuracy", "mia"):
        assert beside["closed_form"][key] == alone[key], key


@enforced
def test_a_row_that_patches_a_global_changes_nobody_elses(tmp_path, marked_file):
    config = config_for(marked_file)
    config.methods = ["unlearned_minus", "closed_form"]
    alone = run(config, tmp_path / "alone")["rows"]
    beside = run(config, tmp_path / "beside", methods={"patches": Patches(), **make_methods(config)})["rows"]
    assert beside["patches"]["distance"] == pytest.approx(1)
    for name in config.methods:
        assert beside[name]["distance"] == alone[name]["distance"]


def test_the_memory_of_a_row_holds_the_rows_to_forget_and_no_others(tmp_path, marked_file):
    rows = rows_of(marked_file, tmp_path / "run", {"search": SearchesMemory(INVERTED)})
    assert rows["search"]["details"]["rows"] == 40
    held = np.load(marked_file)["train_features"]
    assert len(marked_rows(INVERTED)) >= len(held) == 400  # the search does find rows that are there


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("exit", "ended with status 3"), ("kill", "killed (SIGKILL; the machine may have run out of memory)"),
        ("crash", "SIGSEGV"), ("junk", "cannot be read"), ("pickle", "cannot be read"),
        ("silent", "ended without a result"),
    ],
)  # fmt: skip
def test_a_process_that_dies_or_sends_junk_costs_its_row(tmp_path, marked_file, how, says):
    methods = {"dies": Dies(how), "after": Probe()}
    rows = rows_of(marked_file, tmp_path / "run", methods)
    assert says in rows["dies"]["error"]
    assert "error" not in rows["after"]


def test_a_method_that_no_other_process_can_import_runs_here_and_the_table_says_so(tmp_path, marked_file):
    from sfu.reporting.text_tables import run_markdown

    metrics = run(config_for(marked_file), tmp_path / "run", methods={"probe": Probe()})
    assert metrics["rows"]["probe"]["isolation"] == "none"
    assert (
        "Isolation was not enforced for probe: the system left this process, files, the network open"
        in run_markdown(metrics)
    )


SITE = {
    "top_level.py": """
        from dataclasses import dataclass

        from sklearn.datasets import load_digits

        from sfu.unlearning.base import UnlearningMethod
        from sfu.unlearning.result import UnlearningResult

        ROWS, LABELS = load_digits(return_X_y=True)


        @dataclass(frozen=True)
        class TopLevel(UnlearningMethod, name="top_level"):
            def unlearn(self, request, context, retained=None):
                return UnlearningResult(request.head, note=f"has {len(ROWS)} rows")
    """,
    "in_from_config.py": """
        from dataclasses import dataclass

        from sfu.data.load import load_dataset
        from sfu.unlearning.base import UnlearningMethod
        from sfu.unlearning.result import UnlearningResult


        @dataclass(frozen=True)
        class InFromConfig(UnlearningMethod, name="in_from_config"):
            rows: object = None

            @classmethod
            def from_config(cls, run, curvature, settings):
                return cls(load_dataset(run.dataset, 0).train_features_ND)

            def unlearn(self, request, context, retained=None):
                return UnlearningResult(request.head, note=f"has {len(self.rows)} rows")
    """,
    "waits.py": """
        import time
        from dataclasses import dataclass
        from pathlib import Path

        from sfu.unlearning.base import UnlearningMethod


        @dataclass(frozen=True)
        class Waits(UnlearningMethod, name="waits"):
            def unlearn(self, request, context, retained=None):
                context.report(1, 2)
                time.sleep(600)
    """,
    "searches.py": f"""
        from dataclasses import dataclass

        from sfu.unlearning.base import UnlearningMethod
        from tests.experiment.attacks import SearchesMemory


        @dataclass(frozen=True)
        class Searches(UnlearningMethod, name="searches"):
            def unlearn(self, request, context, retained=None):
                return SearchesMemory({INVERTED!r}).unlearn(request, context, retained)
    """,
}


def command(folder: Path, *arguments: str, prelude: str = "") -> subprocess.CompletedProcess[str]:
    """Run sfu with the plug-ins above installed, in a process of its own, after some Python code."""
    with command_started(folder, *arguments, prelude=prelude) as process:
        out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def command_started(folder: Path, *arguments: str, prelude: str = "", **more: str) -> subprocess.Popen[str]:
    """Start it, with more variables in its environment."""
    site = folder / "site"
    about = site / "careless-1.0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: careless\nVersion: 1.0\n")
    names = [name.removesuffix(".py") for name in SITE]
    (about / "entry_points.txt").write_text("[sfu.plugins]\n" + "".join(f"{name} = {name}\n" for name in names))
    for name, text in SITE.items():
        (site / name).write_text(textwrap.dedent(text))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), **more}
    start = f"{prelude}\nimport sys; sys.argv[0] = 'sfu'\nfrom sfu.cli.run import main\nmain()"
    return subprocess.Popen(
        [sys.executable, "-c", start, *arguments, "logger=none", "backbone=none", "evaluation.membership_splits=2"],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@enforced
@pytest.mark.slow
def test_data_loaded_as_a_module_is_imported_or_a_method_is_built_never_reach_a_row(tmp_path):
    done = command(
        tmp_path, "dataset=digits", "methods=[top_level,in_from_config,closed_form,retrained]", "hydra.run.dir=out"
    )
    assert done.returncode == 1
    rows = json.loads((tmp_path / "out" / "metrics.json").read_text())["rows"]
    for name in ("top_level", "in_from_config"):
        assert "Permission denied" in rows[name]["error"] or "SourceFreeError" in rows[name]["error"], rows[name]
        assert "distance" not in rows[name]
    assert 0 < rows["closed_form"]["distance"] < 1  # the plug-ins that failed cost nobody else
    assert "not enforced" not in done.stdout


@pytest.mark.slow
def test_a_failed_job_leaves_no_row_to_the_next(tmp_path, marked_file):
    done = command(
        tmp_path, "-m", "dataset=features", f"dataset.path={marked_file}", "loss=softmax", "head.max_iterations=1,200",
        "methods=[searches,retrained]", "hydra.sweep.dir=sweep",
    )  # fmt: skip
    assert "head.max_iterations=1" in done.stderr
    row = json.loads((tmp_path / "sweep" / "1" / "metrics.json").read_text())["rows"]["searches"]
    assert row["details"]["rows"] == 40


@pytest.mark.slow
def test_where_the_kernel_has_no_landlock_every_table_says_so(tmp_path):
    """A filter makes Landlock's system calls unknown, as on an older kernel."""
    unknown = """
import ctypes, platform
from sfu.isolation import sandbox
code = [(0x20, 0, 0, 0), (0x35, 0, 2, 444), (0x25, 1, 0, 446), (0x06, 0, 0, 0x50000 | 38), (0x06, 0, 0, 0x7FFF0000)]
lines = (sandbox._Instruction * 5)(*(sandbox._Instruction(*line) for line in code))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == libc.prctl(22, 2, ctypes.byref(sandbox._Program(5, lines)), 0, 0) == 0
"""
    done = command(tmp_path, "dataset=digits", "methods=[closed_form,retrained]", "hydra.run.dir=out", prelude=unknown)
    assert done.returncode == 0, done.stderr
    says = "Isolation was not enforced for closed_form: the system left files open"
    assert says in " ".join(done.stdout.split())
    assert says in (tmp_path / "out" / "table.md").read_text()
    row = json.loads((tmp_path / "out" / "metrics.json").read_text())["rows"]["closed_form"]
    assert row["isolation"] == "process, network"


def test_closed_paths_are_cut_out_of_what_may_be_read(tmp_path):
    for name in ("a/b/c/x", "a/b/y", "a/z", "d/w"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "a" / "link").symlink_to(tmp_path / "a" / "b" / "c")
    whole, split = split_around([tmp_path / "a", tmp_path / "d", tmp_path / "a" / "b" / "c"], [tmp_path / "a/b/c"])
    assert sorted(map(Path, whole)) == [tmp_path / "a/b/y", tmp_path / "a/z", tmp_path / "d"]
    assert sorted(map(Path, split)) == [tmp_path / "a", tmp_path / "a/b"]
    assert split_around([tmp_path / "a/b/c/x"], [tmp_path / "a"]) == ([], [])


def test_a_cached_row_tells_how_it_was_isolated(tmp_path, marked_file, monkeypatch):
    config = config_for(marked_file, reuse="always")
    config.methods = ["closed_form", "retrained"]
    first, second = (
        run(config, tmp_path / name, cache=open_cache(config, in_sweep=True))["rows"] for name in ("one", "two")
    )
    assert first["closed_form"] == second["closed_form"]
    assert first["retrained"]["isolation"] is None
    config.isolate = False
    third = run(config, tmp_path / "three", cache=open_cache(config, in_sweep=True))
    assert third["rows"]["closed_form"]["isolation"] == "none"  # what was not enforced is not taken for what was


def processes_with(mark: str) -> list[int]:
    """Processes whose environment holds the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_no_process_of_a_row_outlives_the_command(tmp_path, marked_file, how, code):
    mark = f"SFU_MARK={tmp_path}"
    name, _, value = mark.partition("=")
    arguments = ("dataset=features", f"dataset.path={marked_file}", "methods=[waits]", "hydra.run.dir=out")
    with command_started(tmp_path, *arguments, **{name: value}) as process:
        wait_for(lambda: len(processes_with(mark)) >= 3, 240)  # the command, the server, the row
        process.send_signal(how)
        process.communicate(timeout=240)
    assert process.returncode == code
    wait_for(lambda: not processes_with(mark), 5)


def wait_for(done: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
