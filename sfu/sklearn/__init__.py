"""Forget rows from estimators of scikit-learn: their settings are translated exactly, and a fitted copy comes back.

    from sfu.sklearn import forget

    forgotten = forget(estimator, X, y, n_train=50_000)
    forgotten.estimator.predict(others)
    print(forgotten.result.explain())

scikit-learn adds the regulariser to the sum of the losses (but for ``SGDClassifier``), so it is worth more once rows
are forgotten. Pipelines that end in one of these estimators have their other steps applied, which saw the data, too,
and stay as they are. Neighbours and class means forget exactly (:mod:`sfu.sklearn.exact`).

Shapes: F rows to forget, D features, C classes or outputs; a binary classifier has one output.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from sfu.arrays import Array, as_tensor, numpy_of
from sfu.errors import ConfigError, DataError
from sfu.heads.base import Head
from sfu.heads.linear import LinearHead
from sfu.heads.recipe import EARLY_STOPPED, MEAN, OPTIMUM, SUM
from sfu.heads.training_record import in_order
from sfu.losses.base import Loss, make_loss
from sfu.sklearn.exact import EXACT, ExactResult, forget_exactly
from sfu.unlearning.result import TRAINED_STEPS, UnlearningResult
from sfu.unlearning.unlearn import unlearn

if TYPE_CHECKING:
    from torch import Tensor

R = TypeVar("R", UnlearningResult, ExactResult)

_OPTIONS = (
    "request", "unlabelled", "curvature", "copies", "reference", "noise_sigma", "steps", "batches", "seed",
)  # fmt: skip
_STEPS = "the steps before the estimator ({}) saw these rows, too, and stay as they are"


@dataclass(frozen=True)
class Forgotten:
    """A fitted copy of the estimator without the rows, and the result of the step or of the exact removal."""

    estimator: Any
    result: UnlearningResult | ExactResult


@dataclass(frozen=True)
class _Recipe:
    """What an estimator minimises, in the terms of sfu."""

    loss: Loss
    l2: float
    l2_reduction: str = SUM
    penalize_bias: bool = False
    trained: str = OPTIMUM


def forget(
    estimator: Any,
    X: Any,
    y: Any,
    *,
    n_train: int | None = None,
    sample_weight: Array | None = None,
    total_weight: float | None = None,
    class_counts: Mapping[Any, int] | Sequence[int] | None = None,
    head: Head | None = None,
    ledger: bool = False,
    **options: Any,
) -> Forgotten:
    """Forget rows from a fitted estimator, from its coefficients and those rows alone.

    ``RidgeClassifier``, ``Ridge`` (one or several outputs), ``LogisticRegression``, ``LinearSVC``, ``SGDClassifier``
    and pipelines that end in one of them are known. ``KNeighborsClassifier``, ``KNeighborsRegressor`` and
    ``NearestCentroid`` forget exactly; they take ``class_counts`` (means alone) and none of the other arguments.

    Args:
        estimator: The fitted estimator; it is not changed.
        X: The rows to forget, as they were given to ``fit``.
        y: Their labels or targets, as they were given to ``fit``.
        n_train: Number of rows that it was fitted to, these included; needed unless it forgets exactly.
        sample_weight: Their sample weights, if it was fitted with sample weights.
        total_weight: Sum of all training rows' sample weights; needed with them.
        class_counts: Number of rows of each class that it was fitted to, by label or in the order of ``classes_``;
            needed for class weights and class means. Balanced weights stay what they were at ``fit``, at a later
            request, too.
        head: For a later request, the head of the result of the one before, ``forgotten.result.head``.
        ledger: Whether the head keeps sums over forgotten rows for later requests (:mod:`sfu.heads.ledger`).
        options: ``request``, ``unlabelled``, ``curvature``, ``copies``, ``reference``, ``noise_sigma``, ``steps``,
            ``batches`` and ``seed``, as for :func:`sfu.unlearn`.

    Raises:
        ConfigError: The estimator is of another kind, has a setting that sfu has no objective for, or something that
            its weights need is missing.
        DataError: It is not fitted, ``head`` is not its own, or the rows do not fit it.
    """
    for name in options:
        if name not in _OPTIONS:
            raise ConfigError(f"{name} is no argument of forget. Further ones are {', '.join(_OPTIONS)}.")
    steps, last = _last_step(estimator)
    if type(last).__name__ in EXACT:
        others: dict[str, Any] = {"sample_weight": sample_weight, "total_weight": total_weight, "head": head}
        others["ledger"] = ledger or None
        if type(last).__name__ != "NearestCentroid":
            others["class_counts"] = class_counts
        for name, value in (others | options).items():
            if value is not None:
                raise ConfigError(f"{type(last).__name__} forgets exactly, and has no use for {name}. Leave it out.")
        changed, told = forget_exactly(last, _transformed(steps, X), y, n_train, class_counts, _named(steps))
        return Forgotten(_with_last(estimator, changed), _with_steps(told, steps))
    if n_train is None:
        raise ConfigError("n_train is missing. Give the number of rows that the estimator was fitted to.")
    recipe, coefficients = _recipe(last), _coefficients(last)
    rows_FD, labels = _transformed(steps, X), _labels(last, recipe, y)
    unlabelled = options.get("unlabelled")
    if steps and unlabelled is not None:
        sets = unlabelled if isinstance(unlabelled, list) else [unlabelled]
        options["unlabelled"] = [_transformed(steps, one) for one in sets]
    fitted = None if head is not None else n_train
    weights, total = _weights(last, labels, sample_weight, total_weight, class_counts, fitted)
    own = _head(recipe, *coefficients, n_train, total, ledger)
    result = unlearn(_continued(head, own), rows_FD, labels, weights=weights, **options)
    return Forgotten(_with_coefficients(estimator, result.head), _with_steps(result, steps))


def _with_steps(result: R, steps: Sequence[Any]) -> R:
    """Return a result that says which steps saw the rows, too."""
    if not steps:
        return result
    note = "; ".join(filter(None, (result.note, _STEPS.format(_named(steps)))))
    return replace(result, note=note, reasons=(*result.reasons, TRAINED_STEPS))


def _named(steps: Sequence[Any]) -> str:
    return ", ".join(type(step).__name__ for step in steps)


def _last_step(estimator: Any) -> tuple[list[Any], Any]:
    """Return the steps of a pipeline before its last, and that."""
    if not hasattr(estimator, "steps"):
        return [], estimator
    *before, last = [step for _, step in estimator.steps]
    return [step for step in before if step not in (None, "passthrough")], last


def _with_last(estimator: Any, last: Any) -> Any:
    """Return a copy of a pipeline that ends in another estimator, or that estimator if there is no pipeline."""
    if not hasattr(estimator, "steps"):
        return last
    changed = copy.copy(estimator)
    *before, (name, _) = estimator.steps
    changed.steps = [*copy.deepcopy(before), (name, last)]
    return changed


def _transformed(steps: Sequence[Any], X: Any) -> Any:
    for step in steps:
        try:
            X = step.transform(X)
        except (ValueError, TypeError) as error:
            told = str(error)[:300].rstrip(".")
            raise DataError(
                f"{type(step).__name__} of the pipeline does not take the rows ({told}). Give them as they were given "
                "to fit."
            ) from error
    return X.toarray() if hasattr(X, "toarray") else X


def _coefficients(estimator: Any) -> tuple[Tensor, Tensor | None]:
    """Return weights ``[C, D]`` and biases ``[C]``, float64."""
    coef = estimator.coef_.toarray() if hasattr(estimator.coef_, "toarray") else estimator.coef_
    weight_CD = torch.from_numpy(np.atleast_2d(np.asarray(coef, np.float64)).copy())
    if not estimator.fit_intercept:
        return weight_CD, None
    bias_C = torch.from_numpy(np.atleast_1d(np.asarray(estimator.intercept_, np.float64)).copy())
    return weight_CD, bias_C.expand(len(weight_CD)).clone()


def _with_coefficients(estimator: Any, head: Head) -> Any:
    """Return a copy of the estimator with the weights of a head, in its own shape and dtype."""
    changed = copy.deepcopy(estimator)
    _, last = _last_step(changed)
    parameters, bias = head.parameters_CE.numpy(), head.bias
    old = last.coef_.toarray() if hasattr(last.coef_, "toarray") else last.coef_
    last.coef_ = parameters[:, : head.n_features].astype(old.dtype).reshape(old.shape)
    if bias:
        intercept = np.asarray(last.intercept_)
        shaped = parameters[:, -1].astype(intercept.dtype).reshape(intercept.shape)
        last.intercept_ = shaped if intercept.ndim else shaped.item()
    for name in ("coef", "intercept"):  # that SGDClassifier goes on from, or takes means of
        for kind in ("_standard_", "_average_"):
            if getattr(last, f"{kind}{name}", None) is not None:
                setattr(last, f"{kind}{name}", np.array(getattr(last, f"{name}_"), ndmin=1))
    return changed


def _labels(estimator: Any, recipe: _Recipe, y: Any) -> Tensor:
    """Return class numbers ``[F]``, or targets ``[F, C]`` of a regression, a multi-label or a binary classifier.

    Raises:
        DataError: A label is none of the estimator's classes.
    """
    if y is None:
        raise DataError("y is missing. Give the labels or targets of the rows to forget, as they were given to fit.")
    binarizer = getattr(estimator, "_label_binarizer", None)
    multilabel = binarizer is not None and str(getattr(binarizer, "y_type_", "")).startswith("multilabel")
    if not hasattr(estimator, "classes_") or multilabel:
        targets = as_tensor(y, "y").double()
        return targets.reshape(len(targets), -1)
    given, classes = numpy_of(y).reshape(-1), list(estimator.classes_)
    numbers = {label: number for number, label in enumerate(classes)}
    strange = next((label for label in given.tolist() if label not in numbers), None)
    if strange is not None:
        shown = ", ".join(map(repr, np.asarray(classes).tolist()))
        raise DataError(
            f"the label {strange!r} is no class of the {type(estimator).__name__}. Its classes are {shown}."
        )
    index_F = torch.tensor([numbers[label] for label in given.tolist()])
    if len(classes) > 2:
        return index_F
    return (2.0 * index_F - 1 if recipe.loss.name == "quadratic" else index_F.double())[:, None]


def _weights(
    estimator: Any, labels: Tensor, sample_weight: Any, total: float | None, class_counts: Any, n_train: int | None
) -> tuple[Tensor | None, float | None]:
    """Return the weights of the rows, sample times class weight, and their sum over all rows of ``fit``."""
    class_weight = getattr(estimator, "class_weight", None)
    if sample_weight is not None:
        sample_weight = as_tensor(sample_weight, "sample_weight").double()
    if (sample_weight is None) != (total is None):
        raise ConfigError("sample_weight and total_weight belong together. Give both, or neither.")
    if class_weight is None:
        return sample_weight, total
    name, classes = type(estimator).__name__, list(estimator.classes_)
    one_by_one = name in ("LinearSVC", "SGDClassifier") or getattr(estimator, "solver", "") == "liblinear"
    if sample_weight is not None or (one_by_one and len(classes) > 2):
        why = "with sample weights" if sample_weight is not None else f"{name}, which weighs the positive class alone"
        raise ConfigError(f"class_weight and {why}: sfu has no such objective. Fit without class_weight.")
    if class_counts is None:
        raise ConfigError(
            f"class_weight={class_weight!r} needs class_counts, the number of training rows of each class."
        )
    counts = as_tensor(in_order(class_counts, classes), "class_counts").double().reshape(-1).tolist()
    whole = sum(counts)
    if len(counts) != len(classes) or (n_train is not None and whole != n_train):
        raise ConfigError(
            f"class_counts={counts} must be {len(classes)} numbers whose sum is that of the rows of fit"
            f"{'' if n_train is None else f', n_train={n_train}'}. Count the labels."
        )
    balanced = [whole / (len(classes) * max(count, 1)) for count in counts]
    of_class = balanced if class_weight == "balanced" else [float(class_weight.get(one, 1.0)) for one in classes]
    index_F = labels if labels.ndim == 1 else (labels[:, 0] > 0).long()
    total = math.fsum(weight * count for weight, count in zip(of_class, counts, strict=True))
    return torch.tensor(of_class, dtype=torch.float64)[index_F], total


def _head(
    recipe: _Recipe, weight_CD: Tensor, bias_C: Tensor | None, n_train: int, weight: float | None, ledger: bool
) -> LinearHead:
    n_outputs, width = weight_CD.shape
    layer = torch.nn.Linear(width, n_outputs, bias=bias_C is not None, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(weight_CD)
        if bias_C is not None:
            layer.bias.copy_(bias_C)
    return LinearHead.from_module(
        layer, l2=recipe.l2, n_train=n_train, loss=recipe.loss, l2_reduction=recipe.l2_reduction,
        penalize_bias=recipe.penalize_bias and bias_C is not None, trained=recipe.trained, weight=weight, ledger=ledger,
    )  # fmt: skip


def _continued(head: Head | None, made: LinearHead) -> Head:
    """Return the head of an earlier request, if there is one and it is that of the estimator.

    Raises:
        DataError: It has other weights or another number of training rows.
    """
    if head is None:
        return made
    if not isinstance(head, Head):
        raise DataError(f"head={type(head).__name__} is no head. Give forgotten.result.head of the request before.")
    same = head.parameters_CE.shape == made.parameters_CE.shape and torch.allclose(
        head.parameters_CE, made.parameters_CE, rtol=1e-5, atol=1e-7
    )
    if not same or head.n_train != made.n_train:
        raise DataError(
            f"head has other weights than the estimator, or {head.n_train} training rows instead of "
            f"n_train={made.n_train}. Give the head and the estimator of the same earlier request, and the number of "
            "rows that were left."
        )
    return head


# What each estimator minimises


def _recipe(estimator: Any) -> _Recipe:
    """Translate the settings of an estimator.

    Raises:
        ConfigError: It is of another kind, or has a setting that sfu has no objective for.
        DataError: It is not fitted.
    """
    kind = type(estimator).__name__
    if kind not in _RECIPES:
        raise ConfigError(
            f"sfu knows no {kind} of scikit-learn. It knows {', '.join([*_RECIPES, *EXACT])}, and pipelines that end "
            "in one of them."
        )
    if not hasattr(estimator, "coef_"):
        raise DataError(f"the {kind} is not fitted, so it has learned nothing. Fit it first.")
    return _RECIPES[kind](estimator)


def _refuse(estimator: Any, key: str, accepted: str) -> ConfigError:
    return ConfigError(
        f"{type(estimator).__name__} has {key}={getattr(estimator, key)!r}, for which sfu has no objective. It knows "
        f"{accepted}."
    )


def _ridge(estimator: Any) -> _Recipe:
    alpha = np.unique(np.asarray(estimator.alpha, np.float64))
    if len(alpha) > 1:
        raise _refuse(estimator, "alpha", "one alpha for all outputs")
    if estimator.positive:
        raise _refuse(estimator, "positive", "positive=False")
    several = type(estimator).__name__ == "RidgeClassifier" and len(np.atleast_2d(estimator.coef_)) > 1
    return _Recipe(make_loss("quadratic", other_target=-1.0) if several else make_loss("quadratic"), float(alpha[0]))


def _logistic(estimator: Any) -> _Recipe:
    penalty, mixed = getattr(estimator, "penalty", "deprecated"), getattr(estimator, "l1_ratio", None)
    if penalty not in ("l2", "deprecated", None):
        raise _refuse(estimator, "penalty", "l2")
    if penalty == "deprecated" and mixed:
        raise _refuse(estimator, "l1_ratio", "l1_ratio=0")
    l2 = 0.0 if penalty is None or math.isinf(estimator.C) else 1 / estimator.C
    one_by_one = estimator.solver == "liblinear" or getattr(estimator, "multi_class", "auto") == "ovr"
    binary = len(estimator.classes_) == 2
    loss = make_loss("logistic" if binary or one_by_one else "softmax")
    penalized = _has_penalized_bias(estimator, estimator.solver == "liblinear")
    return _Recipe(loss, l2, penalize_bias=penalized, trained=_reached(estimator))


def _svc(estimator: Any) -> _Recipe:
    for key, value in (("loss", "squared_hinge"), ("penalty", "l2"), ("multi_class", "ovr")):
        if getattr(estimator, key) != value:
            raise _refuse(estimator, key, value)
    loss = make_loss("squared_hinge")
    penalized = _has_penalized_bias(estimator, True)
    return _Recipe(loss, 1 / (2 * estimator.C), penalize_bias=penalized, trained=_reached(estimator))


def _reached(estimator: Any) -> str:
    """Tell whether the solver ended before its largest number of iterations."""
    return OPTIMUM if np.max(estimator.n_iter_) < estimator.max_iter else EARLY_STOPPED


def _has_penalized_bias(estimator: Any, by_liblinear: bool) -> bool:
    if by_liblinear and estimator.fit_intercept and estimator.intercept_scaling != 1:
        raise _refuse(estimator, "intercept_scaling", "intercept_scaling=1")
    return by_liblinear


def _descent(estimator: Any) -> _Recipe:
    names = {"log_loss": "logistic", "squared_hinge": "squared_hinge"}
    if estimator.loss not in names:
        raise _refuse(estimator, "loss", " and ".join(names))
    if estimator.penalty not in ("l2", None):
        raise _refuse(estimator, "penalty", "l2")
    loss = make_loss(names[estimator.loss])
    halved = 0.5 if estimator.loss == "squared_hinge" else 1.0  # sfu's is half of scikit-learn's
    l2 = 0.0 if estimator.penalty is None else halved * estimator.alpha
    return _Recipe(loss, l2, MEAN, trained=EARLY_STOPPED)


_RECIPES: dict[str, Callable[[Any], _Recipe]] = {
    "RidgeClassifier": _ridge, "Ridge": _ridge, "LogisticRegression": _logistic, "LinearSVC": _svc,
    "SGDClassifier": _descent,
}  # fmt: skip
