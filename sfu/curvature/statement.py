"""Compare what is said of a head with the rows to forget, before anything is done.

A check that fails raises an error that names the mistake. Most rows that are no random sample contradict nothing: what
is left of their gradient tells them apart, or no other reading of them fits. Hard rows may contradict an l2.

Shapes: F rows, C classes.
"""

from __future__ import annotations

import math

from sfu.curvature.caution import assess
from sfu.curvature.effective_l2 import EffectiveL2, effective_l2, mean_over_training, regularized
from sfu.curvature.evidence import FALSE_ALARMS, compare_gradient
from sfu.curvature.readings import DEVIATIONS, FACTOR, LABELS, LOSS, Reading, alike, described, readings, settled
from sfu.data.settings import RANDOM
from sfu.errors import ConfigError, DataError
from sfu.heads.recipe import OPTIMUM
from sfu.lazy import torch
from sfu.losses.quadratic import Quadratic
from sfu.names import counted
from sfu.request import ForgetRequest

_FEW = 20  # rows; the intervals of fewer were too narrow
_FEWEST = 100  # fewer rows hide how skewed their values are
_LOSS_RATIO = 1.05  # rows that were not trained on fit worse by this, even if the head hardly overfits
_SAME_SUM, _OTHER_SUM = 1e-3, 0.4  # deviations of the sum of a row's outputs, in units of the targets' difference
_FORCED = 'on_doubt="apply"'


def check_statement(request: ForgetRequest) -> None:
    """Run all checks of this module.

    Raises:
        ConfigError: The loss or l2 contradicts the head or a random request.
        DataError: The labels, the features or the training loss do.
    """
    check_sums(request)
    check_readings(request)
    check_loss(request)
    check_l2(request)


def check_sums(request: ForgetRequest) -> None:
    """Compare the sums of the rows' outputs with those of squared error on class numbers, whatever the rows are.

    With a bias, the targets' sum is fitted exactly by the sum of the outputs, as it is the same for each row. Neither
    few rows nor rows that are no random sample change that.

    Raises:
        ConfigError: The head's loss is quadratic and the sums are far from it, or they are as exact as that under
            another loss.
    """
    head, n_classes = request.head, request.head.n_classes
    plain = head.feature_weights_CD is not None and head.bias and head.certificate is None
    if not plain or request.labels_F.ndim != 1:
        return
    sums_F = head.logits(request.features_FD).double().sum(1)
    loss = head.loss
    if isinstance(loss, Quadratic):
        if head.recipe.trained != OPTIMUM:
            return
        bias_C, gradient_C = head.parameters_CE[:, -1], head.gradient_CE[:, -1]
        pull = head.l2 * float(head.regularized_E[-1]) * float(bias_C.sum())
        wanted, found = _sum_of_targets(loss, n_classes) + float(gradient_C.sum()) - pull, float(sums_F.mean())
        if abs(found - wanted) > _OTHER_SUM * (loss.target_scale - loss.other_target):
            raise ConfigError(
                f"loss={described(loss)} contradicts the head: a row's outputs sum to {found:.2g} on average, but to "
                f"{wanted:.2g} where squared error was minimised on such targets. Give the loss of training, with the "
                f"targets of training; {_FORCED} goes on all the same."
            )
        return
    for made in (Quadratic(), Quadratic(other_target=-1.0)):
        total = _sum_of_targets(made, n_classes)
        if total != 0 and float((sums_F - total).abs().max()) <= _SAME_SUM:
            raise ConfigError(
                f"loss={described(loss)} contradicts the head: the outputs of every row sum to {total:g}, as those of "
                f"heads do that minimise squared error. Give loss={described(made)}; {_FORCED} goes on all the same."
            )


def _sum_of_targets(loss: Quadratic, n_classes: int) -> float:
    return loss.target_scale + (n_classes - 1) * loss.other_target


def check_readings(request: ForgetRequest) -> None:
    """Refuse a random request whose gradient is unlike training's whatever l2 is, if another reading explains it.

    Raises:
        ConfigError: It would be explained by another loss.
        DataError: It would be explained by other names of the classes, or by rows of norm 1.
    """
    if not _comparable(request):
        return
    stated = compare_gradient(request)
    if _likely(stated.p) or _likely(compare_gradient(settled(request, effective_l2(request).value)).p):
        return
    found = [reading for reading in readings(request) if reading.kind != FACTOR]
    if not found:
        return
    first = found[0]
    what = {LOSS: f"loss={described(request.head.loss)} contradicts", LABELS: "the labels contradict"}
    contradicts = what.get(first.kind, "the features contradict")
    message = (
        f"{contradicts} the head: {stated.reason}. But {_either(found)} the rows to forget look like a random sample "
        f'of the training rows. {first.remedy} If nothing is wrong, give request="selected", or {_FORCED}.'
    )
    raise ConfigError(message) if first.kind == LOSS else DataError(message)


