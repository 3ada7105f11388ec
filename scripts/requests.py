"""Does a deletion request ever do harm? Real and made data, requests that are random samples and requests that are not.

    python scripts/requests.py cifar10_512.npz
    python scripts/requests.py --quick

It holds sfu's own step to bounds over several hundred requests; `sfu experiment=requests` compares all methods on seven
kinds of them. For every request the distance to Retrained (0 is retrained, 1 is doing nothing) of sfu's step from the
forget rows alone, of the step with up to 1,000 unlabelled rows like the training rows, of the step with as many of
which half are turned (as rows of another dataset of the same size), and of four simple rules, from which the best is
chosen with Retrained in hand: the cross-validated step, damping by the mean eigenvalue, the step that can do no harm,
and doing nothing. Without a file, CIFAR-10 features are left out. Exits with 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor

from sfu.curvature.settings import CurvatureSettings, curvature_settings
from sfu.data.datasets.features import read_feature_file
from sfu.evaluation.measures import squared_norm
from sfu.heads.base import Head
from sfu.heads.settings import LinearSettings
from sfu.heads.train import train_head, train_like
from sfu.losses.base import make_loss
from sfu.operators.base import CurvatureOperator
from sfu.operators.build import build_operator
from sfu.operators.structure import Structure
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.methods.newton import Newton

HARM, MUCH_HARM = 1.02, 1.1
WORSE = 1.01  # with half foreign rows a request may end further away than without unlabelled rows by this factor
_UNLABELLED = 1000
_WORTH = 0.9  # a request is worth serving if the best simple rule ends nearer than this
_NEAR_BEST, _SHARE_NEAR_BEST, _SHARE_HARMED, _LOST = 1.1, 0.8, 0.01, 0.01
RULES = {
    "cross-validated": {"on_doubt": "apply"},
    "mean eigenvalue": {"on_doubt": "apply", "regularization": "mean_eigenvalue"},
}


@dataclass(frozen=True)
class Case:
    """A dataset with the settings of a head, and rows like the training rows."""

    name: str
    features: np.ndarray
    labels: np.ndarray
    more: np.ndarray
    loss: str = "quadratic"
    l2: float = 1e-3
    balanced: bool = False


@dataclass(frozen=True)
class Outcome:
    """Distances of one request; those of ``rules`` are in the order of their names, the harmless step and nothing."""

    case: str
    request: str
    n_forget: int
    alone: float
    with_unlabelled: float
    half_foreign: float
    rules: dict[str, float]
    today: float
    predicted: float | None

    @property
    def best(self) -> float:
        return min(self.rules.values())

    @property
    def random(self) -> bool:
        return self.request.startswith("random")


def cases(features_file: str | None, *, quick: bool) -> Iterator[Case]:
    """Yield the datasets: real ones, made ones, and subsets of the file."""
    generator = np.random.default_rng(0)
    sets = {"digits": datasets.load_digits, "wine": datasets.load_wine, "breast cancer": datasets.load_breast_cancer}
    found = []
    for name, load in sets.items():
        loaded = load()
        rows = loaded.data / 16 if name == "digits" else (loaded.data - loaded.data.mean(0)) / loaded.data.std(0)
        found.append(_shuffled(name, rows, loaded.target, 0.8, generator))
    shapes = [(3, 8, 300), (5, 20, 1000), (10, 50, 2000), (2, 100, 600)]
    for n_classes, width, count in shapes[:2] if quick else shapes:
        name = f"made, {n_classes} classes, {width} features"
        found.append(_shuffled(name, *_made(n_classes, width, count, generator), count / (count + 1000), generator))
    for case in found:
        yield case
        if quick:
            continue
        yield replace(case, l2=0.1)
        yield replace(case, loss="softmax")
        yield replace(case, balanced=True)
    if features_file is None:
        return
    arrays = read_feature_file(Path(features_file), ("train_features", "train_labels"), "FILE")
    rows, labels = arrays["train_features"].astype(np.float64), arrays["train_labels"]
    chosen = generator.permutation(len(labels))[:6000]
    cifar = _shuffled("CIFAR-10 features", rows[chosen], labels[chosen], 5000 / 6000, generator)
    scaled = cifar.features * 25 * np.exp(0.4 * generator.standard_normal((len(cifar.features), 1)))
    more = cifar.more * 25 * np.exp(0.4 * generator.standard_normal((len(cifar.more), 1)))
    yield replace(cifar, l2=5e-4)
    if not quick:
        yield replace(cifar, l2=1e-6)
        yield replace(cifar, name="CIFAR-10 features, norms differ", features=scaled, more=more)


def _shuffled(name: str, rows: np.ndarray, labels: np.ndarray, share: float, generator: np.random.Generator) -> Case:
    order = generator.permutation(len(labels))
    count = round(share * len(labels))
    train, more = order[:count], order[count:]
    return Case(name, rows[train], labels[train].astype(np.int64), rows[more])


def _made(n_classes: int, width: int, count: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return Gaussian classes with a common covariance whose eigenvalues fall e^6-fold."""
    labels = generator.integers(0, n_classes, count + 1000)
    means = 0.7 * generator.standard_normal((n_classes, width))
    shape = generator.standard_normal((width, width)) / width**0.5 * np.exp(-3 * np.arange(width) / width)
    return means[labels] + 2 * generator.standard_normal((count + 1000, width)) @ shape.T, labels


