"""Measure what publishing a head before and after a request gives away about the forgotten rows.

    python scripts/white_box.py                                # scikit-learn's digits
    python scripts/white_box.py --features cifar10_512.npz     # features of your own

It prints two tables: for 1, 10 and 100 forgotten rows what each attacker of sfu.evaluation.white_box reconstructs, and
for one row what noise on the new head (newton.noise_sigma) changes. Figures are means over random requests; the largest
standard error of each table's cosines follows it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence

import torch

from sfu.curvature.settings import curvature_settings
from sfu.data.datasets.digits import Digits
from sfu.data.datasets.features import FeatureFile
from sfu.data.feature_data import FeatureData
from sfu.data.load import load_dataset
from sfu.data.split import ForgetSplit
from sfu.evaluation.evaluate import Evaluator
from sfu.evaluation.white_box import WhiteBox
from sfu.heads.base import Head
from sfu.heads.settings import LinearSettings
from sfu.heads.train import train_head
from sfu.losses.base import make_loss
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.methods.newton import Newton
from sfu.unlearning.methods.retrained import Retrained

SIGMAS = (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
EXACT = {"estimator": "exact", "regularization": "none", "on_doubt": "apply"}
FIGURES = ("gradient_cosine", "row_cosine", "other_row_cosine", "subspace_overlap")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", help="npz or safetensors file; digits without it")
    parser.add_argument("--loss", default="quadratic")
    parser.add_argument("--l2", type=float, default=1e-3)
    parser.add_argument("--draws", type=int, default=20, help="random requests of each size, at least 2")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 10, 100])
    given = parser.parse_args(argv)
    data = load_dataset(Digits() if given.features is None else FeatureFile(path=given.features), 0)
    settings, loss = LinearSettings(l2=given.l2), make_loss(given.loss)
    head = train_head(
        data.train_features_ND, data.train_labels_N, data.n_classes, settings, loss, seed=0,
        device=torch.device("cpu"), dtype=torch.float64,
    )  # fmt: skip
    errors = [0.0]
    print("| rows | method | attacker | gradient | row | other rows | subspace |\n|---|---|---|---|---|---|---|")
    for size in given.sizes:
        for (method, attacker), found in by_size(data, head, settings, size, given.draws).items():
            columns = [[one[key] for one in found] for key in FIGURES]
            errors.append(largest_error(columns))
            print(line(str(size), f"`{method}`", attacker, columns=columns), flush=True)
    print(f"\nlargest standard error: {max(errors):.3f}\n")
    errors = [0.0]
    print("| noise_sigma | gradient | row | other rows | test | distance |\n|---|---|---|---|---|---|")
    for sigma in SIGMAS:
        columns = [list(column) for column in zip(*with_noise(data, head, settings, sigma, given.draws), strict=True)]
        errors.append(largest_error(columns[:3]))
        print(line(f"{sigma:g}", columns=columns), flush=True)
    print(f"\nlargest standard error: {max(errors):.3f}")
    return 0


def by_size(
    data: FeatureData, head: Head, settings: LinearSettings, size: int, draws: int
) -> dict[tuple[str, str], list[dict[str, float]]]:
    """Return what each attacker finds of Retrained and of the source-free step, for each draw."""
    methods = {"retrained": Retrained(settings), "closed_form": Newton(curvature_settings(estimator="closed_form"))}
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for request, retained, _ in requests(data, head, size, draws):
        box = WhiteBox(request, retained, data.test_features_TD)
        for name, method in methods.items():
            new = method.unlearn(request, MethodContext(), retained if name == "retrained" else None).head
            for attacker, figures in (box.attack(new) or {}).items():
                found.setdefault((name, attacker), []).append(figures)
    return found


def with_noise(
    data: FeatureData, head: Head, settings: LinearSettings, sigma: float, draws: int
) -> Iterator[tuple[float, ...]]:
    """Yield what knowing the Hessian finds of one row, and what noise costs: test accuracy and distance."""
    method = Newton(curvature_settings(EXACT), noise_sigma=sigma)
    for draw, (request, retained, split) in enumerate(requests(data, head, 1, draws)):
        new = method.unlearn(request, MethodContext({"noise": draw}), retained).head
        attacks = WhiteBox(request, retained, data.test_features_TD).attack(new)
        target = Retrained(settings).unlearn(request, MethodContext(), retained).head
        scores = Evaluator(data, split, head, target).evaluate(new)[0]
        assert attacks is not None
        assert scores["test_accuracy"] is not None
        assert scores["distance"] is not None
        yield *(attacks["exact"][key] for key in FIGURES[:3]), scores["test_accuracy"], scores["distance"]


def requests(
    data: FeatureData, head: Head, size: int, draws: int
) -> Iterator[tuple[ForgetRequest, RetainedSet, ForgetSplit]]:
    """Yield random requests of one size."""
    for draw in range(draws):
        order = torch.randperm(data.n_train, generator=torch.Generator().manual_seed(draw))
        forget_F, retain_R = order[:size].sort().values, order[size:].sort().values
        yield (
            ForgetRequest(head, data.train_features_ND[forget_F], data.train_labels_N[forget_F]),
            RetainedSet(data.train_features_ND[retain_R], data.train_labels_N[retain_R]),
            ForgetSplit(forget_F, retain_R, "indices"),
        )


def line(*names: str, columns: Sequence[Sequence[float]]) -> str:
    """Return a line of a table: names, and the mean of each column."""
    return f"| {' | '.join([*names, *(f'{statistics.fmean(column):.3f}' for column in columns)])} |"


def largest_error(columns: Sequence[Sequence[float]]) -> float:
    """Return the largest standard error of the means."""
    return max(statistics.stdev(column) / math.sqrt(len(column)) for column in columns)


if __name__ == "__main__":
    sys.exit(main())
