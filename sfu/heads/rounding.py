"""How far a gradient that was computed can be from the true one, by rounding.

Shapes: B rows of a chunk.
"""

from __future__ import annotations

import torch

from sfu.heads.base import Head
from sfu.losses import Rows
from sfu.losses.chunks import LinearChunk

_STEPS = 16
"""Operations on one number besides the sums: slope, shares, the regulariser."""


def rounding_bound(head: Head, rows: Rows) -> float:
    r"""Bound on the rounding of the gradient norm of the perturbed sum objective of ``rows`` at the head.

    With u the unit roundoff of the working precision, slopes s_i and their Lipschitz constant :math:`\kappa`,

    .. math:: u\,(N + E + 16) \Bigl(\sum_i v_i \|a_i\| (\|s_i\| + \kappa \|a_i\| \|W\|) + V l_2 \|W\| + \|b\|\Bigr)

    A sum of n products is off by at most n u times the sum of their absolute values (Higham, Accuracy and stability of
    numerical algorithms, 2nd edition, section 3.1); :math:`\kappa \|a_i\| \|W\|` carries the rounding of the outputs,
    and that of the parameters themselves, into the slopes. Sums in blocks err much less in practice.
    """
    weights_CE = head.parameters_CE
    size, total = float(weights_CE.norm()), 0.0
    kappa = head.loss.constants.curvature_bound
    for chunk in rows.chunks():
        assert isinstance(chunk, LinearChunk)
        slope_B = head.loss.slopes(chunk.outputs(weights_CE), chunk.labels_B).norm(dim=1)
        norm_B = chunk.design_BE.norm(dim=1)
        total += rows.weight * float(chunk.share_B @ (norm_B * (slope_B + kappa * size * norm_B)))
    noise = 0.0 if head.certificate is None else float(head.certificate.noise_CE.norm())
    total += rows.weight * head.l2 * size + noise
    return torch.finfo(weights_CE.dtype).eps / 2 * (rows.count + rows.width + _STEPS) * total
