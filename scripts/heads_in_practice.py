"""How near does a step come to retraining when a head was trained as people train heads?

    python scripts/heads_in_practice.py cifar10_512.npz
    python scripts/heads_in_practice.py cifar10_512.npz --more --only "Adam 5e-4"
    python scripts/heads_in_practice.py --quick

Heads are trained with plain PyTorch and scikit-learn, and their owner gives ``LinearHead.from_module`` what
docs/heads.md says. A tenth of the rows is forgotten. Two seeds of one recipe end at different heads, so a step is
compared with the *effect* of forgetting: the mean of the retrained heads minus that of the original ones, over seeds.

Columns: ``l2`` that sfu used (given, or estimated where the owner gave "estimate" or sfu refused what was given);
``truth``, what all training rows show; ``distance`` |step - effect| / |effect| in the norm of the data Hessian of the
retained rows, without the part of both that is noise of the means; ``noise``, that part over the effect (from 0.5 on
nothing is measured); ``same`` and ``other``, distances to one retrained head, of this seed and of another;
``gain``, predicted over measured; ``c``, the length of the step. With ``--more``: ``unlabelled`` and ``known``, the
distances with 2,000 unlabelled rows and with the retained rows' Hessian known, which is the limit.

Without a file, digits are used. Exits with 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import sfu
from sfu.curvature.settings import curvature_settings
from sfu.data.datasets.features import TEST, TRAIN, read_feature_file
from sfu.operators.base import CurvatureOperator
from sfu.operators.build import build_operator
from sfu.operators.structure import Structure
from sfu.unlearning.methods.newton import Newton

BATCH, PATIENCE, CLASSES, HELD_OUT, UNLABELLED, FORGOTTEN = 128, 5, 10, 2000, 2000, 0.1
CONVERGED, STOPPED, PROMISED, NOISY = 0.38, 0.85, (0.7, 1.3), 0.5
OF_CLASSES = (1.0,) * 5 + (3.0,) * 5
DECAYED = {"loss": "softmax", "l2": 5e-4, "penalize_bias": True}
ESTIMATED = DECAYED | {"l2": "estimate"}
FIXED = {"l2": 1.0, "l2_reduction": "sum"}
QUICK = ("SGD, cosine", "SGD, cosine, BCE", "AdamW 1e-2", "LogisticRegression(C=1)", "RidgeClassifier(alpha=1)")
Fitted = tuple[np.ndarray, np.ndarray]


def _optimizer(kind: str, lr: float, decay: float) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    more = {"momentum": 0.9} if kind == "SGD" else {}
    return lambda parameters: getattr(torch.optim, kind)(parameters, lr=lr, weight_decay=decay, **more)


def _scikit(module: str, kind: str, **settings: Any) -> Callable[[np.ndarray, np.ndarray, int], Fitted]:
    def fit(rows: np.ndarray, labels: np.ndarray, seed: int) -> Fitted:
        model = getattr(__import__(f"sklearn.{module}", fromlist=[kind]), kind)(random_state=seed, **settings)
        model.fit(rows, labels)
        return model.coef_, model.intercept_

    return fit


@dataclass(frozen=True)
class Recipe:
    """How a head is trained, and what its owner tells sfu (``told``); ``bound`` is that of the distance."""

    name: str
    make: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None
    told: dict[str, Any] = field(default_factory=lambda: DECAYED)
    norm: float = 1.0
    epochs: int = 100
    seeds: int = 8
    cosine: bool = False
    stopped: bool = False
    loss: nn.Module = field(default_factory=nn.CrossEntropyLoss)
    averaged: float | None = None
    fit: Callable[[np.ndarray, np.ndarray, int], Fitted] | None = None

    @property
    def bound(self) -> float:
        converged = self.cosine and self.told.get("l2") != "estimate"
        return CONVERGED if converged else STOPPED if self.stopped else 1.0


CONVERGING, STOPPING = {"cosine": True}, {"stopped": True, "told": ESTIMATED}
RECIPES = (
    Recipe("SGD, cosine", _optimizer("SGD", 0.5, 5e-4), **CONVERGING),
    Recipe("SGD, cosine, label smoothing", _optimizer("SGD", 0.5, 5e-4), loss=nn.CrossEntropyLoss(label_smoothing=0.1),
           told=DECAYED | {"loss": sfu.make_loss("softmax", label_smoothing=0.1)}, **CONVERGING),
    Recipe("SGD, cosine, class weights", _optimizer("SGD", 0.5, 5e-4),
           loss=nn.CrossEntropyLoss(torch.tensor(OF_CLASSES)),
           told=DECAYED | {"loss": sfu.make_loss("softmax", class_weights=OF_CLASSES)}, **CONVERGING),
    Recipe("SGD, cosine, BCE", _optimizer("SGD", 2.0, 5e-4), loss=nn.BCEWithLogitsLoss(),
           told=DECAYED | {"loss": "logistic", "l2": 5e-4 * CLASSES}, **CONVERGING),
    Recipe("SGD, cosine, sum loss", _optimizer("SGD", 0.5 / BATCH, 5e-4), loss=nn.CrossEntropyLoss(reduction="sum"),
           cosine=True, told=ESTIMATED),
    Recipe("SGD, cosine, no decay", _optimizer("SGD", 0.5, 0.0), cosine=True, told=ESTIMATED),
    Recipe("SGD, constant rate", _optimizer("SGD", 0.5, 5e-4)),
    Recipe("SGD, constant rate, EMA", _optimizer("SGD", 0.5, 5e-4), averaged=0.999),
    Recipe("Adam 5e-4", _optimizer("Adam", 1e-2, 5e-4), seeds=32, **STOPPING),
    Recipe("Adam 1e-4, norm 10", _optimizer("Adam", 1e-3, 1e-4), norm=10, seeds=64, **STOPPING),
    Recipe("Adam 1e-4, norm 25", _optimizer("Adam", 1e-3, 1e-4), norm=25, seeds=64, **STOPPING),
    Recipe("AdamW 1e-2", _optimizer("AdamW", 1e-2, 1e-2), seeds=64, **STOPPING),
    Recipe("AdamW 1e-2, norm 25", _optimizer("AdamW", 1e-3, 1e-2), norm=25, seeds=64, **STOPPING),
    Recipe("RMSprop 1e-4, norm 5", _optimizer("RMSprop", 1e-3, 1e-4), norm=5, seeds=64, **STOPPING),
    Recipe("LogisticRegression(C=1)", fit=_scikit("linear_model", "LogisticRegression", max_iter=1000),
           told=FIXED | {"loss": "softmax"}, seeds=2),
    Recipe("RidgeClassifier(alpha=1)", fit=_scikit("linear_model", "RidgeClassifier"), seeds=2,
           told=FIXED | {"loss": sfu.make_loss("quadratic", other_target=-1.0)}),
    Recipe("LinearSVC(C=1)", fit=_scikit("svm", "LinearSVC", tol=1e-5, max_iter=10_000), seeds=2,
           told=FIXED | {"loss": "squared_hinge", "l2": 0.5, "penalize_bias": True}),
    Recipe("SGDClassifier(log_loss)", fit=_scikit("linear_model", "SGDClassifier", loss="log_loss"),
           told={"loss": "logistic", "l2": 1e-4}, seeds=32),
)  # fmt: skip


@dataclass(frozen=True)
class Data:
    """Rows of one draw, on the scale of a recipe."""

    rows_ND: Tensor
    labels_N: Tensor
    forget_N: Tensor
    held_out: tuple[Tensor, Tensor]
    unlabelled_UD: Tensor

    def scaled(self, norm: float) -> Data:
        held_out = (norm * self.held_out[0], self.held_out[1])
        return Data(norm * self.rows_ND, self.labels_N, self.forget_N, held_out, norm * self.unlabelled_UD)


def train(recipe: Recipe, data: Data, left_N: Tensor) -> Tensor:
    """Train a head for each seed, all at once, and return them with the bias last, ``[S, C, E]``."""
    rows_ND, labels_N, seeds = data.rows_ND[left_N], data.labels_N[left_N], range(recipe.seeds)
    n_rows, width = rows_ND.shape
    if recipe.fit is not None:
        found = [recipe.fit(rows_ND.double().numpy(), labels_N.numpy(), seed) for seed in seeds]
        return torch.stack([torch.tensor(np.concatenate([w, b[:, None]], 1)) for w, b in found])
    generators, bound = [torch.Generator().manual_seed(seed) for seed in seeds], width**-0.5  # as nn.Linear starts
    weight_SCD = torch.stack([(2 * torch.rand(CLASSES, width, generator=g) - 1) * bound for g in generators])
    bias_S1C = torch.stack([(2 * torch.rand(1, CLASSES, generator=g) - 1) * bound for g in generators])
    parameters = [weight_SCD.requires_grad_(), bias_S1C.requires_grad_()]
    optimizer = recipe.make(parameters)  # type: ignore[misc]
    n_steps = recipe.epochs * -(-n_rows // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_steps) if recipe.cosine else None
    averages, best = [p.detach().clone() for p in parameters], [p.detach().clone() for p in parameters]
    best_S, waited_S = torch.full((len(seeds),), torch.inf), torch.zeros(len(seeds))
    for _ in range(recipe.epochs):
        order_SN = torch.stack([torch.randperm(n_rows, generator=g) for g in generators])
        for index_SB in order_SN.split(BATCH, 1):
            optimizer.zero_grad()
            outputs_SBC, targets = rows_ND[index_SB] @ weight_SCD.mT + bias_S1C, labels_N[index_SB]
            if isinstance(recipe.loss, nn.BCEWithLogitsLoss):
                targets = nn.functional.one_hot(targets, CLASSES).float()
            torch.func.vmap(recipe.loss)(outputs_SBC, targets).sum().backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
            for average, p in zip(averages if recipe.averaged else [], parameters, strict=False):
                average.lerp_(p.detach(), 1 - recipe.averaged)  # type: ignore[operator]
        if recipe.stopped:
            outputs_SVC = (data.held_out[0] @ weight_SCD.mT + bias_S1C).detach()
            labels_SV = data.held_out[1].expand(len(seeds), -1)
            losses_S = nn.functional.cross_entropy(outputs_SVC.mT, labels_SV, reduction="none").mean(1)
            better_S = (losses_S < best_S - 1e-4) & (waited_S < PATIENCE)
            best_S, waited_S = torch.where(better_S, losses_S, best_S), torch.where(better_S, 0, waited_S + 1)
            for kept, p in zip(best, parameters, strict=True):
                kept[better_S] = p.detach()[better_S]
            if bool((waited_S >= PATIENCE).all()):
                break
    last = best if recipe.stopped else averages if recipe.averaged else [p.detach() for p in parameters]
    return torch.cat([last[0], last[1].mT], 2).double()


def head_of(recipe: Recipe, data: Data, parameters_CE: Tensor) -> sfu.LinearHead:
    """Do what the owner does."""
    layer = nn.Linear(parameters_CE.shape[1] - 1, CLASSES, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(parameters_CE[:, :-1])
        layer.bias.copy_(parameters_CE[:, -1])
    weights = getattr(recipe.told["loss"], "class_weights", None)
    weight = None if weights is None else float(torch.tensor(weights)[data.labels_N].sum())
    return sfu.LinearHead.from_module(layer, n_train=len(data.labels_N), weight=weight, **recipe.told)


def inner(hessian: CurvatureOperator, one_CE: Tensor, other_CE: Tensor) -> float:
    return float((hessian.matmul(one_CE) * other_CE).sum())


def measure(recipe: Recipe, data: Data, more: bool) -> dict[str, Any]:
    """Train, forget and measure; what could not be applied has no distance."""
    forget_N = data.forget_N
    original_SCE, retrained_SCE = train(recipe, data, forget_N | ~forget_N), train(recipe, data, ~forget_N)
    given, closed = head_of(recipe, data, original_SCE[0]), {"curvature": {"estimator": "closed_form"}}
    request = (data.rows_ND[forget_N], data.labels_N[forget_N])
    try:
        result = sfu.unlearn(given, *request, **closed)
    except sfu.ConfigError:  # the l2 that is told contradicts the rows, so its owner does what the message says
        given = replace(given, recipe=replace(given.recipe, estimate_l2=True, trained="early_stopped"))
        result = sfu.unlearn(given, *request, **closed)
    plain = replace(given, recipe=replace(given.recipe, estimate_l2=False), l2=0.0)
    used, head = result.details.get("l2", given.l2), result.head
    retained = (data.rows_ND[~forget_N], data.labels_N[~forget_N])
    rows = plain.rows(*retained, cache=True)
    structure = Structure.shared if plain.loss.name == "quadratic" else Structure.products
    hessian = build_operator(plain.objective(), rows, plain.parameters_CE, structure)
    effect_CE = (retrained_SCE - original_SCE).mean(0)
    scatter = [inner(hessian, one_CE, one_CE) for one_CE in retrained_SCE - original_SCE - effect_CE]
    noise, square = sum(scatter) / len(scatter) / (recipe.seeds - 1), inner(hessian, effect_CE, effect_CE)

    def distance(step_CE: Tensor) -> float:
        beyond = inner(hessian, step_CE - effect_CE, step_CE - effect_CE) - noise
        return (max(0.0, beyond) / max(square - noise, 1e-300)) ** 0.5

    step_CE = head.parameters_CE - given.parameters_CE
    larger = replace(plain, n_train=10**9, weight=plain.weight and 1e12)  # of which all rows are a sample
    truth = sfu.effective_l2(sfu.ForgetRequest(larger, data.rows_ND, data.labels_N)).value
    found = {"noise": (noise / square) ** 0.5, "used": used, "truth": truth}
    if not result.applied:
        return found
    found["c"] = result.details["step_scale"]
    full = build_operator(replace(plain, l2=head.l2).objective(), rows, plain.parameters_CE, structure)
    found["distance"] = distance(step_CE)
    for name, one_CE in zip(("same", "other"), retrained_SCE, strict=False):
        left_CE, before_CE = head.parameters_CE - one_CE, given.parameters_CE - one_CE
        found[name] = (inner(full, left_CE, left_CE) / inner(full, before_CE, before_CE)) ** 0.5
    if result.predicted_distance_gain is not None:
        measured = 2 * inner(full, step_CE, effect_CE) - inner(full, step_CE, step_CE)
        found["gain"] = result.predicted_distance_gain / measured
    if more:
        seen = sfu.unlearn(given, *request, unlabelled=data.unlabelled_UD, **closed)
        found["unlabelled"] = distance(seen.head.parameters_CE - given.parameters_CE)
        known = sfu.ForgetRequest(replace(plain, l2=used), *request)
        exact = Newton(curvature_settings(estimator="exact"))
        known = exact.unlearn(known, sfu.MethodContext(), sfu.RetainedSet(*retained))
        found["known"] = distance(known.head.parameters_CE - given.parameters_CE)
    return found


def broken(recipe: Recipe, found: dict[str, float]) -> list[str]:
    """Return which bounds a row breaks; none where the reference is mostly noise."""
    quiet, low, high = found["noise"] <= NOISY, *PROMISED
    far = quiet and found.get("distance", 0) > recipe.bound
    off = quiet and not low <= found.get("gain", 1) <= high
    return [f"distance above {recipe.bound:g}"] * far + [f"gain outside {low:g} to {high:g}"] * off


def draw(path: Path | None, n_rows: int, seed: int) -> Data:
    if path is None:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        arrays = [torch.tensor(pixels / 64).float(), torch.tensor(labels)] * 2
    else:
        read = read_feature_file(path, TRAIN + TEST, "FILE")
        arrays = [torch.from_numpy(read[name]) for name in TRAIN + TEST]
    features, labels_N, others, of_others = arrays
    generator = torch.Generator().manual_seed(seed)
    index = torch.randperm(len(labels_N), generator=generator)[:n_rows]
    forget_N = torch.zeros(len(index), dtype=torch.bool)
    forget_N[torch.randperm(len(index), generator=generator)[: round(FORGOTTEN * len(index))]] = True
    held_out = (others[-HELD_OUT:], of_others[-HELD_OUT:])
    return Data(features[index], labels_N[index], forget_N, held_out, others[:UNLABELLED])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", nargs="?", type=Path, help="feature file (default: digits)")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--rows", type=int, default=5000, help="training rows")
    parser.add_argument("--only", action="append", help="name of a recipe (repeatable)")
    parser.add_argument("--more", action="store_true", help="with unlabelled rows, and with the Hessian known")
    parser.add_argument("--quick", action="store_true", help="one draw of 1,000 rows, few recipes, few seeds")
    given = parser.parse_args(arguments)
    recipes = [one for one in RECIPES if not given.only or one.name in given.only]
    if given.quick:
        given.draws, given.rows = 1, min(given.rows, 1000)
        recipes = [replace(one, seeds=2, epochs=20) for one in recipes if one.name in QUICK]
    names = ["distance", "noise", "same", "other", "gain", "c", *(["unlabelled", "known"] if given.more else [])]
    print(f"{'recipe':30}{'l2':>10}{'truth':>10}" + "".join(f"{name:>12}" for name in names))
    failed = 0
    for recipe in recipes:
        rows = [measure(recipe, draw(given.features, given.rows, seed).scaled(recipe.norm), given.more)
                for seed in range(given.draws)]  # fmt: skip
        found = {name: float(np.mean([row[name] for row in rows if name in row]))
                 for name in {key for row in rows for key in row}}  # fmt: skip
        wrong = broken(recipe, found)
        failed += bool(wrong)
        first = f"{recipe.name:30}{found['used']:10.2e}{found['truth']:10.2e}"
        cells = "".join(f"{found[name]:12.2f}" if name in found else f"{'-':>12}" for name in names)
        print(f"{first}{cells}  {'; '.join(wrong)}".rstrip(), flush=True)
    print(f"{failed} of {len(recipes)} recipes break a bound.")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
