r"""How much each parameter matters to a set of rows: squared gradients, the Fisher information, and MAS.

They are sums of squares :math:`(J_i^T b_i)^2` for output vectors b (:meth:`sfu.heads.base.Head.squared_pulls`), so the
shape of the parameters does not matter.

Shapes: N rows, B rows of a chunk, D features, C classes; importances have the shape of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from sfu.heads.base import Head
from sfu.lazy import torch
from sfu.losses.base import OutputHessian
from sfu.unlearning.differentiable import Labelled

if TYPE_CHECKING:
    from torch import Tensor

_NUMBERS = 1 << 22
"""Numbers in the gradients that are held at a time."""


def squared_gradients(head: Head, rows: Labelled, numbers: int = _NUMBERS) -> Tensor:
    r"""Return the weighted mean of :math:`(\nabla_w l_i)^2`: the diagonal of the empirical Fisher information."""
    return _mean_squares(head, rows, lambda outputs_BC, labels_B: [head.loss.slopes(outputs_BC, labels_B)], numbers)


def squared_batch_gradients(head: Head, batches: Iterable[Labelled]) -> Tensor:
    r"""Return the mean over batches of :math:`(\nabla_w \frac1B \sum_i CE(f(x_i; w), y_i))^2`, without row weights."""
    total_CE, count = torch.zeros_like(head.parameters_CE), 0
    for batch in batches:
        parameters_CE = head.parameters_CE.detach().clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy(head.outputs(batch.features_ND, parameters_CE), batch.labels_N)
        total_CE += torch.autograd.grad(loss, parameters_CE)[0].square()
        count += 1
    return total_CE / count


def fisher_diagonal(head: Head, rows: Labelled) -> Tensor:
    r"""Return the diagonal of the Gauss-Newton matrix.

    It is the weighted mean of :math:`\sum_k (J_i^T u_{ik})^2` with :math:`\nabla^2_z l_i = \sum_k u_{ik} u_{ik}^T`: for
    softmax and logistic the Fisher information under the head's own probabilities, for the quadratic loss that of a
    Gaussian of variance 1.
    """
    return _mean_squares(
        head, rows, lambda outputs_BC, labels_B: _factors(head.loss.curvature(outputs_BC, labels_B)), _NUMBERS
    )


def _mean_squares(
    head: Head, rows: Labelled, vectors_of: Callable[[Tensor, Tensor], list[Tensor]], numbers: int
) -> Tensor:
    """Return the weighted mean over rows of their squared pulls, summed over the vectors of each, in chunks."""
    like, total_CE = head.parameters_CE, torch.zeros_like(head.parameters_CE)
    weights_N = head.loss.row_weights(rows.labels_N, rows.weights_N, like.dtype)
    share_N = torch.ones(rows.count).to(like) if weights_N is None else weights_N.to(like)
    share_N = share_N / share_N.sum()
    for index in torch.arange(rows.count, device=like.device).split(max(1, numbers // like.numel())):
        part = rows.at(index)
        for vector_BC in vectors_of(head.outputs(part.features_ND, like), part.labels_N):
            total_CE += head.squared_pulls(part.features_ND, vector_BC, share_N[index])
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
