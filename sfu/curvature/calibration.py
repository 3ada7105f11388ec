r"""Scale the curvature of rows to that of the training rows, the trace of which is kept with the head.

Jacobians of linearised networks have heavy tails: of 1,000 images, ten can have 84 % of the summed squares
:math:`|J_i|^2`. The mean curvature of some rows is then that of a few, and says little of other rows. So no unlabelled
row counts for more than a cap, which is chosen such that the trace of their Hessian is that of the training rows'.
Forget rows that are lighter than the retained ones are stretched. If they are heavier, they stay as they are.

Shapes: U unlabelled rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfu.lazy import torch
from sfu.request import ForgetRequest

if TYPE_CHECKING:
    from torch import Tensor


def stretch_of_forget_rows(request: ForgetRequest) -> float:
    """Return by how much the trace of the retained rows' Hessian exceeds that of the forget rows'; at least 1.

    It is 1 if the head does not keep the trace of the training rows, and if no forget row is curved.
    """
    kept = request.head.kept.trace
    own = 0.0 if kept is None else request.trace
    if kept is None or own == 0:
        return 1.0
    return max(1.0, (request.head.total_weight * kept - request.weight * own) / (request.retained_weight * own))


def factors_of_unlabelled(request: ForgetRequest) -> tuple[Tensor, ...] | None:
    """Return by how much the curvature of each unlabelled row is scaled, ``[U]`` float64 for each set.

    ``None`` for linear heads, without unlabelled rows, and if the head does not keep the trace of its training rows.
    """
    head, wanted = request.head, request.head.kept.trace
    if head.feature_weights_CD is not None or wanted is None or not request.unlabelled:
        return None
    traces = (head.traces(request.unlabelled_rows(rows_UD)) for rows_UD in request.unlabelled)
    return tuple(factors_to(wanted / len(traces_U), traces_U) for traces_U in traces)


def factors_to(wanted: float, sizes_U: Tensor) -> Tensor:
    r"""Return factors :math:`f_i` for which the mean of :math:`f_i s_i` is ``wanted``, for sizes of at least 0.

    If the mean of the sizes is too large, those above a cap are scaled down to it. If it is too small, all are scaled
    up alike.
    """
    mean, count = float(sizes_U.mean()), len(sizes_U)
    if mean <= wanted:
        return torch.full_like(sizes_U, wanted / mean if mean > 0 else 1.0)
    ordered_U = sizes_U.sort().values
    above_U = torch.arange(count, 0, -1).to(sizes_U)  # how many are capped, if this one is the smallest of them
    caps_U = (count * wanted - (ordered_U.cumsum(0) - ordered_U)) / above_U
    cap = caps_U[(caps_U <= ordered_U).int().argmax()]
    return torch.where(sizes_U > cap, cap / sizes_U, 1.0)
