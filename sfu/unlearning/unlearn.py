"""Unlearn in one call, for those who hold a head and a deletion request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch

from sfu.arrays import Array, Pairs, as_examples, as_tensor, numbered
from sfu.curvature.settings import CurvatureSettings, OnDoubt, curvature_settings
from sfu.curvature.statement import check_statement, estimate_l2
from sfu.data.settings import RANDOM
from sfu.deadline import limit_time
from sfu.errors import ConfigError, DataError
from sfu.heads.base import Head
from sfu.heads.recipe import Reference
from sfu.heads.training_record import TrainingRecord
from sfu.losses.targets import class_numbers
from sfu.models.classifier import Classifier, require_order
from sfu.names import counted
from sfu.request import Access, ForgetRequest, MethodContext
from sfu.schema import Meta, check_number, plain_value
from sfu.seeds import PURPOSES, derive_seed
from sfu.unlearning.methods.newton import Newton
from sfu.unlearning.result import ALREADY_FORGOTTEN, Remark, UnlearningResult

_ROUNDED = 0.01
"""Outputs of a model in half precision may be so far off, as a share of the largest."""
_BACKBONE = "the backbone was trained on these rows, too, and keeps what it learned from them: only the head forgets"


def unlearn(
    head: Head | torch.nn.Module,
    features: Array | Pairs | Mapping[str, Any],
    labels: Array | None = None,
    *,
    record: TrainingRecord | Head | None = None,
    layer: str | None = None,
    in_place: bool = False,
    views: Array | None = None,
    unlabelled: Array | Sequence[Array] | None = None,
    request: str = RANDOM,
    weights: Array | None = None,
    logits: Array | None = None,
    copies: bool = False,
    curvature: CurvatureSettings | Mapping[str, Any] | None = None,
    noise_sigma: float = 0.0,
    steps: int = 1,
    batches: int = 1,
    reference: str = Reference.same_recipe.value,
    on_doubt: str = OnDoubt.withhold.value,
    time_limit: float | None = None,
    seed: int = 0,
) -> UnlearningResult:
    """Take source-free Newton steps (one by default): ``unlearned_minus`` outside the experiment framework.

    Give a head and features, or a whole model of PyTorch, the raw examples and ``record``: the model is run on the
    examples, in evaluation mode, and its last linear layer unlearns. The result then has the ``model``, too.

    Arrays may be tensors of any dtype and device, NumPy arrays, nested lists, or data frames and series (whatever has
    ``to_numpy()``). The head of the result remembers, through ``save`` and ``load_head``, how many rows were forgotten
    in how many requests, and recognises these rows if they are requested again: they are left out then, and the note
    says so.

    Args:
        head: The trained head, with its loss, its l2 and its number of training rows. For a later request, give the
            head of the result before. Or a trained model: a classifier or regression whose outputs ``[F, C]`` are those
            of a linear layer (or of a 1 x 1 convolution, at one position or as the mean of all).
        features: Features of the examples to forget, ``[F, D]``, from the backbone the head was trained on; or a
            ``DataLoader``, ``Dataset``, iterator or list of pairs (features, labels), of single rows or of batches. For
            a model, raw inputs in the same forms, of batches; a batch may also be a mapping of keyword arguments with
            the key ``labels``, as Hugging Face has them.
        labels: Their labels, or names of classes if the head knows them; left out if ``features`` gives pairs. For a
            head of C classes, ``[F]`` integers or one-hot rows ``[F, C]``. For a multi-label head, zeros and ones
            ``[F, C]``; for a regression, real numbers ``[F, C]``. For a head of one output, ``[F]`` or ``[F, 1]``: 0
            and 1, -1 and 1, booleans, or real numbers, by the loss (:func:`sfu.losses.targets.read_labels`).
        record: With a model: how its last layer was trained. For a later request, the head of the result before.
        layer: With a model: name of the classifier layer, such as ``"fc"``; by default, the layer whose outputs are
            those of the model.
        in_place: With a model: whether to change it, and not a copy.
        views: Features of V augmented copies (flipped, cropped, ...) of the same examples, ``[V, F, D]``, whose
            Hessians are averaged in; no label or other image is needed for them.
        unlabelled: Features of unlabelled rows like the training rows, ``[U, D]``, such as the model's traffic or
            related public data, or a list of several such sets. They show the curvature that the forget rows do not.
            For a model, these and the views are raw inputs, too.
        request: What the rows are: ``random`` (a random sample of the training rows, as far as you know), ``class``,
            ``person`` or ``selected``. A declaration can only raise the share of curvature taken to be unseen.
        weights: Their sample weights, ``[F]``, if the head was trained with sample weights.
        logits: The model's own outputs for the rows, ``[F, C]``, if you have them: features that are not the layer's
            inputs (another layer's, other preprocessing, dropout) are then refused.
        copies: Whether the training set held each row as often as it is given. Otherwise equal rows with equal labels
            count once.
        curvature: Estimator and regularisation, as a ``CurvatureSettings`` or a mapping of its keys; the default is the
            cross-validated PSD fit.
        noise_sigma: Standard deviation of Gaussian noise on the parameters.
        steps: Newton steps, the curvature moved along the path before each.
        batches: Number of parts, forgotten one after another.
        reference: Where the step from a head that was stopped early leads: to where the same training would have ended
            without the rows (``same_recipe``), or to the ``optimum``, which finishes the training, too, and needs a
            head with the gradient of its training objective.
        on_doubt: What to do with a step that is predicted to do harm, or with rows that contradict what is known of the
            head: ``withhold`` it, or ``apply`` the step all the same.
        time_limit: Seconds of wall time after which to stop with nothing changed. It is looked at between passes over
            rows, batches of a model and matrix factorisations, so a call can take that much longer.
        seed: Seed of the perturbations, folds and noise.

    Returns:
        The unlearned head, whether the step was applied, its predicted gain, and notes. An l2 that was estimated is in
        its ``details`` as ``l2`` and ``l2_interval``, which holds that of all training rows with probability 0.9, and
        in the unlearned head.

    Raises:
        DataError: ``head`` is not one, or the examples are no numbers or do not fit it; or its l2 is to be estimated,
            and they are no random sample, or too few; or a random sample contradicts the labels, the scale of the
            features, or the head's training loss.
        ConfigError: The settings cannot work, or need the retained data; or the examples contradict the head's loss or
            l2; or the labels are targets, and the request is for a class or the loss has class weights.
        SingularHessianError: The curvature estimate cannot be inverted.
        SolverError: The fit failed.
        TimeLimitError: The time limit is over.
    """
    seed = plain_value(seed)
    check_number("seed", seed, Meta(at_least=0), whole=True)
    for name, value in (("copies", copies), ("in_place", in_place)):
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r}. Give True or False.")
    if time_limit is not None:
        check_number("time_limit", time_limit, Meta(above=0))
    method = _method(curvature, noise_sigma, steps, batches, reference, on_doubt)
    about: dict[str, Any] = {"method": method, "seed": seed, "request": request, "weights": weights, "copies": copies}
    if not isinstance(head, torch.nn.Module):
        _require_head(head, record=record, layer=layer, in_place=in_place or None)
        more = _sets_of(unlabelled)
        with limit_time(time_limit):
            return _unlearn(head, cast("Array | Pairs", features), labels, views, more, logits=logits, **about)
    if logits is not None:
        raise ConfigError(
            "logits are for features of a head: a model's own outputs are compared anyway. Leave them out."
        )
    require_order(features, weights=weights, views=views)
    with limit_time(time_limit):
        model = Classifier.read(head, features, labels, record, layer)
        sets = unlabelled if isinstance(unlabelled, list) else [] if unlabelled is None else [unlabelled]
        more = [model.more(rows, "unlabelled") for rows in sets]
        views = None if views is None else [model.more(view, "views") for view in cast("Sequence[Any]", views)]
        result = _unlearn(model.head, model.features_FD, model.labels_F, views, more, marks_FB=model.marks_FB, **about)
    details = {"layer": model.name, **result.details}
    return replace(result, details=details, model=model.with_head(result.head, in_place))


def _unlearn(
    head: Head,
    features: Array | Pairs,
    labels: Array | None,
    views: Array | None,
    more: Sequence[Array],
    *,
    method: Newton,
    seed: int,
    request: str,
    weights: Array | None,
    copies: bool,
    marks_FB: torch.Tensor | None = None,
    logits: Array | None = None,
) -> UnlearningResult:
    """Forget rows of features from a head."""
    config = method.curvature
    seeds = {purpose: derive_seed(seed, purpose) for purpose in (*PURPOSES, "folds")}
    default = torch.get_default_device().type
    with nullcontext() if default == "cpu" else torch.device("cpu"):  # the rest follows the head's device
        features_FD, labels_F = as_examples(features, numbered(labels, head.recipe.classes))
        if logits is not None:
            _require_logits(head, features_FD, as_tensor(logits, "logits"))
        made = ForgetRequest(
            replace(head, forgotten=head.forgotten.keyed()),
            features_FD,
            class_numbers(labels_F, head.n_classes),
            views_VFD=None if views is None else as_tensor(views, "views"),
            unlabelled=tuple(as_tensor(rows, "unlabelled") for rows in more),
            kind=request,
            weights_F=None if weights is None else as_tensor(weights, "weights"),
            marks_FB=marks_FB,
        )
        forgotten, rows = made.head.forgotten, (made.recognised_by, made.labels_F)
        new = forgotten.new_rows(*rows)
        name, again = f"Newton step, curvature.estimator={config.estimator}", made.n_forget - len(new)
        before = f"{again:,} of {counted(made.n_forget, 'row')} had been forgotten from this head before"
        if not len(new):
            note = f"not applied: {before}, so there is nothing left to do"
            return UnlearningResult(head, applied=False, note=note, method=name, reasons=(ALREADY_FORGOTTEN,))
        once = new if copies else forgotten.new_rows(*rows, copies=False)
        equal, details = len(new) - len(once), dict[str, Any]()
        remarks = [Remark(ALREADY_FORGOTTEN, f"{before} and are left out")] if again else []
        if equal:
            rows_given = counted(equal, "row")
            told = f"{rows_given} given again in this request count once (copies=True counts them all)"
            remarks.append(Remark("repeated_rows", told))
        made = made.rows(once) if again or equal else made
        if head.recipe.estimate_l2:
            made, found = estimate_l2(made, force=config.applies_anyway)
            low, high = found.interval
            details = {"l2": found.value, "l2_interval": found.interval}
            told = f"l2 = {found.value:.3g} ({low:.3g} to {high:.3g}) is estimated from the rows to forget"
            remarks.append(Remark("l2_estimated", told))
        elif not config.applies_anyway:
            check_statement(made)
        result = method.unlearn(made.private(), MethodContext(seeds))
    last = [] if head.recipe.frozen_backbone else [Remark("trained_backbone", _BACKBONE)]
    notes = [*(one.text for one in remarks), result.note, *(one.text for one in last)]
    unchanged = result.head.forgotten.requests == head.forgotten.requests
    return replace(
        result, method=name, head=head if unchanged else result.head, details={**details, **result.details},
        note="; ".join(filter(None, notes)) or None,
        reasons=(*(one.code for one in remarks), *result.reasons, *(one.code for one in last)),
    )  # fmt: skip


def _require_logits(head: Head, features_FD: torch.Tensor, logits_FC: torch.Tensor) -> None:
    """Compare the head's outputs for the features with those of the model.

    Raises:
        DataError: They differ by more than the rounding of a half-precision model.
    """
    own_FC, given_FC = head.logits(features_FD).cpu().double(), logits_FC.cpu().double()
    if own_FC.shape != given_FC.shape:
        shapes = f"{list(given_FC.shape)}, but the head gives {list(own_FC.shape)}"
        raise DataError(f"logits are {shapes}. Give the outputs of the model for these rows.")
    apart, size = float((own_FC - given_FC).abs().max()), float(given_FC.abs().max())
    if not (math.isfinite(size) and apart <= _ROUNDED * size):
        raise DataError(
            f"the head gives other outputs for these features than the model: they differ by up to {apart:.3g}, where "
            f"the logits reach {size:.3g}. Give the inputs of this very layer, without dropout, as the model computes "
            "them."
        )


def _method(
    curvature: CurvatureSettings | Mapping[str, Any] | None, noise_sigma: float, steps: int, batches: int,
    reference: str, on_doubt: str,
) -> Newton:  # fmt: skip
    """Return the method of these settings, which must not need more than the rows to forget."""
    config = curvature_settings(curvature)
    if not isinstance(on_doubt, str) or on_doubt not in {known.value for known in OnDoubt}:
        raise ConfigError(f"on_doubt={on_doubt!r} is unknown. Choose 'withhold' or 'apply'.")
    if on_doubt == OnDoubt.apply.value:
        config = replace(config, on_doubt=OnDoubt.apply)
    if not isinstance(reference, str) or reference not in {known.value for known in Reference}:
        raise ConfigError(f"reference={reference!r} is unknown. Choose 'same_recipe' or 'optimum'.")
    method = Newton(config, noise_sigma, steps, batches, Reference(reference))
    if method.access is Access.RETAINED:
        raise ConfigError(f"curvature.estimator={config.estimator} needs the retained data, and unlearn has none.")
    if config.augment:
        raise ConfigError(
            f"curvature.augment={list(config.augment)} needs the images, which only experiments have. Here, give the "
            "augmented features as views."
        )
    return method


def _require_head(head: Any, **of_models: Any) -> None:
    if not isinstance(head, Head):
        make = "LinearHead.from_module(layer, l2=..., n_train=..., loss=...)"
        remedy = f"Make one from the classifier layer, {make}, or load one; or give the whole model"
        if isinstance(head, UnlearningResult):
            remedy = "Give its .head"
        raise DataError(f"head is a {type(head).__name__}, not a head of sfu. {remedy}.")
    for name, value in of_models.items():
        if value is not None:
            given = value if isinstance(value, str | bool) else type(value).__name__
            raise ConfigError(
                f"{name}={given} is for a whole model, but a {type(head).__name__} is given. Leave {name} out, or give "
                "the model."
            )


def _sets_of(unlabelled: Any) -> list[Array]:
    """Return a list of sets of unlabelled rows, given one, several or none."""
    if unlabelled is None:
        return []
    several = isinstance(unlabelled, list | tuple) and len(unlabelled) and getattr(unlabelled[0], "ndim", 0) == 2
    return list(unlabelled) if several else [unlabelled]
