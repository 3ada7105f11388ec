"""Time fit_psd beside cvxpy with SCS, Clarabel and CVXOPT, and SCS called directly, on the same problems.

Each solver runs in its own process with a time limit, so that memory is its own and one that hangs costs the limit
only. Seconds are of one cold call; imports and thread start-up are left out, modelling is not. With ``--rounds`` the
solvers take turns, and times are medians. With ``--equal`` SCS gets tenfold smaller tolerances until its objective,
after clipping eigenvalues, is within 1e-3 of ours: at its default tolerance it can be far above.
Every row states the problem, seconds, processor seconds, objective, smallest eigenvalue and peak memory; for ours also
the flops of its eigen-solves, factorisations and products, and its time over what they would take at the speed of a
large product here.

    python scripts/bench_psd_fit.py --dimensions 16 32 64 128 --counts 250 1000 --limit 300
    python scripts/bench_psd_fit.py --dimensions 64 --counts 1000 --solvers ours scs_direct --rounds 3 --equal
    python scripts/bench_psd_fit.py --dimensions 512 1024 --counts 1000 --solvers ours --json bench.json

Cases, with curvature eigenvalues 0.4 k^-1.5, like those of normalised image features, unless said otherwise:
    inactive  eigenvalues 0.2 to 0.4, no noise, trace-matched prior: X >= 0 does not bind where P is well below D^2 / 2
    noise     a tenth of a standard deviation of noise on the targets: X >= 0 binds
    trace     the same with a trace penalty (a prior of -1e-3 I)
    unmet     three standard deviations of noise: where P is large against D, no X >= 0 meets the targets
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sfu.curvature.psd_fit import LossMeasurements, fit_psd

CASES = ("inactive", "noise", "trace", "unmet")
SOLVERS = ("ours", "scs", "clarabel", "cvxopt", "scs_direct")
TIMES = ("seconds", "processor_seconds")
EQUAL = 1e-3
TOLERANCES = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9)
"""Of SCS; the first is its default."""


def make(case: str, count: int, dimension: int, seed: int) -> tuple[LossMeasurements, float, float]:
    """The measurements, the prior (a multiple of the identity), and its strength."""
    generator = torch.Generator().manual_seed(seed)
    if case == "inactive":
        eigenvalue_D = torch.linspace(0.2, 0.4, dimension, dtype=torch.float64)
    else:
        eigenvalue_D = 0.4 * torch.arange(1, dimension + 1, dtype=torch.float64).pow(-1.5)
    basis_DD = torch.linalg.qr(torch.randn(dimension, dimension, generator=generator, dtype=torch.float64)).Q
    delta_PD = torch.randn(count, dimension, generator=generator, dtype=torch.float64)
    target_P = (delta_PD @ basis_DD).square() @ eigenvalue_D / 2
    noise = {"inactive": 0.0, "noise": 0.1, "trace": 0.1, "unmet": 3.0}[case]
    noise_P = torch.randn(count, generator=generator, dtype=torch.float64)
    target_P = target_P + noise * target_P.std() * noise_P
    prior = {"inactive": float(eigenvalue_D.mean()), "trace": -1e-3}.get(case, 0.0)
    return LossMeasurements(delta_PD, target_P), prior, 1e-4 if case == "trace" else 1e-8


def solve_cvxpy(solver: str, measurements: LossMeasurements, prior: float, mu: float, eps: float) -> Tensor:
    cvxpy = importlib.import_module("cvxpy")
    count, size = measurements.delta_PD.shape
    delta_PD = measurements.delta_PD.numpy()
    rows = (delta_PD[:, :, None] * delta_PD[:, None, :]).reshape(count, -1) / 2
    value = cvxpy.Variable((size, size), PSD=True)
    residual = rows @ cvxpy.vec(value, order="C") - measurements.target_P.numpy()
    anchor = cvxpy.sum_squares(value - prior * torch.eye(size, dtype=torch.float64).numpy())
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(residual) / count + mu / 2 * anchor))
    problem.solve(solver=solver.upper(), **({"eps": eps} if solver == "scs" else {}))
    return torch.from_numpy(value.value)


def solve_scs_direct(measurements: LossMeasurements, prior: float, mu: float, eps: float) -> Tensor:
    """Variables svec(X) and the residual; the lower triangle by columns, off-diagonals times sqrt(2)."""
    scs, sp = importlib.import_module("scs"), importlib.import_module("scipy.sparse")
    count, size = measurements.delta_PD.shape
    delta_PD = measurements.delta_PD.numpy()
    column, row = np.triu_indices(size)
    scale = np.where(column == row, 1.0, np.sqrt(2.0))
    unknowns = len(row)
    rows = delta_PD[:, row] * delta_PD[:, column] * (scale / 2)
    matrix = sp.bmat([[sp.csc_matrix(rows), -sp.eye(count)], [-sp.eye(unknowns), None]], format="csc")
    data = {
        "P": sp.diags(np.r_[np.full(unknowns, mu), np.full(count, 2 / count)], format="csc"),
        "A": matrix,
        "b": np.r_[measurements.target_P.numpy(), np.zeros(unknowns)],
        "c": np.r_[np.where(column == row, -mu * prior, 0.0), np.zeros(count)],
    }
    cone = {"z": count, "s": [size]}
    solution = scs.SCS(data, cone, verbose=False, eps_abs=eps, eps_rel=eps).solve()["x"][:unknowns] / scale
    value = np.zeros((size, size))
    value[row, column] = value[column, row] = solution
    return torch.from_numpy(value)


class FlopCount(TorchDispatchMode):
    """Nominal flops of products (2 n m k), eigen-solves (9 n^3), Cholesky factorisations (n^3 / 3) and solves."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = {"products": 0.0, "eigen": 0.0, "cholesky": 0.0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("mm", "mv"):
            self.flops["products"] += 2.0 * args[0].numel() * (args[1].shape[1] if name == "mm" else 1)
        elif name == "_linalg_eigh":
            self.flops["eigen"] += 9.0 * args[0].shape[0] ** 3
        elif name == "linalg_cholesky_ex":
            self.flops["cholesky"] += args[0].shape[0] ** 3 / 3
        elif name == "cholesky_solve":
            self.flops["cholesky"] += 2.0 * args[0].numel() * args[1].shape[0]
        return func(*args, **(kwargs or {}))


