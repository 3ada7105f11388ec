"""Compare the default step with a warm retraining on the same rows: seconds of processor time, side by side in one run.

    OMP_NUM_THREADS=1 python scripts/bench_cost.py [--quick]

Rows are made up: N rows of norm 1 whose spectrum decays, classes from a noisy linear teacher. A head is trained to its
optimum, N_f rows are drawn at random, and the step with default settings (source-free) is timed, then a retraining on
the other rows that starts at the head: sfu's Newton method with conjugate gradients (:mod:`sfu.heads.newton_cg`), to
--tolerance; under the quadratic loss the quicker of that and the normal equations. The script exits with 1 if a step
took longer than --limit times the retraining and longer than --least seconds. Below that, the calls of five folds cost
more than the sums in them, so a step is the slower one however it is computed. The problems are corners of 2 to 1,000
classes, 64 to 4,096 features, and 20 to 20,000 rows to forget; most of the time goes into training
the heads. --quick takes small problems only.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sfu import LinearHead, unlearn
from sfu.heads.exact import train_exact
from sfu.heads.newton_cg import minimize
from sfu.losses.base import make_loss


class Case(NamedTuple):
    """A problem: N rows of C classes and D features, N_f of them to forget, and what else shows curvature."""

    loss: str
    classes: int
    features: int
    rows: int
    forget: int
    views: int = 0
    unlabelled: int = 0


QUICK = [
    Case("quadratic", 2, 64, 2000, 20), Case("quadratic", 10, 256, 4000, 400), Case("softmax", 2, 64, 2000, 20),
    Case("softmax", 10, 256, 4000, 400), Case("softmax", 100, 64, 4000, 400),
]  # fmt: skip
GRID = [
    *QUICK,
    # many rows to forget
    Case("quadratic", 2, 64, 200_000, 20_000), Case("quadratic", 10, 256, 200_000, 20_000),
    Case("quadratic", 100, 64, 200_000, 20_000), Case("softmax", 2, 64, 200_000, 20_000),
    Case("softmax", 10, 128, 50_000, 5000),
    # few
    Case("quadratic", 1000, 64, 20_000, 20), Case("quadratic", 2, 4096, 10_000, 20),
    Case("quadratic", 100, 4096, 10_000, 200), Case("softmax", 1000, 64, 20_000, 20),
    Case("softmax", 2, 4096, 10_000, 20), Case("softmax", 100, 4096, 10_000, 200),
    Case("softmax", 2, 768, 20_000, 71), Case("softmax", 1000, 768, 20_000, 71),
    # between
    Case("quadratic", 2, 512, 50_000, 5000), Case("quadratic", 10, 1024, 50_000, 500),
    Case("quadratic", 10, 1024, 50_000, 5000), Case("quadratic", 1000, 512, 20_000, 2000),
    Case("softmax", 10, 512, 20_000, 500), Case("softmax", 10, 512, 20_000, 2000),
    Case("softmax", 1000, 256, 20_000, 2000),
    # views and unlabelled rows
    Case("quadratic", 10, 512, 20_000, 500, unlabelled=1000),
    Case("quadratic", 10, 512, 20_000, 500, unlabelled=10_000), Case("quadratic", 10, 512, 20_000, 500, views=3),
    Case("softmax", 10, 64, 20_000, 500, unlabelled=1000), Case("softmax", 10, 512, 20_000, 500, views=3),
    Case("softmax", 10, 512, 20_000, 500, unlabelled=1000), Case("softmax", 100, 256, 20_000, 500, unlabelled=1000),
]  # fmt: skip


class Timed(NamedTuple):
    """Processor seconds of both, and how the step was computed."""

    step: float
    retraining: float
    how: str


def made_rows(classes: int, features: int, count: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    scales = torch.arange(1, features + 1) ** -0.5
    rows_ND = torch.randn(count, features, generator=drawn) * scales
    rows_ND = rows_ND / rows_ND.norm(dim=1, keepdim=True)
    outputs_NC = 20 * rows_ND @ torch.randn(features, classes, generator=drawn)
    noise_NC = -torch.rand(count, classes, generator=drawn).clamp(min=1e-9).log().neg().log()  # Gumbel
    return rows_ND, (outputs_NC + noise_NC).argmax(1)


def timed(work: Callable[[], object]) -> tuple[object, float]:
    start = time.process_time()
    return work(), time.process_time() - start


def compare(case: Case, l2: float, tolerance: float) -> Timed:
    classes, features, count = case.classes, case.features, case.rows
    loss = make_loss(case.loss)
    every_row, every_label = made_rows(classes, features, count + case.unlabelled)
    rows_ND, labels_N, unlabelled_UD = every_row[:count], every_label[:count], every_row[count:]
    zero_CD = torch.zeros(classes, features, dtype=torch.float64)
    blank = LinearHead(zero_CD, zero_CD, l2, count, False, loss)
    objective = blank.objective()
    limits = {"tolerance": tolerance, "max_iterations": 200}
    roughly = limits | {"tolerance": 100 * tolerance}  # the rest is in the stored gradient
    optimum = minimize(objective, blank.rows(rows_ND, labels_N, cache=True), zero_CD, **roughly)
    head = LinearHead(optimum.parameters_CE, optimum.gradient_CE, l2, count, False, loss)
    order_N = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    forget_F, keep_R = order_N[: case.forget], order_N[case.forget :]
    forget_FD = rows_ND[forget_F]
    moved_VFD = forget_FD + 0.3 * torch.randn(case.views, *forget_FD.shape) / features**0.5
    more = {
        "views": moved_VFD / moved_VFD.norm(dim=2, keepdim=True) if case.views else None,
        "unlabelled": unlabelled_UD if case.unlabelled else None,
    }

    def step() -> object:
        return unlearn(head, forget_FD, labels_N[forget_F], curvature={"on_doubt": "apply"}, **more)

    def retrain(train: Callable[..., object]) -> object:
        rows = head.rows(rows_ND[keep_R], labels_N[keep_R], cache=True)
        return train(objective, rows, head.parameters_CE, **limits)

    result, seconds = timed(step)
    ways = [minimize, train_exact] if case.loss == "quadratic" else [minimize]
    retraining = min(timed(lambda train=train: retrain(train))[1] for train in ways)
    details = result.details
    small = f" in {details['reduced_features']} features" if "reduced_features" in details else ""
    return Timed(seconds, retraining, details["structure"] + small)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small problems only")
    parser.add_argument("--l2", type=float, default=1e-4)
    parser.add_argument("--tolerance", type=float, default=1e-8, help="gradient norm of training")
    parser.add_argument("--limit", type=float, default=1.0, help="largest ratio of step to retraining")
    parser.add_argument("--least", type=float, default=0.3, help="seconds that a step may always take")
    parser.add_argument("--only", nargs="+", type=int, help="numbers of the cases to run")
    given = parser.parse_args(arguments)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, l2 = {given.l2:g}")
    print(f"{'':3s} {'loss':9s} {'C':>5s} {'D':>5s} {'N':>6s} {'N_f':>6s} {'step':>8s} {'retrain':>8s} {'ratio':>6s}")
    cases, slow = QUICK if given.quick else GRID, 0
    for loss in ("quadratic", "softmax"):
        compare(Case(loss, 3, 8, 100, 30), given.l2, given.tolerance)
    for number, case in enumerate(cases):
        if given.only and number not in given.only:
            continue
        found = compare(case, given.l2, given.tolerance)
        ratio = found.step / max(found.retraining, 1e-9)
        too_slow = ratio > given.limit and found.step > given.least
        slow += too_slow
        name, *sizes = case[:5]
        shown = "{:5d} {:5d} {:6d} {:6d}".format(*sizes)
        further = [
            f"{count:,} {what}" for what, count in (("views", case.views), ("unlabelled", case.unlabelled)) if count
        ]
        mark = "  SLOWER" if too_slow else ""
        times = f"{found.step:8.2f} {found.retraining:8.2f} {ratio:6.2f}"
        print(f"{number:3d} {name:9s} {shown} {times}  {', '.join([found.how, *further])}{mark}", flush=True)
    print(f"{slow} of the steps took longer than {given.limit:g} times the retraining and {given.least:g} s")
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())
