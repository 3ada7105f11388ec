r"""How much each parameter matters to a set of rows: squared gradients, the Fisher information, and MAS.

They are sums of squares :math:`(J_i^T b_i)^2` for output vectors b (:meth:`sfu.heads.base.Head.squared_pulls`), so the
shape of the parameters does not matter.

Shapes: N rows, B rows of a chunk, D features, C classes; importances have the shape of the parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfu.heads.base import Head
from sfu.losses.base import OutputHessian
from sfu.unlearning.differentiable import Labelled

_NUMBERS = 1 << 22
"""Numbers in the gradients that are held at a time."""


def squared_gradients(head: Head, rows: Labelled, numbers: int = _NUMBERS) -> Tensor:
    r"""Return the weighted mean of :math:`(\nabla_w l_i)^2`: the diagonal of the empirical Fisher information."""
    total_CE = torch.zeros_like(head.parameters_CE)
    for part, share_B in _chunks(head, rows, numbers):
        slopes_BC = head.loss.slopes(head.outputs(part.features_ND, head.parameters_CE), part.labels_N)
        total_CE += head.squared_pulls(part.features_ND, slopes_BC, share_B)
    return total_CE


def fisher_diagonal(head: Head, rows: Labelled) -> Tensor:
    r"""Return the diagonal of the Gauss-Newton matrix.

    It is the weighted mean of :math:`\sum_k (J_i^T u_{ik})^2` with :math:`\nabla^2_z l_i = \sum_k u_{ik} u_{ik}^T`: for
    softmax and logistic the Fisher information under the head's own probabilities, for the quadratic loss that of a
    Gaussian of variance 1.
    """
    total_CE = torch.zeros_like(head.parameters_CE)
    for part, share_B in _chunks(head, rows):
        hessian = head.loss.curvature(head.outputs(part.features_ND, head.parameters_CE), part.labels_N)
        for factor_BC in _factors(hessian):
            total_CE += head.squared_pulls(part.features_ND, factor_BC, share_B)
    return total_CE


def _factors(hessian: OutputHessian) -> list[Tensor]:
    """Return C vectors a row whose outer products add up to its output Hessian.

    They are ``sqrt(d_k) e_k``, less the mean for softmax:
    ``diag(p) - p p^T = sum_k p_k (e_k - p)(e_k - p)^T`` as p sums to 1.
    """
    diagonal_BC, rank_one_BC = hessian.diagonal, hessian.rank_one
    eye_CC = torch.eye(diagonal_BC.shape[-1]).to(diagonal_BC)
    shift_BC = torch.zeros_like(diagonal_BC) if rank_one_BC is None else rank_one_BC
    return [diagonal_BC[:, k, None].sqrt() * (eye_CC[k] - shift_BC) for k in range(eye_CC.shape[0])]


def output_sensitivity(head: Head, features_ND: Tensor, batch_size: int) -> Tensor:
    r"""Return MAS as L2UL defines it: the mean over batches of :math:`|\nabla_w \frac1B \sum_i \|f(x_i; w)\||`."""
    total_CE, count = torch.zeros_like(head.parameters_CE), features_ND.shape[0]
    for features_BD in features_ND.split(batch_size):
        parameters_CE = head.parameters_CE.detach().clone().requires_grad_()
        head.outputs(features_BD, parameters_CE).norm(dim=1).mean().backward()
        assert parameters_CE.grad is not None
        total_CE += parameters_CE.grad.abs() * (features_BD.shape[0] / count)
    return total_CE


def _chunks(head: Head, rows: Labelled, numbers: int = _NUMBERS) -> list[tuple[Labelled, Tensor]]:
    """Split the rows into chunks, with the share of each row; all shares sum to 1."""
    like = head.parameters_CE
    weights_N = head.loss.row_weights(rows.labels_N, rows.weights_N, like.dtype)
    share_N = torch.ones(rows.count).to(like) if weights_N is None else weights_N.to(like)
    share_N = share_N / share_N.sum()
    step = max(1, numbers // like.numel())
    return [(rows.at(index), share_N[index]) for index in torch.arange(rows.count, device=like.device).split(step)]