def check_l2(request: ForgetRequest) -> None:
    """Compare the l2 that a head states with the one that a random request shows.

    Nothing is compared where they may differ for another reason: the request is declared to be no random sample, or
    what kappa leaves of its gradient is unlike a random sample's; the head has served a request, so it is only near an
    optimum; or there are fewer than 100 rows.

    Raises:
        ConfigError: They contradict each other.
        DataError: The rows show no l2 of at least 0: they are not as they were in training.
    """
    if not _comparable(request):
        return
    head, found, weight_CE = request.head, effective_l2(request), regularized(request)
    of_gradient = float((head.rows_gradient_CE.double() * weight_CE).sum() / weight_CE.square().sum())
    deviations, shown = found.deviations(head.l2 - of_gradient), found.value + of_gradient
    plainly = abs(shown - head.l2) / found.error if found.error > 0 else math.inf
    if abs(deviations) <= DEVIATIONS or alike(head.l2, shown) or compare_gradient(settled(request, shown)).alarm:
        return
    low, high = (bound + of_gradient for bound in found.interval)
    explained = _explained(request)
    if shown <= 0:
        raise DataError(
            f"the rows to forget contradict the head and its l2={head.l2:.3g}: smaller weights would fit them better, "
            f"as if l2 were {shown:.3g}. The labels, the scale of the features or the loss differ from training, or "
            f'these rows were not trained on. {explained}Check them, or give request="selected" if the rows were '
            "selected because they fit badly."
        )
    raise ConfigError(
        f"l2={head.l2:.3g} contradicts the rows to forget. If they are a random sample of the training rows, the head "
        f"was trained as if l2 were {shown:.3g} ({low:.3g} to {high:.3g}), {plainly:.1f} standard errors away. "
        "AdamW's weight decay is no l2, training may have stopped early or used mixup, the loss or the scale of the "
        f"features may be another one, or these rows were not trained on (docs/heads.md). {explained}"
        'Give l2="estimate" or the right loss, or request="selected" if the rows are no random sample.'
    )


def check_loss(request: ForgetRequest) -> None:
    """Compare the mean loss of a random request with that of the training rows, if the head's recipe has it.

    Rows that were not trained on fit worse, though their gradient may look like a random sample's. Rows whose gradient
    does not are served with care, so nothing is compared for them, nor where :func:`check_l2` would compare nothing.

    Raises:
        DataError: That of the request is larger by more than 3 standard errors and 5 %.
    """
    head, training_loss = request.head, request.head.recipe.training_loss
    if training_loss is None or not _comparable(request):
        return
    values = [
        head.loss.values(one.outputs(head.parameters_CE), one.labels_B).sum(-1) for one in request.data().chunks()
    ]
    mean = mean_over_training(request, torch.cat(values).double())
    worse = mean.deviations(training_loss) > DEVIATIONS and mean.value > _LOSS_RATIO * training_loss
    if not worse or compare_gradient(request).alarm:
        return
    low, high = mean.interval
    raise DataError(
        f"the mean loss of the rows to forget is {mean.value:.3g}, but that of the training rows is "
        f"{training_loss:.3g}, and not within {low:.3g} to {high:.3g}. These rows were not trained on, or the loss, "
        f"the labels or the scale of the features are not those of training. {_explained(request)}Check them, or give "
        f'request="selected" if the rows were selected because they fit badly; {_FORCED} goes on all the same.'
    )


def estimate_l2(request: ForgetRequest, *, force: bool = False) -> tuple[ForgetRequest, EffectiveL2]:
    """Return the request with a head whose l2 is the one that its rows show; ``force`` takes them for a random sample.

    Raises:
        ConfigError: The loss contradicts the head.
        DataError: The rows are no random sample, or too few to show an l2 above 0, or their loss is not that of the
            training rows.
    """
    if not force:
        check_sums(request)
    remedy = "Give l2 as a number: sfu.effective_l2 reads it off any random sample of the training rows."
    if not (force or _may_be_random(request)):
        raise DataError(
            "the head's l2 is to be estimated, but only a random sample of the training rows shows it, and the request "
            f"is of kind {'class' if request.kind == RANDOM else request.kind}. {remedy}"
        )
    found = effective_l2(request)
    if request.n_forget < _FEW or not found.interval[0] > 0:
        raise DataError(
            f"the head's l2 is to be estimated, but {counted(request.n_forget, 'row')} do not show that it is above 0: "
            f"{found.value:.3g} ({found.interval[0]:.3g} to {found.interval[1]:.3g}). They are fewer than {_FEW} or "
            "still too few, or no random sample of the training rows, or their labels, their scale or the loss are not "
            f"those of training. {_explained(request)}{remedy}"
        )
    made = settled(request, found.value)
    reasons = () if force else assess(made).reasons
    if reasons:
        raise DataError(
            "the head's l2 is to be estimated, but only a random sample of the training rows shows it, and "
            f"{', and '.join(reasons)}. Rows look so with a wrong loss, too, so check the loss. {_explained(request)}"
            f"{remedy}"
        )
    if not force:
        check_loss(made)
    return made, found


def _explained(request: ForgetRequest) -> str:
    """Name the changes that would make the rows look like a random sample: a sentence, or nothing."""
    if not (found := readings(request)):
        return ""
    they = "They" if request.head.recipe.estimate_l2 else "With the l2 that is stated, they"
    return f"{they} look like a random sample of the training rows {_either(found)}. "


def _either(found: list[Reading]) -> str:
    return ", or ".join(reading.what for reading in found[:3])


def _comparable(request: ForgetRequest) -> bool:
    served = request.head.forgotten.requests > 0 or not bool(regularized(request).any())
    return not served and request.n_forget >= _FEWEST and _may_be_random(request)


def _may_be_random(request: ForgetRequest) -> bool:
    return request.kind == RANDOM and request.classes is None


def _likely(p: float | None) -> bool:
    return p is None or p > FALSE_ALARMS
