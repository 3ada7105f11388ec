"""Measure each stage of a run at several sizes, beside what the formulas of docs/scale.md expect.

    OMP_NUM_THREADS=1 python scripts/bench_scale.py --out scale.json     # some minutes, 2 GiB
    python scripts/bench_scale.py --quick                                # three small runs
    python scripts/bench_scale.py --rows 400000 --features 256 --classes 10 --loss softmax

The rows are made up. Every size is run in a process of its own, with the source-free rows in the same process, and
three sizes once more as ``sfu`` runs them. It prints processor seconds, the number of operations and bytes of the
formulas, the seconds that these take at the rates of this machine, measured in the same run (float64 products, and
conversions of rows), and the ratio. ``--out`` writes the same as JSON, with the environment.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from sfu import __version__
from sfu.cli.commands import compose_settings
from sfu.experiment import prepare, rows
from sfu.experiment.context import RunContext
from sfu.experiment.estimate import PROGRAM_BYTES, sizes_of, stages_of
from sfu.experiment.pipeline import run
from sfu.experiment.resources import measured
from sfu.experiment.work import Rates, Stage
from sfu.unlearning.rows import make_methods

CPU = torch.device("cpu")
WHERE = {"digests": "training"}
"""Stages of the formulas that are measured as part of another."""


class Case(NamedTuple):
    """N rows (a tenth of them to forget, a fifth as many to test), D features, C classes, P losses of the fit."""

    rows: int
    features: int
    classes: int
    loss: str = "quadratic"
    perturbations: int = 500
    whole: bool = False


WARM = Case(400, 16, 3, perturbations=20)
QUICK = [Case(4000, 64, 10), Case(4000, 64, 10, "softmax"), Case(8000, 64, 10, whole=True)]
GRID = [
    # N
    Case(10_000, 256, 10), Case(40_000, 256, 10), Case(160_000, 256, 10),
    # D
    Case(20_000, 64, 10), Case(20_000, 512, 10), Case(10_000, 1024, 10), Case(10_000, 2048, 10, perturbations=100),
    # C
    Case(20_000, 128, 2), Case(20_000, 128, 100), Case(20_000, 64, 1000, perturbations=50),
    # P
    Case(10_000, 64, 10, perturbations=1000), Case(10_000, 64, 10, perturbations=2000),
    # losses
    Case(20_000, 64, 10, "softmax"), Case(40_000, 256, 10, "softmax", 50), Case(10_000, 64, 100, "softmax", 50),
    Case(20_000, 256, 10, "logistic"),
    # as sfu runs them
    Case(20_000, 256, 10, whole=True), Case(50_000, 512, 10, whole=True), Case(20_000, 64, 10, "softmax", whole=True),
]  # fmt: skip


def write_rows(case: Case, path: Path) -> None:
    """Write rows of norm 1 whose spectrum decays, with labels of a noisy linear teacher."""
    drawn = np.random.default_rng(0)
    count = case.rows + case.rows // 5
    rows_ND = drawn.standard_normal((count, case.features), dtype=np.float32)
    rows_ND *= np.arange(1, case.features + 1, dtype=np.float32) ** -0.5
    rows_ND /= np.linalg.norm(rows_ND, axis=1, keepdims=True)
    teacher_DC = drawn.standard_normal((case.features, case.classes), dtype=np.float32)
    labels_N = np.empty(count, np.int64)
    for first in range(0, count, 8192):
        outputs = 20 * rows_ND[first : first + 8192] @ teacher_DC
        labels_N[first : first + 8192] = (outputs + drawn.gumbel(size=outputs.shape)).argmax(1)
    labels_N[: case.classes] = np.arange(case.classes)
    cut = case.rows
    np.savez(path, train_features=rows_ND[:cut], train_labels=labels_N[:cut],
             test_features=rows_ND[cut:], test_labels=labels_N[cut:])  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, help="one size instead of the grid")
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--loss", default="quadratic")
    parser.add_argument("--perturbations", type=int, default=500)
    parser.add_argument("--whole", action="store_true", help="as sfu runs it, rows in processes of their own")
    parser.add_argument("--quick", action="store_true", help="three small runs")
    parser.add_argument("--out", type=Path, help="write JSON")
    given = parser.parse_args(arguments)
    cases = QUICK if given.quick else GRID
    if given.rows:
        cases = [Case(given.rows, given.features, given.classes, given.loss, given.perturbations, given.whole)]
    about = environment()
    print(" ".join(f"{key}={value}" for key, value in about.items()))
    found = []
    for case in cases:
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # its peak of memory is its own
            one = pool.apply(measure_whole if case.whole else measure_stages, (case,))
        found.append(one)
        print(table(one), flush=True)
    if given.out:
        given.out.write_text(json.dumps({"environment": about, "runs": found}, indent=2) + "\n", encoding="utf-8")
    return 0


def environment() -> dict[str, Any]:
    return {
        "sfu": __version__, "torch": torch.__version__, "python": platform.python_version(),
        "cpu": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def prepared(case: Case, folder: Path, *, isolate: bool) -> RunContext:
    (folder / "heads").mkdir()
    write_rows(case, folder / "rows.npz")
    settings = [
        f"loss={case.loss}", f"curvature.perturbations={case.perturbations}", "logger=none",
        "dataset=features", f"dataset.path={folder / 'rows.npz'}", f"isolate={isolate}", "head.l2=5e-4", "reuse=never",
    ]  # fmt: skip
    config = compose_settings(settings)
    config.methods = ["original", "retrained", "unlearned_plus", "closed_form", "unlearned_minus_paper"]
    return RunContext(config, folder, make_methods(config))


def measure_stages(case: Case) -> dict[str, Any]:
    """Run the stages one after the other in this process."""
    if case.rows > WARM.rows:
        measure_stages(WARM._replace(loss=case.loss))  # what is imported on first use
    with tempfile.TemporaryDirectory() as name:
        context = prepared(case, Path(name), isolate=False)
        seconds: dict[str, float] = {}
        peaks: dict[str, float] = {}
        clock = [time.process_time()]

        def finished(stage: str, _: float) -> None:
            now = time.process_time()
            seconds[stage], clock[0] = now - clock[0], now
            if stage in context.results:
                peaks[stage] = context.results[stage].usage.peak_memory_mb or 0.0

        def timed(stage: str, work: Callable[[RunContext], object]) -> None:
            clock[0] = time.process_time()
            with measured(CPU) as usage:
                work(context)
            finished(stage, usage.seconds)
            peaks[stage] = usage.peak_memory_mb or 0.0

        context.on_stage = finished
        timed("first load", prepare.load)
        prepare.choose_forget_set(context)
        rates = Rates.measured(CPU, time.process_time)
        sizes = sizes_of(context.data, context.split, context.config)
        stages, _ = stages_of(context.config, sizes, context.methods, CPU)
        timed("training", prepare.train)
        prepare.discard(context)
        clock[0] = time.process_time()
        rows.run_source_free_rows(context)
        timed("load", prepare.reload)
        clock[0] = time.process_time()
        rows.run_rows_with_data(context)
        timed("evaluate", lambda one: attempt(rows.evaluate, one))
        seconds["evaluate"] += seconds.pop("attack", 0.0)
    return told(case, rates, stages, seconds, peaks)


def attempt(work: Callable[[RunContext], object], context: RunContext) -> None:
    context.on_stage = lambda name, seconds: None
    work(context)


def told(
    case: Case, rates: Rates, stages: Sequence[Stage], seconds: dict[str, float], peaks: dict[str, float]
) -> dict[str, Any]:
    lines = []
    for name in dict.fromkeys(WHERE.get(stage.name, stage.name) for stage in stages):
        own = [stage for stage in stages if WHERE.get(stage.name, stage.name) == name]
        lines.append({
            "stage": name,
            "gflop": sum(piece.flops + piece.solved for stage in own for piece in stage.work) / 1e9,
            "gbyte": sum(piece.read + piece.moved for stage in own for piece in stage.work) / 1e9,
            "expected_seconds": sum(map(rates.seconds, own)),
            "seconds": seconds.get(name, math.nan),
            "expected_mib": (PROGRAM_BYTES + max(stage.size for stage in own)) / 2**20,
            "peak_mib": peaks.get(name),
        })  # fmt: skip
    return {"case": case._asdict(), "rates": asdict(rates), "stages": lines}


def measure_whole(case: Case) -> dict[str, Any]:
    """Run what ``sfu`` would run, and compare the whole with its estimate."""
    with tempfile.TemporaryDirectory() as name:
        context = prepared(case, Path(name), isolate=True)
        found = run(context.config, Path(name), show_progress=False)
    about = found["run"]
    line = {
        "stage": "whole run", "expected_seconds": about["expected"]["seconds"], "seconds": about["seconds"],
        "expected_mib": about["expected"]["memory_mb"],
        "peak_mib": max(row["peak_memory_mb"] or 0.0 for row in found["rows"].values()),
    }  # fmt: skip
    return {"case": case._asdict(), "rates": asdict(Rates.measured(CPU)), "stages": [line]}


def table(found: dict[str, Any]) -> str:
    case, rates = Case(**found["case"]), found["rates"]
    lines = [
        f"\nN = {case.rows:,}, D = {case.features}, C = {case.classes}, {case.loss}, P = {case.perturbations}; "
        f"{rates['flops'] / 1e9:.0f} GFLOP/s, {rates['bandwidth'] / 1e9:.1f} GB/s",
        f"{'stage':22s} {'GFLOP':>8s} {'GB':>7s} {'expected':>9s} {'measured':>9s} {'ratio':>6s}"
        f" {'MiB':>7s} {'peak':>7s}",
    ]
    for one in found["stages"]:
        ratio = one["seconds"] / max(one["expected_seconds"], 1e-9)
        lines.append(
            f"{one['stage']:22s} {one.get('gflop', math.nan):8.1f} {one.get('gbyte', math.nan):7.2f} "
            f"{one['expected_seconds']:9.3f} "
            f"{one['seconds']:9.3f} {ratio:6.2f} {one['expected_mib']:7.0f} {one['peak_mib'] or math.nan:7.0f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
