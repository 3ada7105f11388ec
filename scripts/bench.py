"""Run all benchmarks one after another, and write what they say, with the environment, to one JSON file.

    python scripts/bench.py --quick                      # small problems, some minutes
    python scripts/bench.py --only training psd_fit --json bench.json

Each benchmark is a script of its own, which says what it compares and what the limit is; this one runs it with the
sizes below, shows its output, and keeps it. A benchmark that fails is told, and the others run. The rows that training
is compared on are made up, unless --path names a feature file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parent
PACKAGES = ("sfu", "torch", "numpy", "scipy", "scikit-learn", "cvxpy", "scs", "clarabel")


@dataclass(frozen=True)
class Benchmark:
    """A script, its arguments for problems of full size and for small ones, and what it sets ours beside."""

    script: str
    beside: str
    full: tuple[str, ...] = ()
    quick: tuple[str, ...] = ("--quick",)


BENCHMARKS = {
    "training": Benchmark(
        "bench_training.py", "scikit-learn's LogisticRegression and RidgeClassifier",
        ("PATH",), ("PATH", "--l2", "5e-4", "--losses", "softmax", "quadratic"),
    ),
    "psd_fit": Benchmark(
        "bench_psd_fit.py", "SCS through cvxpy and called directly, and Clarabel, at equal objective",
        ("--dimensions", "16", "64", "128", "--counts", "100", "1000", "--equal",
         "--solvers", "ours", "scs", "scs_direct", "clarabel"),
        ("--dimensions", "16", "32", "--counts", "100", "--equal", "--cases", "noise",
         "--solvers", "ours", "scs", "scs_direct", "clarabel", "--limit", "60"),
    ),
    "cost": Benchmark("bench_cost.py", "a warm retraining on the retained rows"),
    "scale": Benchmark("bench_scale.py", "what the operations and bytes of the formulas take at this machine's rates"),
    "stream": Benchmark("bench_stream.py", "the factorisation alone, and a step that decomposes the Hessian anew"),
    "shadows": Benchmark(
        "bench_shadows.py", "training each head from zero",
        (), ("--rows", "10000", "--features", "128", "--shadows", "32", "--direct", "1"),
    ),
    "kernels": Benchmark(
        "bench_kernels.py", "PyTorch's own convolutions, vmap and optimisers",
        (), ("--sizes", "32", "--rows", "64", "--repeats", "1", "--processes", "1"),
    ),
    "linearised": Benchmark(
        "bench_linearised.py", "a forward and backward pass of the same part of the network",
        (), ("--layers", "1", "--rows", "128", "--classes", "10", "--repeats", "1"),
    ),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small problems only")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--path", type=Path, help="a feature file to train on, as for dataset=features")
    parser.add_argument("--json", type=Path, default=Path("bench.json"), help="where the results go")
    given = parser.parse_args(arguments)
    results, failed = {}, []
    with tempfile.TemporaryDirectory() as folder:
        path = made_up(Path(folder)) if given.path is None else given.path
        for name in given.only:
            print(f"\n== {name}: beside {BENCHMARKS[name].beside}", flush=True)
            results[name] = run(BENCHMARKS[name], path, quick=given.quick)
            if results[name]["exit"] != 0:
                failed.append(name)
            write(given.json, {"quick": given.quick, "environment": environment(), "benchmarks": results})
    print(f"\nSaved in {given.json}." + (f" Failed: {', '.join(failed)}." if failed else ""))
    return 1 if failed else 0


def run(benchmark: Benchmark, path: Path, *, quick: bool) -> dict[str, object]:
    """Run a script, show its output as it comes, and return it with its exit status and seconds."""
    options = [str(path) if one == "PATH" else one for one in (benchmark.quick if quick else benchmark.full)]
    started, lines = time.perf_counter(), list[str]()
    command = [sys.executable, str(FOLDER / benchmark.script), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    shown = ["PATH" if one == str(path) else one for one in options]
    return {
        "script": benchmark.script, "options": shown, "beside": benchmark.beside, "exit": process.returncode,
        "seconds": time.perf_counter() - started, "output": lines,
    }  # fmt: skip


def made_up(folder: Path) -> Path:
    """Write a feature file of 20,000 rows of 128 features and 10 classes."""
    drawn = np.random.default_rng(0)
    teacher = drawn.standard_normal((128, 10))
    parts = {}
    for part, count in (("train", 20_000), ("test", 2_000)):
        rows = drawn.standard_normal((count, 128)) * np.logspace(0, -1.5, 128)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        outputs = rows @ teacher
        outputs += 0.3 * outputs.std() * drawn.standard_normal(outputs.shape)
        parts |= {f"{part}_features": rows.astype(np.float32), f"{part}_labels": outputs.argmax(1)}
    np.savez(folder / "rows.npz", **parts)
    return folder / "rows.npz"


def environment() -> dict[str, object]:
    """Return what the figures depend on."""
    import torch

    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return {
        "python": platform.python_version(), "system": platform.platform(), "processor": _processor(),
        "cores": os.cpu_count(), "threads": torch.get_num_threads(), "load": os.getloadavg()[0], "versions": found,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }  # fmt: skip


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def write(path: Path, results: dict[str, object]) -> None:
    """Write the results so far: a benchmark that is stopped loses none of those before it."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    raise SystemExit(main())
