"""Kill runs, sweeps and extractions at random moments, and check what they leave.

    python scripts/kill_runs.py --kills 100

Each kill starts a command in a process of its own, with an empty cache, and sends it SIGKILL, SIGTERM or SIGINT (to its
whole process group, as a terminal does). Then it checks that

- every process that the command has started is gone within 5 s of its end,
- sfu reads no run as running, and after SIGTERM and SIGINT no ``status.json`` says so,
- the exit code is 143 after SIGTERM and 130 after SIGINT, if a run is under way,
- the same command, started again with the same folder and cache, ends with the bits of an undisturbed one: all of
  metrics.json but times, all heads, and all features.

It needs /proc. The exit code is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

GONE_SECONDS, END_SECONDS = 5.0, 60.0
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
UNLIKE = ("seconds", "peak_memory_mb", "fit_seconds", "started", "reused", "name", "overrides")
MARK = "SFU_KILL_MARK"
QUICK = ("evaluation.membership_splits=2", "threads=1", "reuse=always")


@dataclass(frozen=True)
class Case:
    """A command, and the same one for the second run, which runs in this process."""

    module: str
    arguments: tuple[str, ...]
    again: tuple[str, ...]
    folder_key: str = ""

    def command(self, folder: Path) -> list[str]:
        return [sys.executable, "-m", self.module, *self.arguments, *self._to(folder)]

    def repeat(self, folder: Path, cache: Path) -> int:
        """Run the command in this process; return its exit code."""
        return call(self.module, [*self.again, *self._to(folder)], cache)

    def _to(self, folder: Path) -> list[str]:
        return [f"{self.folder_key}={folder}"] if self.folder_key else []


@dataclass
class Kill:
    """What one kill has shown."""

    case: str
    signal: str
    seconds: float
    code: int = 0
    done: bool = False
    problems: list[str] = field(default_factory=list)


def call(module: str, arguments: list[str], cache: Path) -> int:
    """Run ``sfu`` or ``sfu-features`` in this process; return its exit code."""
    from hydra.core.global_hydra import GlobalHydra

    from sfu.cli import features, run

    GlobalHydra.instance().clear()
    os.environ["SFU_CACHE"] = str(cache)
    os.environ.pop("HYDRA_FULL_ERROR", None)
    sys.argv = ["sfu", *arguments]
    silent = io.StringIO()
    try:
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            run.main() if module == "sfu" else features.main(arguments)
    except SystemExit as stop:
        if stop.code:
            print(silent.getvalue(), file=sys.stderr)
        return int(stop.code or 0)
    return 0


def content(folder: Path, cache: Path) -> dict[str, Any]:
    """All that must be the same after a second run: numbers, heads and features."""
    found: dict[str, Any] = {}
    for path in folder.rglob("metrics.json"):
        found[str(path.relative_to(folder))] = bare(json.loads(path.read_text()))
    for path in folder.rglob("heads/*.safetensors"):
        found[str(path.relative_to(folder))] = path.read_bytes()
    for path in (cache / "features").rglob("features.safetensors"):
        found[str(path.relative_to(cache))] = path.read_bytes()
    return found


def bare(value: Any) -> Any:
    """Metrics without times, sizes and what came from the cache."""
    if isinstance(value, dict):
        return {key: bare(item) for key, item in value.items() if key not in UNLIKE}
    return [bare(item) for item in value] if isinstance(value, list) else value


def marked(mark: str) -> list[int]:
    """The processes whose environment holds a mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def kill(case: Case, name: str, how: str, seconds: float, folder: Path, cache: Path) -> Kill:
    """Start the command, send the signal after so many seconds, and look at what is left."""
    from sfu.results.run_folder import read_run, run_folders

    mark, about = uuid4().hex, Kill(name, how, seconds)
    environment = {**os.environ, MARK: mark, "SFU_CACHE": str(cache)}
    process = subprocess.Popen(
        case.command(folder), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    about.done = process.poll() is not None
    number = getattr(signal, how)
    if not about.done and how == "SIGINT":
        os.killpg(process.pid, number)
    elif not about.done:
        process.send_signal(number)
    try:
        about.code = process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        about.problems.append(f"it did not end within {END_SECONDS:g} s")
        process.kill()
        process.wait()
    end = time.monotonic() + GONE_SECONDS
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in left:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        about.problems.append(f"process {pid} lives: {command[:120]}")
        os.kill(pid, signal.SIGKILL)
    runs = [read_run(path) for path in run_folders(folder)] if folder.exists() else []
    about.problems += [f"{run.folder.name} reads as running" for run in runs if run.state == "running"]
    if how != "SIGKILL":
        records = [json.loads((run.folder / "status.json").read_text()) for run in runs]
        about.problems += [f"{record['job']} stays running" for record in records if record["state"] == "running"]
    under_way = bool(runs) and any(run.state != "finished" for run in runs)  # else it was starting or exiting
    ignored = about.code == 0 and not about.done
    unlike = about.code not in (0, 128 + number) and ((how != "SIGKILL" and under_way) or about.code != -number)
    if ignored or unlike:
        about.problems.append(f"exit code {about.code}")
    return about


def cases(images: Path) -> dict[str, Case]:
    run = ("methods=[original,retrained,unlearned_minus,closed_form]", *QUICK)
    sweep = ("-m", "seed=0,1,2", "methods=[original,retrained,closed_form]", "logger=none", *QUICK)
    extract = ("extract", "dataset=image_folder", f"dataset.path={images}", "backbone=pixels", "backbone.batch_size=64")
    return {
        "run": Case("sfu", run, (*run, "logger=none"), "hydra.run.dir"),
        "sweep": Case("sfu", (*sweep, "launcher=local_2"), sweep, "hydra.sweep.dir"),
        "extraction": Case("sfu.cli.features", extract, extract),
    }


def write_images(folder: Path, count: int = 5000) -> Path:
    """A folder of noise in two classes, which makes three chunks of features."""
    import numpy as np
    from PIL import Image

    drawn = np.random.default_rng(0)
    for index in range(count):
        path = folder / ("train" if index % 10 else "test") / f"class-{index % 2}" / f"{index:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(drawn.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(path)
    return folder


def undisturbed(case: Case, root: Path) -> tuple[float, dict[str, Any]]:
    """Run a command to its end in a process of its own; return its seconds and what it leaves."""
    folder, cache = root / "folder", root / "cache"
    started = time.monotonic()
    environment = {**os.environ, "SFU_CACHE": str(cache)}
    subprocess.run(case.command(folder), env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started, content(folder, cache)


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each kill and a table at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--signals", nargs="+", default=SIGNALS, choices=SIGNALS)
    given = parser.parse_args(arguments)
    drawn, counts, bad = random.Random(given.seed), Counter[tuple[str, str, str]](), 0
    os.environ.pop("HYDRA_FULL_ERROR", None)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # children of a shell's background job would ignore it
    with tempfile.TemporaryDirectory(prefix="sfu-kills-") as place:
        root = Path(place)
        for kind in ("CACHE", "DATA", "CONFIG"):
            os.environ[f"WANDB_{kind}_DIR"] = str(root / "wandb")
        found = cases(write_images(root / "images"))
        references = {}
        for name, case in found.items():
            references[name] = undisturbed(case, root / name)
            print(f"{name}: {references[name][0]:.1f} s undisturbed", flush=True)
        for number in range(given.kills):
            name, how = list(found)[number % len(found)], given.signals[number // len(found) % len(given.signals)]
            seconds, expected = references[name]
            folder, cache = root / "killed" / "folder", root / "killed" / "cache"
            about = kill(found[name], name, how, drawn.uniform(0.2, 0.95) * seconds, folder, cache)
            if found[name].repeat(folder, cache) != 0:
                about.problems.append("the second run fails")
            else:
                ends = content(folder, cache)
                unlike = [name for name in {**expected, **ends} if ends.get(name) != expected.get(name)]
                about.problems += [f"{name} has other bits after the second run" for name in unlike]
            shutil.rmtree(root / "killed")
            bad += bool(about.problems)
            for what in ("kills", *(["done before"] if about.done else []), *(["bad"] if about.problems else [])):
                counts[name, how, what] += 1
            print(
                f"{number + 1:3d} {name:10s} {how:7s} after {about.seconds:5.2f} s: exit code {about.code:4d}"
                + "".join(f"; {problem}" for problem in about.problems),
                flush=True,
            )
    print(f"\n{'':10s} {'':7s} kills  done before  bad")
    for name in found:
        for how in given.signals:
            kills, done, wrong = (counts[name, how, what] for what in ("kills", "done before", "bad"))
            print(f"{name:10s} {how:7s} {kills:5d} {done:12d} {wrong:4d}")
    print(f"{given.kills - bad} of {given.kills} kills passed every check.")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