def product_speed() -> float:
    """Flops a second of a 2048^3 float64 product, best of three."""
    left = torch.randn(2048, 2048, dtype=torch.float64)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        left @ left
        best = min(best, time.perf_counter() - started)
    return 2 * 2048**3 / best


def worker(options: argparse.Namespace) -> dict:
    """Run one solver on one problem in this process."""
    torch.set_num_threads(options.threads)
    measurements, prior, strength = make(options.case, options.count, options.dimension, options.seed)
    mu = options.mu
    for module in {"ours": (), "scs_direct": ("scs", "scipy.sparse")}.get(options.worker, ("cvxpy",)):
        importlib.import_module(module)
    fit_psd(make("unmet", 8, 4, 0)[0])  # the libraries' own start-up
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    extra: dict = {}
    if options.worker == "ours":
        started, processor = time.perf_counter(), time.process_time()
        result = fit_psd(measurements, prior=prior, prior_strength=strength)
        seconds, processor = time.perf_counter() - started, time.process_time() - processor
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        value_DD, mu = result.value_DD, result.mu
        with FlopCount() as count:
            fit_psd(measurements, prior=prior, prior_strength=strength)
        limit = sum(count.flops.values()) / product_speed()
        extra = {
            "algorithm": result.algorithm,
            "iterations": result.iterations,
            "gap": result.gap,
            "gigaflops": {name: round(value / 1e9, 3) for name, value in count.flops.items()},
            "limit_seconds": limit,
            "over_limit": seconds / limit,
        }
    else:
        started, processor = time.perf_counter(), time.process_time()
        if options.worker == "scs_direct":
            value_DD = solve_scs_direct(measurements, prior, mu, options.eps)
        else:
            value_DD = solve_cvxpy(options.worker, measurements, prior, mu, options.eps)
        seconds, processor = time.perf_counter() - started, time.process_time() - processor
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    eye_DD = torch.eye(options.dimension, dtype=torch.float64)

    def objective(matrix_DD: Tensor) -> float:
        return float(measurements.mean_square(matrix_DD) + mu / 2 * (matrix_DD - prior * eye_DD).square().sum())

    eigenvalue_D, vector_DD = torch.linalg.eigh((value_DD + value_DD.T) / 2)
    return {
        "seconds": seconds,
        "processor_seconds": processor,
        "eps": options.eps,
        "objective": objective(value_DD),
        "objective_clipped": objective((vector_DD * eigenvalue_D.clamp(min=0)) @ vector_DD.T),
        "min_eigenvalue": float(eigenvalue_D[0]),
        "mu": mu,
        "peak_mb": peak / 1024,
        "peak_above_start_mb": (peak - memory) / 1024,
        **extra,
    }


