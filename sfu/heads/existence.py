"""Is there an optimum at all? Logistic losses fall forever along a direction that nothing holds back.

Shapes: B rows of a chunk, C classes.
"""

from __future__ import annotations

import logging

import torch

from sfu.heads.base import Head
from sfu.losses import Loss, Rows
from sfu.losses.base import one_hot

log = logging.getLogger(__name__)


def warn_of_absent_classes(rows: Rows, loss: Loss, n_classes: int, bias: bool) -> None:
    """Warn if a class without rows has a bias, which nothing keeps from running away: it ends where training stops."""
    if loss.attained or not bias:
        return
    weighing = rows.labels_N if rows.weights_N is None else rows.labels_N[rows.weights_N > 0]
    absent = [c for c, count in enumerate(torch.bincount(weighing, minlength=n_classes).tolist()) if count == 0]
    if absent:
        log.warning(
            "loss=%s with a bias has no optimum when a class has no training rows (class %s): its bias falls until "
            "training stops, so distances mean nothing. Set head.bias=false, or leave the class out.",
            loss.name, ", ".join(map(str, absent)),
        )  # fmt: skip


def warn_if_separated(rows: Rows, head: Head) -> None:
    """Warn if an unregularised head has every row of some class on its side: then larger weights are always better."""
    if head.loss.attained:
        return
    apart_C = torch.ones(head.n_classes, dtype=torch.bool, device=rows.device)
    for chunk in rows.chunks():
        outputs_BC = chunk.outputs(head.parameters_CE)
        hot_BC = one_hot(chunk.labels_B, outputs_BC)
        if head.loss.separable:
            right_BC = (2 * hot_BC - 1) * outputs_BC > 0
        else:
            own_B1 = (outputs_BC * hot_BC).sum(1, keepdim=True)
            right_BC = ((own_B1 > outputs_BC) | (hot_BC > 0)).all(1, keepdim=True)
        apart_C &= (right_BC | (chunk.share_B == 0)[:, None]).all(0)
    if bool(apart_C.any()):
        log.warning(
            "head.l2=0 and the training rows can be separated, so loss=%s has no optimum: weights grow until training "
            "stops, and unlearning from them means nothing. Set head.l2 above 0.", head.loss.name,
        )  # fmt: skip
