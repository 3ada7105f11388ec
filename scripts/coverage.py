"""How often is the predicted share right? Random forget sets of real and made data, 100 each.

    python scripts/coverage.py
    python scripts/coverage.py cifar10_512.npz --draws 40
    python scripts/coverage.py --quick

For every dataset, loss, l2 and number of forget rows: the share of the squared distance to Retrained that a step from
the forget rows alone removes, measured and predicted (means), the part of the sets for which it was predicted, and the
part of these whose measured share lies in the interval predicted for it. Nominal are 90 %. Exits with 1 if the coverage
of all sets together leaves 85 to 95 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn import datasets

from sfu import unlearn
from sfu.data.datasets.features import read_feature_file
from sfu.evaluation.measures import squared_norm
from sfu.heads.settings import LinearSettings
from sfu.heads.train import train_head, train_like
from sfu.losses.base import make_loss
from sfu.operators.build import build_operator
from sfu.operators.structure import Structure

LEAST, MOST = 0.85, 0.95
_WHERE = {"seed": 0, "device": torch.device("cpu"), "dtype": torch.float64}


@dataclass(frozen=True)
class Case:
    """A dataset, the settings of a head, and how many rows are forgotten."""

    name: str
    features: torch.Tensor
    labels: torch.Tensor
    loss: str
    l2: float
    n_forget: int


@dataclass(frozen=True)
class Outcome:
    """The shares of the draws: measured ones, predicted ones (``None`` if not), and whether the interval was right."""

    measured: list[float]
    predicted: list[float | None]
    right: list[bool]


def cases(features_file: str | None, *, quick: bool) -> Iterator[Case]:
    """Yield what is measured."""
    made = {
        name: _made(*shape) for name, *shape in (("made, C 3, D 12", 3, 12, 1500), ("made, C 6, D 20", 6, 20, 3000))
    }
    yield from _of("made, C 3, D 12", made, [("quadratic", 1e-3, (40, 150)), ("logistic", 1e-3, (60,))])
    yield from _of("made, C 6, D 20", made, [("quadratic", 1e-4, (300,)), ("softmax", 1e-3, (300,))])
    if quick:
        return
    yield from _of("made, C 3, D 12", made, [("logistic", 1e-3, (150,)), ("softmax", 1e-3, (150,)),
                                             ("softmax", 1e-2, (60,))])  # fmt: skip
    yield from _of("made, C 6, D 20", made, [("quadratic", 1e-2, (60,)), ("quadratic", 1e-4, (60,))])
    real = {
        "digits": (datasets.load_digits().data / 16, datasets.load_digits().target),
        "wine": _scaled(datasets.load_wine()), "breast cancer": _scaled(datasets.load_breast_cancer()),
    }  # fmt: skip
    yield from _of("digits", real, [("quadratic", 1e-3, (36, 90, 180, 360)), ("quadratic", 1e-1, (90,)),
                                    ("quadratic", 1e-5, (180,)), ("softmax", 1e-2, (90,))])  # fmt: skip
    yield from _of("wine", real, [("quadratic", 1e-1, (36,))])
    yield from _of("breast cancer", real, [("quadratic", 1e-2, (57, 114)), ("logistic", 1e-1, (57, 114))])
    if features_file is not None:
        arrays = read_feature_file(Path(features_file), ("train_features", "train_labels"), "FILE")
        chosen = np.random.default_rng(0).permutation(len(arrays["train_labels"]))[:10_000]
        file = {"features": (arrays["train_features"][chosen].astype(np.float64), arrays["train_labels"][chosen])}
        yield from _of("features", file, [("quadratic", 5e-4, (100, 500, 1000)), ("quadratic", 1e-6, (1000,))])


def _of(name: str, data: dict[str, tuple], heads: Sequence[tuple[str, float, Sequence[int]]]) -> Iterator[Case]:
    features, labels = data[name]
    for loss, l2, counts in heads:
        for n_forget in counts:
            yield Case(name, torch.tensor(features), torch.tensor(labels).long(), loss, l2, n_forget)


def _made(n_classes: int, width: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return Gaussian classes with a common covariance whose eigenvalues fall e^4-fold."""
    generator = np.random.default_rng(width)
    labels = generator.integers(0, n_classes, count)
    shape = np.exp(-2 * np.arange(width) / width)
    rows = (0.5 * generator.standard_normal((n_classes, width)))[labels] + generator.standard_normal((count, width))
    rows = rows * shape @ np.linalg.qr(generator.standard_normal((width, width)))[0]
    return rows / np.sqrt(np.square(rows).sum(1).mean()), labels


def _scaled(loaded: datasets.Bunch) -> tuple[np.ndarray, np.ndarray]:
    rows = (loaded.data - loaded.data.mean(0)) / loaded.data.std(0)
    return rows / np.sqrt(rows.shape[1]), loaded.target


def outcome(case: Case, draws: int) -> Outcome:
    """Forget random sets, one at a time, and compare the shares."""
    config, found = LinearSettings(l2=case.l2), Outcome([], [], [])
    n_classes = int(case.labels.max()) + 1
    head = train_head(case.features, case.labels, n_classes, config, make_loss(case.loss), **_WHERE)
    for draw in range(draws):
        order = torch.randperm(len(case.labels), generator=torch.Generator().manual_seed(draw))
        forget, kept = order[: case.n_forget], order[case.n_forget :]
        result = unlearn(head, case.features[forget], case.labels[forget], seed=draw)
        retrained = train_like(head, case.features[kept], case.labels[kept], config, seed=0).parameters_CE
        rows = head.rows(case.features[kept], case.labels[kept], cache=True)
        hessian = build_operator(head.objective(), rows, head.parameters_CE, Structure.products)
        left, nothing = (
            squared_norm(one.parameters_CE - retrained, hessian) for one in (result.head, head)
        )  # fmt: skip
        found.measured.append(1 - left / nothing)
        found.predicted.append(result.predicted_share)
        if result.predicted_share_interval is not None:
            low, high = result.predicted_share_interval
            found.right.append(low <= found.measured[-1] <= high)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", help="a feature file, as for dataset=features")
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="five settings of made data")
    given = parser.parse_args(arguments)
    right: list[bool] = []
    print(
        f"{'data':18s} {'loss':9s} {'l2':>6s} {'forget':>6s} {'told':>5s} {'measured':>8s} {'predicted':>9s} coverage"
    )
    for case in cases(given.path, quick=given.quick):
        found = outcome(case, given.draws)
        told = [index for index, share in enumerate(found.predicted) if share is not None]
        line = f"{case.name:18s} {case.loss:9s} {case.l2:6.0e} {case.n_forget:6d} {len(told) / given.draws:5.0%}"
        if told:
            means = (statistics.fmean(values[index] for index in told) for values in (found.measured, found.predicted))
            line += " {:8.3f} {:9.3f}".format(*means) + f" {statistics.fmean(found.right):8.0%}"
        print(line, flush=True)
        right += found.right
    coverage = statistics.fmean(right)
    print(f"coverage of all {len(right)} sets: {coverage:.1%}")
    return 0 if LEAST <= coverage <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
