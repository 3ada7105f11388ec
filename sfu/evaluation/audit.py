"""Compare two heads or models, before and after unlearning, whoever made them.

Shapes: N rows, C classes.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from sfu.arrays import Array, Pairs, as_examples, numbered
from sfu.errors import ConfigError, DataError
from sfu.evaluation.measures import accuracy, agreement, mean_kl, squared_norm
from sfu.evaluation.membership import cross_entropy_per_sample, membership_attack
from sfu.heads.base import Head
from sfu.heads.linear import LinearHead
from sfu.heads.recipe import OPTIMUM
from sfu.heads.settings import LinearSettings
from sfu.heads.train import train_like
from sfu.losses.base import Targets
from sfu.losses.targets import class_numbers, read_labels
from sfu.models.batches import Batch, read_batches
from sfu.models.find_layer import as_rows
from sfu.models.running import evaluating, placed, run, unwrap
from sfu.operators.build import build_operator
from sfu.operators.structure import Structure
from sfu.request import ForgetRequest, RetainedSet
from sfu.schema import Meta, check_number, plain_value

Model: TypeAlias = Head | nn.Module
Examples: TypeAlias = "tuple[Array, Array] | Pairs"
_SPLITS = 5
_TARGETS = (
    "the {name} labels are targets (of a regression, of several labels, or shares), and evaluate compares classifiers "
    "with one class for each row. Give class numbers, of a head whose loss knows classes."
)
_UNKNOWN = (
    "Retrained is not known, because the old head is not at the optimum of an objective that can be trained again. "
    "Give retrained="
)
_ONE_OUTPUT = "Retrained is not known, because sfu does not train heads of one output. Give retrained="


@dataclass(frozen=True)
class Scores:
    """How a model does on some rows.

    Attributes:
        accuracy: In per cent.
        loss: Mean cross-entropy in nats.
    """

    accuracy: float
    loss: float


@dataclass(frozen=True)
class Audit:
    """Two models beside each other, and Retrained beside both if it is known.

    Attributes:
        scores: By rows (``forget``, ``test``, ``retained``) and model (``old``, ``new``, ``retrained``).
        membership: Accuracy of the paper's attack in per cent by model: 50 means that forget rows look like test rows
            of their classes. Empty without test rows; ``None`` with too few. Read it beside Retrained's.
        agreement: Share of forget rows on which old and new predict the same class, in per cent.
        forget_kl: Mean KL divergence of the new predictions on the forget rows from the old ones, in nats.
        distance: Distance of the new head to Retrained in the norm of the retained Hessian, of which 1 is that of the
            old one; ``None`` if Retrained is not known.
    """

    scores: dict[str, dict[str, Scores]]
    membership: dict[str, float | None]
    agreement: float
    forget_kl: float
    distance: float | None = None
    note: str | None = field(default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return asdict(self)

    def summary(self) -> str:
        """Return a table of text."""
        names = [name for name in ("old", "new", "retrained") if name in self.scores["forget"]]
        lines = [f"{'':24}" + "".join(f"{name:>11}" for name in names)]
        for part, scores in self.scores.items():
            lines.append(f"{part + ' accuracy, %':24}" + "".join(f"{scores[name].accuracy:11.1f}" for name in names))
            lines.append(f"{part + ' loss':24}" + "".join(f"{scores[name].loss:11.4f}" for name in names))
        if self.membership:
            told = (self.membership[name] for name in names)
            lines.append(
                f"{'membership attack, %':24}" + "".join(f"{'-' if m is None else f'{m:.1f}':>11}" for m in told)
            )
        lines.append(f"old and new agree on {self.agreement:.1f} % of the forget rows; KL {self.forget_kl:.3g} nats")
        if self.distance is not None:
            lines.append(f"distance to Retrained: {self.distance:.3f} (0: Retrained, 1: the old head)")
        return "\n".join([*lines, *([textwrap.fill(self.note, 80)] if self.note else [])])

    def __repr__(self) -> str:
        """Return the table."""
        return f"Audit(\n{self.summary()}\n)"


def evaluate(
    old: Model,
    new: Model,
    forget: Examples,
    *,
    test: Examples | None = None,
    retained: Examples | None = None,
    retrained: Model | None = None,
    seed: int = 0,
) -> Audit:
    """Compare a head or model with what unlearning made of it.

    Args:
        old: Before: a head, or a PyTorch model, which is run in evaluation mode.
        new: After, of the same kind.
        forget: The forgotten rows: for heads (features, labels), for models raw examples, in any form that
            :func:`sfu.unlearn` takes.
        test: Rows that were in no training, for the membership attack.
        retained: The training rows without the forgotten ones. Two heads at the optimum are then compared with one that
            is trained on these.
        retrained: That model, if you have it.
        seed: Of the membership attack, a whole number of at least 0.

    A single output is read as that of a classifier of two classes, whose labels are 0 and 1.

    Raises:
        DataError: The models differ in kind or shape, or the rows are none, not finite or do not fit them.
        ConfigError: The seed is no such number, or the labels are targets of no classifier.
    """
    seed = plain_value(seed)
    check_number("seed", seed, Meta(at_least=0), whole=True)
    models: dict[str, Model] = {"old": old, "new": new}
    if retrained is not None:
        models["retrained"] = retrained
    models = _alike(models)
    old = models["old"]
    if forget is None:
        raise DataError("forget=None has no rows to compare the models on. Give the forgotten rows and their labels.")
    given = {"forget": forget, "test": test, "retained": retained}
    parts = {name: _read(name, rows, old) for name, rows in given.items() if rows is not None}
    note = None
    if retrained is None and retained is not None and isinstance(old, Head):
        found, note = _retrained(old, parts["forget"], parts["retained"])
        models |= {} if found is None else {"retrained": found}
    logits = {part: {name: _logits(model, read) for name, model in models.items()} for part, read in parts.items()}
    if len({found.shape for found in logits["forget"].values()}) > 1:
        raise DataError("the models have different numbers of outputs, so they are not old and new of one model.")
    labels = {part: read.labels_N for part, read in parts.items()}
    for part, labels_N in labels.items():
        shape, low, high = logits[part]["old"].shape, int(labels_N.min()), int(labels_N.max())
        if len(labels_N) != shape[0] or low < 0 or high >= shape[1]:
            raise DataError(
                f"{part}: the model gives {list(shape)} outputs, and there are {len(labels_N)} labels from {low} to "
                f"{high}. Give one class number for each example."
            )
    scores = {
        part: {
            name: Scores(accuracy(found, labels[part]), float(cross_entropy_per_sample(found, labels[part]).mean()))
            for name, found in of_part.items()
        }
        for part, of_part in logits.items()
    }
    membership: dict[str, float | None] = {}
    if test is not None:
        alike = torch.isin(labels["test"], labels["forget"].unique())
        for name in models:
            own, others = (cross_entropy_per_sample(logits[part][name], labels[part]) for part in ("forget", "test"))
            membership[name] = membership_attack(own, others[alike], n_splits=_SPLITS, seed=seed).mean
    before, after = logits["forget"]["old"], logits["forget"]["new"]
    distance = _distance(models, parts["retained"]) if retained is not None and isinstance(old, Head) else None
    return Audit(scores, membership, agreement(after, before), mean_kl(before, after), distance, note)


def _alike(models: dict[str, Model]) -> dict[str, Model]:
    """Return the models, heads in one dtype on one device.

    Raises:
        DataError: One is neither head nor model, or they are of several kinds or shapes.
    """
    for name, model in models.items():
        if not isinstance(model, Head | nn.Module):
            remedy = "Give its .head or .model" if hasattr(model, "head") else "Give a head of sfu or a PyTorch model"
            raise DataError(f"{name} is a {type(model).__name__}, neither a head nor a model. {remedy}.")
    heads = {name: model for name, model in models.items() if isinstance(model, Head)}
    if not heads:
        return models
    if len(heads) < len(models):
        raise DataError("heads can only be compared with heads, and models with models. Give all of one kind.")
    places = {(head.bias, *head.parameters_CE.shape) for head in heads.values()}
    if len(places) > 1:
        shapes = ", ".join(
            f"{name} {list(head.parameters_CE.shape)} with{'' if head.bias else 'out'} bias"
            for name, head in heads.items()
        )
        raise DataError(
            f"the parameters of the heads are {shapes}, so they are not old and new of one. Give such heads."
        )
    like = heads["old"].parameters_CE
    if len({(head.parameters_CE.dtype, head.parameters_CE.device) for head in heads.values()}) == 1:
        return models
    return {name: head.to(like.device, torch.float64) for name, head in heads.items()}


@dataclass(frozen=True)
class _Part:
    """Some examples: feature rows for heads, or batches of raw inputs for models.

    Attributes:
        labels_N: Class numbers.
        targets_N: Labels as the head takes them: those, or targets ``[N, 1]`` of a single output.
    """

    labels_N: Tensor
    targets_N: Tensor
    features_ND: Tensor | None = None
    batches: Sequence[Batch] = ()


def _read(name: str, given: Examples, model: Model) -> _Part:
    """Return examples with their class numbers."""
    if not isinstance(model, Head):
        batches = list(read_batches(given, name=name)[0])
        found = [cast("Tensor", batch.labels_B) for batch in batches]
        if not found:
            raise DataError(f"{name} has no examples. Give at least one.")
        labels = torch.cat([one.reshape(-1) if one.ndim == 0 else one for one in found])
        numbers = class_numbers(labels, labels.shape[-1])
        numbers = numbers[:, 0] if numbers.shape[1:] == (1,) else numbers
        if numbers.ndim > 1 or numbers.is_complex() or bool((numbers != numbers.long()).any()):
            raise ConfigError(_TARGETS.format(name=name))
        return _Part(numbers.long(), numbers, batches=batches)
    pair = isinstance(given, tuple) and len(given) == 2
    rows, labels = as_examples(given[0], numbered(given[1], model.recipe.classes)) if pair else as_examples(given, None)  # type: ignore[index]
    if rows.ndim < 2 or not rows.numel() or not bool(torch.isfinite(rows).all()):
        raise DataError(
            f"the features of {name} have shape {list(rows.shape)}, or are not all finite. Give at least one row, and "
            "finite numbers."
        )
    labels = read_labels(class_numbers(labels, model.n_classes), len(rows), model.n_classes, model.loss, name)
    if not labels.is_floating_point():
        return _Part(labels, labels, rows)
    is_binary = labels.shape[1] == 1 and model.loss.targets is not Targets.real
    if not is_binary or bool((labels != labels.long()).any()):
        raise ConfigError(_TARGETS.format(name=name))
    return _Part(labels[:, 0].long(), labels, rows)


def _logits(model: Model, part: _Part) -> Tensor:
    if isinstance(model, Head):
        return _of_classes(model.logits(cast("Tensor", part.features_ND)).cpu().double())
    network = unwrap(model)
    with evaluating(network):
        where = placed(network)
        found = [as_rows(run(network, batch.to(*where), {})[0], batch).cpu().double() for batch in part.batches]
    return _of_classes(torch.cat(found))


def _of_classes(logits_NC: Tensor) -> Tensor:
    """Return outputs of at least two classes: a single output is the logit of the second against the first."""
    return logits_NC if logits_NC.shape[1] > 1 else torch.cat([torch.zeros_like(logits_NC), logits_NC], 1)


def _retrained(old: Head, forget: _Part, retained: _Part) -> tuple[Head | None, str | None]:
    """Return the head trained on the retained rows, or why there is none.

    Raises:
        DataError: The rows are not those that ``old`` was trained on without the forgotten ones.
    """
    known = old.recipe.trained == OPTIMUM and not old.recipe.estimate_l2 and old.weight is None
    if not isinstance(old, LinearHead) or not known:
        return None, _UNKNOWN
    if retained.targets_N.is_floating_point():
        return None, _ONE_OUTPUT
    rows_RD = cast("Tensor", retained.features_ND)
    request = ForgetRequest(old, cast("Tensor", forget.features_ND), forget.targets_N)
    request.retained_rows(RetainedSet(rows_RD, retained.targets_N), user="evaluate")
    left = request.at_retained_l2().head
    return train_like(left, rows_RD, retained.targets_N, LinearSettings(l2=left.l2, bias=old.bias), seed=0), None


def _distance(models: dict[str, Model], retained: _Part) -> float | None:
    old, new, target = (models.get(name) for name in ("old", "new", "retrained"))
    if not (isinstance(old, Head) and isinstance(new, Head) and isinstance(target, Head)):
        return None
    rows = old.rows(cast("Tensor", retained.features_ND), retained.targets_N, cache=True)
    hessian = build_operator(target.objective(), rows, old.parameters_CE, Structure.products)
    left, nothing = (squared_norm(one.parameters_CE - target.parameters_CE, hessian) for one in (new, old))
    return math.sqrt(left / nothing) if nothing > 0 else None
