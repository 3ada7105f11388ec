"""Kill ``sfu-unlearn --apply`` at random moments, and check that it leaves the old state or the complete new one.

    python scripts/kill_unlearn.py --kills 100

Each kill forks a process that serves a request from a checkpoint, to a new folder or in place, and sends it SIGKILL: at
a random moment of its run, at one while it writes, or as soon as the new state can be seen. Then it checks that

- the folder is as it was, or complete: every file has the digest that the last record names, and the chain is whole,
- the same command, given again, ends well, and leaves no hidden folder.

The exit code is 1 if a check failed. It needs ``os.fork``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from sfu.cli.unlearn import main as sfu_unlearn
from sfu.heads.files import load_head
from sfu.records.chain import verify

_N_TRAIN, _ROWS, _WIDTH = 400, 40, 12
_SIDE = 1000  # of another layer, so that writing takes a while
_SECONDS = 0.3  # a run without imports takes about as long


def make_files(folder: Path) -> list[str]:
    """Write a checkpoint, how it was trained and two files of rows; return the arguments of a first request."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(_N_TRAIN, _WIDTH, generator=generator).double()
    labels = (features @ torch.randn(_WIDTH, 4, generator=generator).double()).argmax(1)
    targets = torch.nn.functional.one_hot(labels, 4).double()
    gram = features.T @ features / _N_TRAIN + 1e-2 * torch.eye(_WIDTH).double()
    weight = torch.linalg.solve(gram, features.T @ targets / _N_TRAIN).T
    torch.save({"body": torch.randn(_SIDE, _SIDE), "fc.weight": weight.contiguous()}, folder / "model.pt")
    about = {
        "n_train": _N_TRAIN, "loss": {"name": "quadratic", "target_scale": 1.0}, "l2": 1e-2, "trained": "optimum",
    }  # fmt: skip
    (folder / "training.json").write_text(json.dumps(about))
    for number, name in enumerate(("first", "second")):
        part = slice(_ROWS * number, _ROWS * (number + 1))
        np.savez(folder / f"{name}.npz", features=features[part].numpy(), labels=labels[part].numpy())
    training = str(folder / "training.json")
    return [str(folder / "model.pt"), str(folder / "first.npz"), "--layer", "fc", "--training", training, "--apply"]


def run(arguments: list[str]) -> int:
    """Return the exit code of the command, whose output goes nowhere."""
    child = start(arguments)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def start(arguments: list[str]) -> int:
    """Fork a process that runs the command; return its number."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            sfu_unlearn(arguments)
            code = 0
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        finally:
            os._exit(code)
    return child


def visible(folder: Path) -> dict[str, bytes]:
    """Return the content of all files but those of locks and hidden folders."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if not name.startswith(".")}


def one_kill(number: int, root: Path, given: list[str], draw: random.Random) -> str:
    """Kill one process; return what it left, which begins with ``WRONG`` if a check failed."""
    in_place, moment = number % 2 == 1, number // 2 % 3
    place = root / f"kill-{number}"
    place.mkdir()
    target, hidden = place / "new", place / ".new.unfinished"
    arguments, record = [*given, "--out", str(target)], target / "record-1.json"
    if in_place:
        shutil.copytree(root / "origin", target)
        keep = ["--keep-old"] * (number % 4 == 3)
        arguments = [str(target), str(root / "second.npz"), "--in-place", "--apply", *keep]
        record = target / "record-2.json"
    before, began, child = visible(place), time.perf_counter(), start(arguments)
    if moment > 0:
        _wait_for(hidden if moment == 1 else record)
    seconds = time.perf_counter() - began
    time.sleep((draw.uniform(0, _SECONDS), draw.uniform(0, seconds / 2), 0)[moment])
    os.kill(child, signal.SIGKILL)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    left = "old state" if visible(place) == before else "new state"
    n_train = _N_TRAIN - _ROWS * (1 + in_place)
    wrong = left == "new state" and not _is_complete(target, n_train)
    wrong |= run(arguments) != 0 or not _is_complete(target, n_train) or hidden.exists()
    shutil.rmtree(place)
    how = f"{'in place' if in_place else 'new folder'}, {'killed' if killed else 'had ended'}: {left}"
    return f"WRONG {number}: {how}" if wrong else how


def _wait_for(path: Path) -> None:
    end = time.perf_counter() + 60
    while not path.exists() and time.perf_counter() < end:
        time.sleep(1e-4)


def _is_complete(folder: Path, n_train: int) -> bool:
    found = verify([folder])
    return not found.problems and not found.remarks and load_head(folder / "head").n_train == n_train


def main(arguments: list[str] | None = None) -> int:
    """Kill, print counts, and return 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    draw = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        first = make_files(root)
        if run([*first, "--out", str(root / "origin")]) != 0:
            print("The first request failed, so nothing can be killed.")
            return 1
        counts = Counter(one_kill(number, root, first, draw) for number in range(given.kills))
    for how, count in sorted(counts.items()):
        print(f"{count:>5}  {how}")
    return int(any(how.startswith("WRONG") for how in counts))


if __name__ == "__main__":
    raise SystemExit(main())
