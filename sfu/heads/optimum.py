r"""The optimum of a head's objective: what training returns, whether there is one, and how exactly it is known.

Shapes: B rows of a chunk, C classes, E = D features (+ 1 with bias), or ``[1, p]`` parameters that the classes share.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, NamedTuple

from sfu.errors import SolverError
from sfu.heads.base import Head
from sfu.lazy import torch
from sfu.losses.base import one_hot
from sfu.losses.rows import Rows

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

_FAR = 100.0
_STEPS = 16
"""Operations on one number besides the sums: slope, shares, the regulariser."""


class Optimum(NamedTuple):
    """Where training to the optimum ended: the parameters, and the gradient of the mean objective there."""

    parameters_CE: Tensor
    gradient_CE: Tensor


def not_reached(
    size: float,
    tolerance: float,
    when: str,
    remedy: str = "or scale the features to rows of norm 1",
    rows: Rows | None = None,
) -> SolverError:
    """Return the error of training that ended at a gradient norm of ``size`` above the tolerance.

    Where the features of the ``rows`` are far from the origin, the remedy is to centre them.
    """
    advice = None if rows is None else advice_to_centre(rows)
    if advice is None:
        advice = f"Raise head.l2 (at 0 there may be no optimum), head.tolerance or head.max_iterations, {remedy}."
    return SolverError(
        f"training reached a gradient norm of {size:.1e}, not head.tolerance={tolerance:g}, {when}. {advice}"
    )


def advice_to_centre(rows: Rows) -> str | None:
    """Say that the mean of the features is so much larger than their scatter that rounding hides it; else ``None``.

    Rows of this process stand for those of others.
    """
    mean_D = rows.features_ND.mean(0, dtype=torch.float64)
    scatter = sum(float((part.double() - mean_D).square().sum()) for part in rows.features_ND.split(rows.step))
    ratio = float(mean_D.norm()) / math.sqrt(scatter / len(rows.features_ND)) if scatter > 0 else 0.0
    if ratio < _FAR:
        return None
    return (
        f"The mean of the training features is {ratio:.2g} times as large as their scatter about it, so rounding hides "
        "what the features tell. Subtract that mean from all features (those of rows to forget and to predict, too), "
        "or standardise them."
    )


def warn_of_absent_classes(head: Head, rows: Rows) -> None:
    """Warn if a class without rows has a bias: a logistic loss falls forever as that bias does."""
    if head.loss.attained or not head.bias:
        return
    weighing = rows.labels_N if rows.weights_N is None else rows.labels_N[rows.weights_N > 0]
    counts = rows.summed(torch.bincount(weighing, minlength=head.n_classes)).tolist()
    absent = [c for c, count in enumerate(counts) if count == 0]
    if absent:
        log.warning(
            "loss=%s with a bias has no optimum when a class has no training rows (class %s): its bias falls until "
            "training stops, so distances mean nothing. Set head.bias=false, or leave the class out.",
            head.loss.name, ", ".join(map(str, absent)),
        )  # fmt: skip


def warn_if_separated(head: Head, rows: Rows) -> None:
    """Warn if an unregularised head separates a class from the others: then larger weights are always better."""
    if head.loss.attained or head.l2 > 0:
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
    if bool((rows.summed((~apart_C).long()) == 0).any()):
        log.warning(
            "head.l2=0 and the training rows can be separated, so loss=%s has no optimum: weights grow until training "
            "stops, and unlearning from them means nothing. Set head.l2 above 0.", head.loss.name,
        )  # fmt: skip


def rounding_bound(head: Head, rows: Rows) -> float:
    r"""Bound the rounding of the gradient norm of the perturbed sum objective of ``rows`` at a linear head.

    With u the unit roundoff of the working precision, slopes s_i and their Lipschitz constant :math:`\kappa`,

    .. math:: u\,(N + E + 16) \Bigl(\sum_i v_i \|a_i\| (\|s_i\| + \kappa \|a_i\| \|W\|) + V l_2 \|W\| + \|b\|\Bigr)

    A sum of n products is off by at most n u times the sum of their absolute values (Higham, Accuracy and stability of
    numerical algorithms, 2nd edition, section 3.1); :math:`\kappa \|a_i\| \|W\|` carries the rounding of the outputs,
    and that of the parameters themselves, into the slopes. Sums in blocks err much less in practice.
    """
    weights_CE = head.parameters_CE
    size, total = float(weights_CE.norm()), 0.0
    kappa = head.loss.constants.curvature_bound
    for chunk in rows.linear_chunks():
        slope_B = head.loss.slopes(chunk.outputs(weights_CE), chunk.labels_B).norm(dim=1)
        norm_B = chunk.design_BE.norm(dim=1)
        total += rows.weight * float(chunk.share_B @ (norm_B * (slope_B + kappa * size * norm_B)))
    noise = 0.0 if head.certificate is None else float(head.certificate.noise_CE.norm())
    total += rows.weight * head.l2 * size + noise
    return torch.finfo(weights_CE.dtype).eps / 2 * (rows.count + rows.width + _STEPS) * total
