"""What happens to mistakes that are easy to make when a head of one's own is given to sfu?

    python scripts/mistakes.py cifar10_512.npz
    python scripts/mistakes.py --quick

Heads are trained to the optimum of five objectives, by SGD, and by SGD with mixup. A tenth of the rows is forgotten,
once as the head was trained and once for each mistake. A line says how ``sfu.unlearn`` refused it, or the distance of
its result to the head retrained by the same recipe (0 is retrained, 1 is doing nothing). Whether rows were trained on
cannot always be told, so ten requests of rows that were not are counted: how many are refused, and how many are with
the training loss known.

Without a file, digits are used. Exits with 1 if a mistake ends above 1.02 or is refused without being named, or if what
is right is refused.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import sfu
from sfu.curvature.statement import check_statement
from sfu.data.datasets.features import TRAIN, read_feature_file
from sfu.heads.settings import LinearSettings
from sfu.heads.train import train_head
from sfu.operators.build import build_operator
from sfu.operators.structure import Structure

L2, FORGOTTEN, HARM, BATCH, EPOCHS, DRAWS = 5e-4, 0.1, 1.02, 128, 60, 10
LOSSES = {
    "softmax": sfu.make_loss("softmax"), "smoothing 0.1": sfu.make_loss("softmax", label_smoothing=0.1),
    "one-hot": sfu.make_loss("quadratic"), "+-1 targets": sfu.make_loss("quadratic", other_target=-1.0),
    "logistic": sfu.make_loss("logistic"),
}  # fmt: skip
SGD = {"softmax, SGD": 0.0, "softmax, mixup": 1.0}
QUICK = ["one-hot", "softmax, SGD"]
Rows = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A head and its retrained twin, what its owner should say, and the rows: forgotten, retained, of neither."""

    parameters_CE: Tensor
    retrained_CE: Tensor
    told: dict[str, Any]
    forget: Rows
    retained: Rows
    others: Rows

    def head(self, **changes: Any) -> sfu.LinearHead:
        """Do what the owner does."""
        layer = nn.Linear(self.parameters_CE.shape[1] - 1, self.parameters_CE.shape[0], dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(self.parameters_CE[:, :-1])
            layer.bias.copy_(self.parameters_CE[:, -1])
        n_train = len(self.forget[1]) + len(self.retained[1])
        return sfu.TrainingRecord(n_train=n_train, **{**self.told, **changes}).head(layer)

    def distance(self, parameters_CE: Tensor) -> float:
        head = self.head()
        hessian = build_operator(head.objective(), head.rows(*self.retained), self.parameters_CE, Structure.products)
        left, before = parameters_CE - self.retrained_CE, self.parameters_CE - self.retrained_CE
        return float(((hessian.matmul(left) * left).sum() / (hessian.matmul(before) * before).sum()).sqrt())

    @property
    def trained_on(self) -> Rows:
        return torch.cat([self.forget[0], self.retained[0]]), torch.cat([self.forget[1], self.retained[1]])


def descend(features: Tensor, labels: Tensor, mixup: float) -> Tensor:
    """Train by SGD with weight decay and a cosine schedule; ``mixup`` is the parameter of the Beta distribution."""
    torch.manual_seed(0)
    n_classes = int(labels.max()) + 1
    layer = nn.Linear(features.shape[1], n_classes, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.9, weight_decay=L2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    targets = nn.functional.one_hot(labels, n_classes).double()
    for _ in range(EPOCHS):
        for index in torch.randperm(len(labels)).split(BATCH):
            share = torch.distributions.Beta(mixup, mixup).sample() if mixup else torch.tensor(1.0)
            partner = index[torch.randperm(len(index))]
            rows, wanted = (share * one[index] + (1 - share) * one[partner] for one in (features, targets))
            optimizer.zero_grad()
            nn.functional.cross_entropy(layer(rows), wanted).backward()
            optimizer.step()
        schedule.step()
    return torch.cat([layer.weight, layer.bias[:, None]], 1).detach()


def cases(features: Tensor, labels: Tensor, others: Rows, only: list[str]) -> Iterator[tuple[str, Case]]:
    count, n_classes = round(FORGOTTEN * len(labels)), int(labels.max()) + 1
    parts = slice(None), slice(count), slice(count, None)
    everything, forget, retained = ((features[part], labels[part]) for part in parts)
    options = {"device": torch.device("cpu"), "dtype": torch.float64, "seed": 0}
    config = LinearSettings(l2=L2, bias=True)
    for name, loss in {name: loss for name, loss in LOSSES.items() if name in only}.items():
        both = [train_head(*rows, n_classes, config, loss, **options).parameters_CE for rows in (everything, retained)]
        yield name, Case(*both, {"loss": loss, "l2": L2}, forget, retained, others)
    for name, mixup in {name: mixup for name, mixup in SGD.items() if name in only}.items():
        both = [descend(*rows, mixup) for rows in (everything, retained)]
        yield name, Case(*both, {"loss": "softmax", "l2": L2, "penalize_bias": True}, forget, retained, others)


def mistakes(name: str, case: Case) -> Iterator[tuple[str, str, sfu.LinearHead, Rows]]:
    """Yield what is wrong, what its error must name, the head as its owner gives it, and the rows."""
    head, (rows, labels) = case.head(), case.forget
    generator, n_classes = torch.Generator().manual_seed(1), case.head().n_classes
    norms = 25 * torch.randn(len(labels), 1, generator=generator, dtype=torch.float64).mul(0.4).exp()
    yield "labels shifted by one", "labels", head, (rows, (labels + 1) % n_classes)
    yield "classes in another order", "labels", head, (rows, torch.randperm(n_classes, generator=generator)[labels])
    yield "features x 2", "features", head, (2 * rows, labels)
    yield "features x 0.5", "features", head, (rows / 2, labels)
    yield "rows not normalised", "features", head, (norms * rows, labels)
    for told, loss in LOSSES.items():
        if loss != head.loss:
            yield f"told as {told}", "loss", case.head(loss=loss), (rows, labels)
    yield "l2 / 10", "l2=5e-05", case.head(l2=L2 / 10), (rows, labels)
    yield "l2 x 10", "l2=0.005", case.head(l2=L2 * 10), (rows, labels)
    if "mixup" in name:
        yield "mixup not said", "mixup", head, (rows, labels)
    else:
        yield "every row twice", "", head, (rows.repeat(2, 1), labels.repeat(2))


def truths(name: str, case: Case) -> Iterator[tuple[str, str, Rows]]:
    """Yield what is right, its kind, and the rows. Classes are told as random samples: sfu finds them out."""
    head, (features, labels), count = case.head(), case.trained_on, len(case.forget[1])
    losses_N = head.loss.values(head.logits(features), labels).sum(1)
    near_N = (features - features[0]).square().sum(1).argsort()
    of_class = [(labels == label).nonzero()[:, 0] for label in (1, 2)]
    if "mixup" not in name:  # sfu knows no mixup
        yield "right", "random", case.forget
    for what, kind, index in (
        ("one class", "random", of_class[0]), ("half of a class", "random", of_class[1][::2]),
        ("hardest rows", "selected", losses_N.argsort()[-count:]), ("one person's rows", "person", near_N[:count]),
        ("easiest rows", "selected", losses_N.argsort()[:count]),
    ):  # fmt: skip
        yield what, kind, (features[index], labels[index])


def serve(head: sfu.LinearHead, rows: Rows, kind: str = "random") -> tuple[str | None, sfu.Head]:
    """Return the message of a refusal, if it is refused, and the head afterwards."""
    try:
        return None, sfu.unlearn(head, *rows, request=kind, curvature={"estimator": "closed_form"}).head
    except sfu.SfuError as error:
        return str(error), head


def not_trained_on(case: Case) -> tuple[int, int]:
    """Return how many requests for rows that were not trained on are refused without and with the training loss."""
    head, found = case.head(), [0, 0]
    mean = float(head.loss.values(head.logits(case.trained_on[0]), case.trained_on[1]).sum(1).mean())
    for draw in range(DRAWS):
        index = torch.randperm(len(case.others[1]), generator=torch.Generator().manual_seed(draw))
        rows = [one[index[: len(case.forget[1])]] for one in case.others]
        for place, known in enumerate((None, mean)):
            try:
                check_statement(sfu.ForgetRequest(case.head(training_loss=known), *rows))
            except sfu.SfuError:
                found[place] += 1
    return found[0], found[1]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, help="feature file (default: digits)")
    parser.add_argument("--rows", type=int, default=5000, help="training rows")
    parser.add_argument("--only", action="append", help="name of a head (repeatable)")
    parser.add_argument("--quick", action="store_true", help="two of the heads")
    given = parser.parse_args(arguments)
    if given.path is None:
        from sklearn.datasets import load_digits

        features, labels = load_digits(return_X_y=True)
    else:
        read = read_feature_file(given.path, TRAIN, "FILE")
        features, labels = (read[name] for name in TRAIN)
    order = np.random.default_rng(0).permutation(len(labels))
    rows_ND = nn.functional.normalize(torch.tensor(features[order]).double())
    labels_N, n_train = torch.tensor(labels[order]).long(), min(given.rows, round(0.8 * len(labels)))
    others, wrong, total = (rows_ND[n_train:], labels_N[n_train:]), 0, 0

    def say(name: str, what: str, done: str, fails: bool) -> None:
        nonlocal wrong, total
        wrong, total = wrong + fails, total + 1
        print(f"{name:16}{what:26}{done}{'  WRONG' if fails else ''}", flush=True)

    only = given.only or (QUICK if given.quick else [*LOSSES, *SGD])
    for name, case in cases(rows_ND[:n_train], labels_N[:n_train], others, only):
        for what, kind, rows in truths(name, case):
            refusal, after = serve(case.head(), rows, kind)
            distance = f" {case.distance(after.parameters_CE):.2f}" if what == "right" else ""
            say(name, what, f"served{distance}" if refusal is None else f"refused: {refusal}", refusal is not None)
        for what, named, head, rows in mistakes(name, case):
            refusal, after = serve(head, rows)
            if refusal is None:
                distance = case.distance(after.parameters_CE)
                say(name, what, f"{distance:.2f}", distance > HARM)
            else:
                first = re.split(r"(?<=[a-z\d)])[.:] ", refusal)[0]
                say(name, what, f"refused: {first}", named not in refusal)
        found = not_trained_on(case)
        print(f"{name:16}rows not trained on       {found[0]} of {DRAWS} refused, {found[1]} if the loss is known")
    print(f"{wrong} of {total} are wrong.")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