def run(solver: str, case: str, count: int, dimension: int, ours: dict, options: argparse.Namespace) -> dict:
    """Run one solver, SCS at the tolerance that ``--equal`` asks for; a row in any case."""
    tolerances = TOLERANCES if options.equal and solver in ("scs", "scs_direct") else TOLERANCES[:1]
    for eps in tolerances:
        row = run_once(solver, case, count, dimension, ours.get("mu", 0.0), eps, options)
        if "failure" in row or row["objective_clipped"] <= (1 + EQUAL) * ours.get("objective", 0.0):
            break
    return row


def run_once(
    solver: str, case: str, count: int, dimension: int, mu: float, eps: float, options: argparse.Namespace
) -> dict:
    """Run one solver at one tolerance in a process of its own."""
    command = [sys.executable, __file__, "--worker", solver, "--case", case, "--count", str(count)]
    command += ["--dimension", str(dimension), "--mu", repr(mu), "--eps", repr(eps)]
    command += ["--threads", str(options.threads), "--seed", str(options.seed)]
    row = {"case": case, "dimension": dimension, "count": count, "solver": solver, "threads": options.threads}
    threads = {name: str(options.threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.limit, env=environment)
    except subprocess.TimeoutExpired:
        return row | {"failure": f"over {options.limit:.0f} s"}
    if done.returncode != 0:
        return row | {"failure": (done.stderr.strip().splitlines() or ["killed"])[-1][:60]}
    return row | json.loads(done.stdout.strip().splitlines()[-1])


def show(row: dict, ours: dict | None) -> None:
    head = f"{row['case']:9s} {row['dimension']:5d} {row['count']:5d} {row['solver']:10s}"
    if "failure" in row:
        print(f"{head} {row['failure']}", flush=True)
        return
    text = f"{head} {row['seconds']:9.3f} s ({row['processor_seconds']:.3f} of a core)"
    text += f"  objective {row['objective']:.8e}  clipped {row['objective_clipped']:.8e}"
    text += f"  min eig {row['min_eigenvalue']:+.1e}  peak {row['peak_mb']:.0f} (+{row['peak_above_start_mb']:.0f}) MB"
    if row["solver"] == "ours":
        flops = sum(row["gigaflops"].values())
        text += f"  {row['algorithm']} {row['iterations']} steps, gap {row['gap']:.0e}, {flops:.1f} GF, "
        text += f"{row['over_limit']:.1f} x limit"
    elif ours is not None and "seconds" in ours:
        text += f"  {row['seconds'] / ours['seconds']:.1f} x ours, eps {row['eps']:.0e}"
    print(text, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dimensions", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--counts", type=int, nargs="+", default=[250, 1000])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--solvers", nargs="+", choices=SOLVERS, default=list(SOLVERS))
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a solver may take on a problem")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1, help="times each solver runs, in turns; times are medians")
    parser.add_argument("--equal", action="store_true", help="run SCS at a tolerance that gives our objective")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--worker", choices=SOLVERS, help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--dimension", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--mu", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--eps", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(case: str, count: int, dimension: int, options: argparse.Namespace) -> list[dict]:
    """Run the solvers in turns and show the median row of each."""
    # ours runs first in any case: its mu defines the problem the others get
    ours = run("ours", case, count, dimension, {}, options)
    rounds: dict[str, list[dict]] = {"ours": [ours]}
    for turn in range(options.rounds):
        for solver in options.solvers if "mu" in ours else ["ours"]:
            if turn == 0:
                row = ours if solver == "ours" else run(solver, case, count, dimension, ours, options)
            else:
                eps = rounds[solver][0].get("eps", TOLERANCES[0])
                row = run_once(solver, case, count, dimension, ours.get("mu", 0.0), eps, options)
            rounds[solver] = [*rounds.get(solver, [])[:turn], row]
    rows = []
    for solver in options.solvers:
        if solver in rounds:
            rows.append(median(rounds[solver]))
            show(rows[-1], median(rounds["ours"]))
    return rows


def median(rows: list[dict]) -> dict:
    """The first row, with the median times of all, or the failure of one."""
    failed = [row for row in rows if "failure" in row]
    times = {} if failed else {key: statistics.median(row[key] for row in rows) for key in TIMES}
    return (failed or rows)[0] | times


def main() -> None:
    options = parse()
    if options.worker:
        print(json.dumps(worker(options)))
        return
    print(
        f"threads {options.threads} of {os.cpu_count()} cores, limit {options.limit:.0f} s, torch {torch.__version__}"
    )
    rows = []
    for dimension in options.dimensions:
        for count in options.counts:
            for case in options.cases:
                rows += compare(case, count, dimension, options)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
