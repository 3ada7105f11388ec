"""Compare training to the optimum with scikit-learn, in one run: seconds, gradient norm, difference of the weights.

    python scripts/bench_training.py cifar10_512.npz

For each l2 (1e-5 and 5e-4 by default), softmax is compared with LogisticRegression (with its default tolerance, and to
the gradient norm of sfu) and quadratic with RidgeClassifier; logistic and the Huberised hinge run alone. Gradient norms
are those of the same mean objective in float64. Both sides use OMP_NUM_THREADS threads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression, Ridge, RidgeClassifier
from torch import Tensor

from sfu.data.datasets.base import Dataset
from sfu.data.load import load_dataset
from sfu.heads.linear import LinearHead
from sfu.heads.settings import LinearSettings
from sfu.heads.train import train_head
from sfu.losses.base import Loss, make_loss
from sfu.losses.quadratic import Quadratic

CPU = torch.device("cpu")


def timed(work: Callable[[], object]) -> tuple[object, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


class Bench:
    def __init__(self, path: str, limit: int | None, tolerance: float) -> None:
        data = load_dataset(Dataset.make(name="features", path=path), 0)
        self.features, self.labels = data.train_features_ND[:limit], data.train_labels_N[:limit]
        self.n_classes, self.tolerance = data.n_classes, tolerance

    def ours(self, loss: Loss, l2: float, tolerance: float | None = None) -> tuple[LinearHead, float]:
        config = LinearSettings(l2=l2, tolerance=tolerance or self.tolerance)
        work = partial(train_head, self.features, self.labels, self.n_classes, config, loss)
        head, seconds = timed(partial(work, seed=0, device=CPU, dtype=torch.float64))
        assert isinstance(head, LinearHead)
        return head, seconds

    def gradient_norm(self, head: LinearHead, weights: np.ndarray) -> float:
        rows = head.rows(self.features, self.labels)
        return float(head.objective().gradient(rows, torch.from_numpy(weights).double()).norm())

    def line(self, what: str, head: LinearHead, weights: np.ndarray, seconds: float, reference: Tensor | None) -> None:
        norm, difference = self.gradient_norm(head, weights), ""
        if reference is not None:
            gap = (torch.from_numpy(weights).double() - reference).norm() / reference.norm()
            difference = f"{float(gap):.1e}"
        print(f"  {what:44s} {seconds:8.2f} {norm:9.1e} {difference:>9s}", flush=True)


def compare(bench: Bench, l2: float, losses: list[str]) -> None:
    total = len(bench.labels)
    rows, labels = bench.features.numpy(), bench.labels.numpy()
    print(f"l2 = {l2:g}, N = {total}, D = {rows.shape[1]}, C = {bench.n_classes}")
    print(f"  {'':44s} {'seconds':>8s} {'|grad|':>9s} {'weights':>9s}")
    for name in losses:
        loss = Quadratic(target_scale=2.0) if name == "quadratic" else make_loss(name)
        head, seconds = bench.ours(loss, l2)
        mine = head.parameters_CE
        bench.line(f"sfu {name}", head, mine.numpy(), seconds, None)
        if name == "softmax":
            for dtype, tolerance in ((np.float32, 1e-4), (np.float64, 1e-4), (np.float64, 1e-8)):
                model = LogisticRegression(C=1 / (l2 * total), fit_intercept=False, tol=tolerance, max_iter=20_000)
                _, spent = timed(lambda model=model, dtype=dtype: model.fit(rows.astype(dtype), labels))
                what = f"scikit-learn LogisticRegression {dtype.__name__} tol={tolerance:g}"
                bench.line(what, head, model.coef_, spent, mine)
                if tolerance > 1e-8:
                    same, seconds = bench.ours(loss, l2, bench.gradient_norm(head, model.coef_))
                    bench.line("  sfu to that gradient norm", head, same.parameters_CE.numpy(), seconds, mine)
        if name == "quadratic":  # its targets are -1 and 1: without an intercept, 2 y - 1 has a part of its own
            hot = 2.0 * np.eye(bench.n_classes)[labels]
            ridge = Ridge(alpha=l2 * total, fit_intercept=False)
            _, spent = timed(lambda ridge=ridge, hot=hot: ridge.fit(rows.astype(np.float64), hot))
            bench.line("scikit-learn Ridge float64", head, ridge.coef_, spent, mine)
            classifier = RidgeClassifier(alpha=l2 * total, fit_intercept=False)
            _, spent = timed(lambda model=classifier: model.fit(rows.astype(np.float64), labels))
            print(f"  {'scikit-learn RidgeClassifier (targets -1, 1)':44s} {spent:8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a feature file, as for dataset=features")
    parser.add_argument("--l2", type=float, nargs="+", default=[1e-5, 5e-4])
    parser.add_argument("--losses", nargs="+", default=["softmax", "logistic", "huber_hinge", "quadratic"])
    parser.add_argument("--tolerance", type=float, default=1e-6, help="our gradient norm")
    parser.add_argument("--rows", type=int, default=None)
    arguments = parser.parse_args()
    bench = Bench(arguments.path, arguments.rows, arguments.tolerance)
    for l2 in arguments.l2:
        compare(bench, l2, arguments.losses)


if __name__ == "__main__":
    main()
