"""Measure what publishing a head before and after a request gives away about the forgotten rows.

    python scripts/white_box.py                                # scikit-learn's digits
    python scripts/white_box.py --features cifar10_512.npz     # features of your own

It prints two tables: for 1, 10 and 100 forgotten rows what each attacker of sfu.evaluation.white_box reconstructs, and
for one row what noise on the new head (newton.noise_sigma) changes. Figures are means over random requests; the ± is
their standard error.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence

import torch

from sfu.curvature.settings import curvature_settings
from sfu.data.datasets.digits import Digits
from sfu.data.datasets.features import Features
from sfu.data.feature_data import FeatureData
from sfu.data.load import load_dataset
from sfu.data.split import ForgetSplit
from sfu.evaluation.evaluate import Evaluator
from sfu.evaluation.white_box import ATTACKERS, WhiteBox
from sfu.heads.settings import LinearSettings
from sfu.heads.train import train_head
from sfu.losses.base import make_loss
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.methods.newton import Newton
from sfu.unlearning.methods.retrained import Retrained

SIGMAS = (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", help="npz or safetensors file; digits without it")
    parser.add_argument("--loss", default="quadratic")
    parser.add_argument("--l2", type=float, default=1e-3)
    parser.add_argument("--draws", type=int, default=20, help="random requests of each size")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 10, 100])
    given = parser.parse_args()
    data = load_dataset(Digits() if given.features is None else Features(path=given.features), 0)
    settings = LinearSettings(l2=given.l2)
    where = {"device": torch.device("cpu"), "dtype": torch.float64}
    loss = make_loss(given.loss)
    rows = data.train_features_ND, data.train_labels_N
    head = train_head(*rows, data.n_classes, settings, loss, seed=0, **where)  # type: ignore[arg-type]
    print("| rows | method | attacker | gradient | row | other rows | subspace |\n|---|---|---|---|---|---|---|")
    for size in given.sizes:
        found: dict[tuple[str, str], list[dict[str, float]]] = {}
        for request, retained, _ in requests(data, head, size, given.draws):
            box = WhiteBox(request, retained, data.test_features_TD)
            for name, method in methods(settings).items():
                sees = retained if name == "retrained" else None
                attacks = box.attack(method.unlearn(request, MethodContext(), sees).head)
                for attacker in ATTACKERS if attacks is not None else ():
                    found.setdefault((name, attacker), []).append(attacks[attacker])
        for (name, attacker), each in found.items():
            cells = [
                told([one[key] for one in each])
                for key in ("gradient_cosine", "row_cosine", "other_row_cosine", "subspace_overlap")
            ]
            print(f"| {size} | `{name}` | {attacker} | {' | '.join(cells)} |")
    print("\n| noise_sigma | row, exact | row, own_data | row, identity | test | distance |\n|---|---|---|---|---|---|")
    for sigma in SIGMAS:
        lines: list[list[float]] = []
        for request, retained, split in requests(data, head, 1, given.draws):
            box, target = (
                WhiteBox(request, retained, data.test_features_TD),
                Retrained(settings).unlearn(request, MethodContext(), retained).head,
            )
            method = Newton(
                curvature_settings(estimator="exact", regularization="none", on_doubt="apply"), noise_sigma=sigma
            )
            new = method.unlearn(request, MethodContext({"noise": len(lines)}), retained).head
            attacks = box.attack(new)
            assert attacks is not None
            scores = Evaluator(data, split, head, target).evaluate(new)
            cosines = [attacks[attacker]["row_cosine"] for attacker in ATTACKERS]
            lines.append([*cosines, scores["test_accuracy"] or math.nan, scores["distance"] or 0.0])
        print(f"| {sigma:g} | {' | '.join(told(column) for column in zip(*lines, strict=True))} |")


def methods(settings: LinearSettings) -> dict[str, Retrained | Newton]:
    return {"retrained": Retrained(settings), "closed_form": Newton(curvature_settings(estimator="closed_form"))}


def requests(
    data: FeatureData, head: object, size: int, draws: int
) -> Iterator[tuple[ForgetRequest, RetainedSet, ForgetSplit]]:
    """Yield random requests of one size."""
    for draw in range(draws):
        order = torch.randperm(data.n_train, generator=torch.Generator().manual_seed(draw))
        forget_F, retain_R = order[:size].sort().values, order[size:].sort().values
        yield (
            ForgetRequest(head, data.train_features_ND[forget_F], data.train_labels_N[forget_F]),  # type: ignore[arg-type]
            RetainedSet(data.train_features_ND[retain_R], data.train_labels_N[retain_R]),
            ForgetSplit(forget_F, retain_R, "indices"),
        )


def told(values: Sequence[float]) -> str:
    """Return mean and standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3f} ± {error:.3f}"


if __name__ == "__main__":
    main()