def requests_of(case: Case, head: Head, generator: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the rows of each request."""
    rows, labels, count = case.features, case.labels, len(case.labels)
    tenth = max(10, count // 10)

    def random(n: int) -> np.ndarray:
        return generator.permutation(count)[:n]

    for n in (5, 19, 20, 21, count // 20, tenth, count // 4):
        yield f"random, {n} rows", random(n)
    for label in generator.permutation(labels.max() + 1)[:2]:
        members = generator.permutation(np.flatnonzero(labels == label))
        if len(members) < 0.6 * count:
            yield "one class", members
        yield "half a class", members[: max(2, len(members) // 2)]
        yield "20 rows of one class", members[:20]
        yield "60 rows of one class", members[:60]
        yield "80 % random and 20 % of one class", np.union1d(random(tenth), members[: tenth // 4])
    for n in (20, 50, 200):
        if n < count / 3:
            near = ((rows - rows[generator.integers(count)]) ** 2).sum(1)
            yield f"{n} nearest neighbours", near.argsort()[:n]
            yield f"one person's {n} rows", (near * np.exp(0.3 * generator.standard_normal(count))).argsort()[:n]
    outputs = head.logits(torch.from_numpy(rows)).softmax(1).numpy()
    yield "hardest rows", outputs[np.arange(count), labels].argsort()[:tenth]
    yield "easiest rows", outputs[np.arange(count), labels].argsort()[-tenth:]
    norms = (rows**2).sum(1)
    if norms.std() > 1e-3 * norms.mean():
        yield "smallest norms", norms.argsort()[:tenth]
        yield "largest norms", norms.argsort()[-tenth:]
    yield "first of sorted labels", labels.argsort(kind="stable")[: int(0.15 * count)]


def serve(case: Case, *, quick: bool) -> Iterator[Outcome]:
    """Train the head, and serve every request."""
    generator = np.random.default_rng(1)
    features, labels = torch.from_numpy(case.features), torch.from_numpy(case.labels)
    loss = make_loss(case.loss, **({"class_weights": "balanced"} if case.balanced else {}))
    config = LinearSettings(l2=case.l2)
    options = {"device": torch.device("cpu"), "dtype": torch.float64, "seed": 0}
    head = train_head(features, labels, int(labels.max()) + 1, config, loss, **options)
    unlabelled = torch.from_numpy(case.more[:_UNLABELLED])
    mixed = _half_foreign(unlabelled)
    for name, rows in requests_of(case, head, generator):
        if quick and name.startswith(("easiest", "one person", "random, 19", "random, 21")):
            continue
        kept = torch.ones(len(labels), dtype=torch.bool)
        kept[rows] = False
        request = ForgetRequest(head, features[rows], labels[rows])
        retained = request.retained_rows(RetainedSet(features[kept], labels[kept]))
        retrained = train_like(head, features[kept], labels[kept], config, seed=0).parameters_CE
        hessian = build_operator(head.objective(), retained, head.parameters_CE, Structure.products)
        whole = squared_norm(head.parameters_CE - retrained, hessian)
        if whole < 1e-14:
            continue

        def distance(request: ForgetRequest, retrained: Tensor = retrained, hessian: CurvatureOperator = hessian,
                     whole: float = whole, **settings: object) -> float:  # fmt: skip
            return (squared_norm(_step(request, settings)[0] - retrained, hessian) / whole) ** 0.5

        rules = {name: distance(request, **settings) for name, settings in RULES.items()}
        rules["harmless"] = distance(replace(request, kind="selected"))
        today = rules["mean eigenvalue" if request.n_forget < 20 else "cross-validated"]
        alone, gain = _step(request, {})
        left = squared_norm(alone - retrained, hessian)
        predicted = None if gain is None else gain / (whole - left)
        with_more = [distance(replace(request, unlabelled=(rows,))) for rows in (unlabelled, mixed)]
        yield Outcome(
            _label(case), name, request.n_forget, (left / whole) ** 0.5, *with_more, {**rules, "nothing": 1.0}, today,
            predicted,
        )  # fmt: skip


def _half_foreign(rows: Tensor) -> Tensor:
    """Return the rows, half of them turned at random: of the same norms, in other directions."""
    width = rows.shape[1]
    drawn = torch.randn(width, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    half = len(rows) // 2
    return torch.cat([rows[:half] @ torch.linalg.qr(drawn).Q, rows[half:]])


def _label(case: Case) -> str:
    return f"{case.name}, {case.loss}, l2={case.l2:g}{', balanced' if case.balanced else ''}"


def _step(request: ForgetRequest, settings: dict[str, object]) -> tuple[Tensor, float | None]:
    config: CurvatureSettings = curvature_settings({"estimator": "closed_form", **settings})
    result = Newton(config).unlearn(request, MethodContext({"folds": 1}))
    return result.head.parameters_CE, result.predicted_distance_gain


def check(outcomes: list[Outcome]) -> list[str]:
    """Return the bounds that are broken."""
    broken = []
    harmed = [one for one in outcomes if one.alone > HARM]
    if len(harmed) > _SHARE_HARMED * len(outcomes):
        broken.append(f"{len(harmed)} of {len(outcomes)} requests end above {HARM} from the forget rows alone")
    worst = max(one.alone for one in outcomes)
    if worst > MUCH_HARM:
        broken.append(f"a request ends at {worst:.2f} from the forget rows alone, above {MUCH_HARM}")
    worst = max(one.with_unlabelled for one in outcomes)
    if worst > 1:
        broken.append(f"a request ends at {worst:.2f} with unlabelled rows, above 1")
    worst = max(one.half_foreign / one.alone for one in outcomes)
    if worst > WORSE:
        broken.append(f"half foreign rows take a request {worst:.3f} times as far away as no unlabelled rows")
    near = [one.alone <= _NEAR_BEST * one.best for one in outcomes if one.best < _WORTH]
    if statistics.mean(near) < _SHARE_NEAR_BEST:
        broken.append(f"only {100 * statistics.mean(near):.0f} % of the requests worth serving end near the best rule")
    lost = statistics.mean(one.alone / one.today for one in outcomes if one.random) - 1
    if lost > _LOST:
        broken.append(f"random requests end {100 * lost:.1f} % further away than by the simple rule for random sets")
    jumps = statistics.mean(_jumps(outcomes))
    if jumps > 0.05:
        broken.append(f"from 19 to 20 and 21 random rows the distance changes by {100 * jumps:.0f} % on average")
    return broken


def _jumps(outcomes: list[Outcome]) -> Iterator[float]:
    """Yield the mean signed change between neighbours of 19, 20 and 21 rows, over the datasets, as a share."""
    means = [
        statistics.mean(one.alone for one in outcomes if one.request == f"random, {n} rows" and one.n_forget == n)
        for n in (19, 20, 21)
        if any(one.request == f"random, {n} rows" for one in outcomes)
    ]
    yield 0.0
    for before, after in itertools.pairwise(means):
        yield abs(after / before - 1)


def main() -> None:
    """Serve all requests and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", nargs="?", help="file with train_features and train_labels, such as CIFAR-10's")
    parser.add_argument("--quick", action="store_true", help="few datasets and requests")
    parser.add_argument("--verbose", action="store_true", help="a line for every request")
    arguments = parser.parse_args()
    start, outcomes = time.perf_counter(), []
    for case in cases(arguments.features, quick=arguments.quick):
        found = list(serve(case, quick=arguments.quick))
        outcomes += found
        alone, more = [one.alone for one in found], [one.with_unlabelled for one in found]
        worse = [one.half_foreign / one.alone for one in found]
        print(
            f"{_label(case)[:52]:52} {len(found):3d} requests  alone {statistics.mean(alone):.2f} (worst "
            f"{max(alone):.2f})  with unlabelled rows {statistics.mean(more):.2f} ({max(more):.2f})  half foreign "
            f"{statistics.mean(worse):.2f} ({max(worse):.2f}) times alone",
            flush=True,
        )
        for one in found if arguments.verbose else []:
            rules = "  ".join(f"{name} {distance:.2f}" for name, distance in one.rules.items())
            found_at = f"{one.alone:.2f} {one.with_unlabelled:.2f} {one.half_foreign:.2f}"
            print(f"    {one.request:34} {found_at}  {rules}  predicted {one.predicted}")
    near = [one.alone <= _NEAR_BEST * one.best for one in outcomes if one.best < _WORTH]
    harmed = [one for one in outcomes if one.alone > HARM]
    randoms = [one.alone / one.today for one in outcomes if one.random]
    worse = [one.half_foreign / one.alone for one in outcomes]
    told = [one.predicted for one in outcomes if one.predicted is not None]
    print(
        f"\n{len(outcomes)} requests in {time.perf_counter() - start:.0f} s\n"
        f"above {HARM} from the forget rows alone: {len(harmed)}\n"
        f"with half foreign rows, over without unlabelled rows: mean {statistics.mean(worse):.3f}, worst "
        f"{max(worse):.3f}\n"
        f"near the best simple rule, of those worth serving: {100 * statistics.mean(near):.1f} % of {len(near)}\n"
        f"random requests against the simple rule for random sets: {100 * (statistics.mean(randoms) - 1):+.1f} %\n"
        f"predicted over measured gain: median {statistics.median(told):.2f} of {len(told)}"
    )
    if broken := check(outcomes):
        raise SystemExit("A bound is broken: " + "; ".join(broken) + ".")


if __name__ == "__main__":
    main()
