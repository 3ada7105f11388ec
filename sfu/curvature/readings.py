r"""Find the one change of what is said of a head under which its forget rows look like a random sample.

A mean gradient unlike that of training says that the rows are no random sample of the training rows, or that something
is said wrongly; it cannot tell which. So the same rows are read in other ways: with another loss, with the classes
renamed so that most labels are the predicted ones, or with features on another scale. A random sample is known by a
gradient that deviates no more than sampling explains, and by its l2: kappa is near the stated l2. Rows that are no
random sample meet both under no other reading, as the requests of ``scripts/requests.py`` show.

Shapes: F rows, C classes, E = D features (+ 1 with bias).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from sfu.curvature.effective_l2 import EffectiveL2, effective_l2, regularized
from sfu.curvature.evidence import compare_gradient
from sfu.curvature.near_duplicates import effective_rows
from sfu.heads.base import Head
from sfu.lazy import torch
from sfu.losses.base import Loss, make_loss
from sfu.request import ForgetRequest

LOSS, LABELS, FEATURES, FACTOR = "loss", "labels", "features", "factor"
LOSSES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("softmax", {}), ("softmax", {"label_smoothing": 0.1}), ("quadratic", {}), ("quadratic", {"other_target": -1.0}),
    ("logistic", {}), ("squared_hinge", {}),
)  # fmt: skip
"""What heads are usually trained with."""
DEVIATIONS, _RATIO = 3.0, 1.2
"""A stated number is contradicted if it is so many standard errors from the one that the rows show, and this times it
or its inverse: a smaller error hardly matters."""
_AGREES = 2.0  # standard errors
_LIKELY = 0.05
"""A random sample has a gradient whose p-value is at least this, 19 times in 20."""
_FEW = 30
"""Fewer rows with a gradient look like a random sample of anything; of 7,338 requests, those that did had up to 22."""
_FURTHEST, _PLACES = 256.0, 65  # factors of features that are looked at
_AT_OPTIMUM = 1e-3  # norm of the gradient over that of the regulariser's


@dataclass(frozen=True)
class Reading:
    """A change under which the rows look like a random sample of the training rows.

    Attributes:
        kind: What is changed: :data:`LOSS`, :data:`LABELS`, :data:`FEATURES` (rows divided by their norms) or
            :data:`FACTOR`: features multiplied by a number that is fitted to the rows, so that the smallest of all rows
            may look like a random sample, too.
        what: The change, such as ``with loss='softmax'``.
        remedy: What to do if it is right: a sentence.
        p: Probability that a random sample's gradient deviates more.
    """

    kind: str
    what: str
    remedy: str
    p: float


def settled(request: ForgetRequest, l2: float) -> ForgetRequest:
    """Return the request with another l2, which is not to be estimated."""
    head = request.head
    recipe = replace(head.recipe, estimate_l2=False)
    return replace(request, head=replace(head, l2=max(l2, 0.0), recipe=recipe))


def readings(request: ForgetRequest) -> list[Reading]:
    """Return the changes under which the rows look like a random sample, factors last, and else the likeliest first.

    None is looked for if the rows have targets instead of class numbers, or if the head is not linear, not at its
    optimum by what is said of it, or has a certificate.
    """
    head = request.head
    linear = head.feature_weights_CD is not None and request.labels_F.ndim == 1
    if not linear or head.certificate is not None or not _at_optimum(head):
        return []
    found = []
    for kind, what, remedy, changed in _changes(request):
        kappa = effective_l2(changed)
        if not _agrees(kappa, head) or _telling(changed) < _FEW:
            continue
        p = compare_gradient(settled(changed, kappa.value)).p
        if p is not None and p >= _LIKELY:
            found.append(Reading(kind, what, remedy, p))
    return sorted(found, key=lambda reading: (reading.kind == FACTOR, -reading.p))


def _at_optimum(head: Head) -> bool:
    if head.recipe.estimate_l2:
        return True
    return float(head.gradient_CE.norm()) <= _AT_OPTIMUM * head.l2 * float(head.parameters_CE.norm())


def _agrees(kappa: EffectiveL2, head: Head) -> bool:
    """Tell whether the l2 that a reading shows agrees with the one stated, if one is."""
    return head.recipe.estimate_l2 or abs(kappa.deviations(head.l2)) <= _AGREES or alike(head.l2, kappa.value)


def alike(stated: float, shown: float, ratio: float = _RATIO) -> bool:
    """Tell whether a stated number is so near the one that rows show that the difference hardly matters."""
    return stated / ratio <= shown <= stated * ratio


def _telling(request: ForgetRequest) -> float:
    """Return for how many rows the rows count by their squared gradients."""
    loss, parameters_CE = request.head.loss, request.head.parameters_CE
    squares = [
        loss.slopes(chunk.outputs(parameters_CE), chunk.labels_B).square().sum(1) * chunk.squares_of_rows()
        for chunk in request.data().chunks()
    ]
    squares_F = torch.cat(squares).double()
    return effective_rows(squares_F) if bool(squares_F.any()) else 0.0


def _changes(request: ForgetRequest) -> Iterator[tuple[str, str, str, ForgetRequest]]:
    """Yield each change: what it is of, what it is, what to do if it is right, and the changed request."""
    kept = replace(request.head.kept, sketch=None, data_hessian=None)  # those of another loss have another shape
    request = replace(request, head=replace(request.head, kept=kept))
    head, features_FD = request.head, request.features_FD.to(request.head.parameters_CE)
    for name, settings in LOSSES:
        loss = make_loss(name, class_weights=head.loss.class_weights, **settings)
        if loss != head.loss:
            given = described(loss)
            yield LOSS, f"with loss={given}", f"Give loss={given}.", replace(request, head=replace(head, loss=loss))
    names_C = _names(request)
    if names_C is not None:
        moved = [f"{old} to {new}" for old, new in enumerate(names_C.tolist()) if old != new]
        renamed = ", ".join(moved[:3]) + (", ..." if len(moved) > 3 else "")
        yield (
            LABELS, f"with the classes renamed ({renamed})", "Give the class numbers of training.",
            replace(request, labels_F=names_C[request.labels_F]),
        )  # fmt: skip
    remedy = "Scale the features as in training."
    for factor in (_factor_by_mean(request), _factor_by_l2(request)):
        if factor is not None and not alike(1.0, factor):
            what = f"with the features multiplied by {factor:.2g}"
            yield FACTOR, what, remedy, replace(request, features_FD=factor * features_FD)
    norms_F1 = features_FD.norm(dim=1, keepdim=True)
    if bool((norms_F1 > 0).all()):
        yield (
            FEATURES,
            "with every row divided by its norm",
            remedy,
            replace(request, features_FD=features_FD / norms_F1),
        )


def described(loss: Loss) -> str:
    """Return what to give as ``loss``, class weights aside."""
    usual = make_loss(loss.name).as_json()
    own = {key: value for key, value in loss.as_json().items() if value != usual[key] and key != "class_weights"}
    settings = "".join(f", {key}={value:g}" for key, value in own.items())
    return f"make_loss({loss.name!r}{settings})" if own else repr(loss.name)


def _names(request: ForgetRequest) -> torch.Tensor | None:
    """Return other names of the classes, one to one, under which most labels are the predicted ones."""
    from scipy.optimize import linear_sum_assignment

    n_classes, labels_F = request.head.n_classes, request.labels_F
    predicted_F = request.head.logits(request.features_FD).argmax(1)
    counts_CC = (labels_F * n_classes + predicted_F).bincount(minlength=n_classes**2).reshape(n_classes, n_classes)
    names_C = torch.from_numpy(linear_sum_assignment(counts_CC.cpu().numpy(), maximize=True)[1]).to(labels_F)
    kept = names_C == torch.arange(n_classes).to(labels_F)
    return None if bool(kept.all()) else names_C


def _factor_by_mean(request: ForgetRequest) -> float | None:
    """Return the factor of the features that brings their mean nearest to that of training, if this is kept."""
    if request.head.kept.mean_D is None:
        return None
    mean_D = request.features_FD.mean(0, dtype=torch.float64)
    factor = float(request.head.kept.mean_D.to(mean_D) @ mean_D) / float(mean_D.square().sum())
    return factor if factor > 0 else None


def _factor_by_l2(request: ForgetRequest) -> float | None:
    """Return the factor of the features at which the rows show the stated l2; ``None`` if there is none.

    As the features grow, kappa rises, and falls below 0 where larger outputs would fit the rows worse. Where it falls
    is right: where it rises, the head would be far from fitting its rows.
    """
    import numpy as np
    from scipy.optimize import brentq

    if request.head.recipe.estimate_l2:
        return None
    head, width, weight_CE = request.head, request.head.n_features, regularized(request)
    shares_F, square = request.data().shares_N.to(weight_CE), weight_CE.square().sum()
    features_FD, parameters_CE = request.features_FD.to(weight_CE), head.parameters_CE.to(weight_CE)
    along_FC, along_weight_FC = (features_FD @ one_CE[:, :width].T for one_CE in (parameters_CE, weight_CE))
    bias_C, weight_of_bias_C = (one_CE[:, width:].sum(1) for one_CE in (parameters_CE, weight_CE))

    def exceeds(factor: float) -> float:
        slopes_FC = head.loss.slopes(factor * along_FC + bias_C, request.labels_F)
        values_F = (slopes_FC * (factor * along_weight_FC + weight_of_bias_C)).sum(1)
        return float(-(shares_F @ values_F) / square) - head.l2

    places = np.geomspace(1 / _FURTHEST, _FURTHEST, _PLACES)
    above = [exceeds(place) >= 0 for place in places]
    for index in range(1, _PLACES):
        if above[index - 1] and not above[index]:
            return float(brentq(exceeds, places[index - 1], places[index], xtol=1e-3 * places[index]))
    return None
