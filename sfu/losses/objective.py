r"""The mean objective of a set of rows, its gradient and its Hessian, by streaming over chunks.

.. math:: J_S(W) = \frac{1}{V_S} \sum_{i \in S} v_i\, l(W a_i, y_i) + \tfrac{l_2}{2} \|W_{features}\|^2
          \;(+ \langle b, W \rangle), \qquad V_S = \sum_{i \in S} v_i

where :math:`a_i` is a feature row (with a trailing 1 if the head has a bias, which is never regularised) and
:math:`v_i` the row's weight: 1, or sample weight times class weight. Weighted means stay means, and sets combine by
their total weights: :math:`V J = V_f J_f + V_r J_r`. The linear term is that of objective perturbation,
or stands for training that was left undone (:attr:`sfu.heads.base.Head.unfinished_CE`).

Shapes: N rows, B rows of a chunk, C classes, P parameter points, G = C groups of values for a loss that is a sum over
classes, else 1. Parameters ``_CE`` are ``[C, E]``, E = D features (+ 1 with bias), or ``[1, p]`` where classes share
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sfu.lazy import torch
from sfu.losses.base import Layout, Loss, OutputHessian
from sfu.losses.chunks import TableChunk
from sfu.losses.gram import add_gram
from sfu.losses.rows import Rows

if TYPE_CHECKING:
    from torch import Tensor


class Linearization(NamedTuple):
    """Value and gradient of an objective at one point, and the rows' output Hessians there, chunk by chunk."""

    value: float
    gradient_CE: Tensor
    hessians: list[OutputHessian]


@dataclass(frozen=True)
class Objective:
    """A loss with its regulariser, as a mean over any set of rows.

    ``regularized_E`` is 1 where a parameter is regularised and 0 where it is not; ``linear_CE`` is b, if there is one.
    ``unseen`` counts regularised parameters of each class that were left out, because no row reaches them
    (:mod:`sfu.curvature.span`): their curvature is ``l2``.
    """

    loss: Loss
    l2: float
    regularized_E: Tensor
    linear_CE: Tensor | None = None
    unseen: int = 0

    @property
    def ridge_E(self) -> Tensor:
        """Diagonal of the regulariser's Hessian, ``l2 R``."""
        return self.l2 * self.regularized_E

    def to_float32(self) -> Objective:
        linear_CE = None if self.linear_CE is None else self.linear_CE.float()
        return Objective(self.loss, self.l2, self.regularized_E.float(), linear_CE, self.unseen)

    def values_at(self, rows: Rows, parameters_PCE: Tensor) -> Tensor:
        """Return the objective at each of P points, ``[P, G]``; the sum over G is J."""
        n_points, n_classes, _ = parameters_PCE.shape
        total = 0.5 * (parameters_PCE.square() @ self.ridge_E)
        if self.linear_CE is not None:
            total = total + (parameters_PCE * self.linear_CE).sum(-1)
        by_class = self.loss.separable and n_classes > 1
        total_PG = rows.once(total if by_class else total.sum(-1, keepdim=True))
        for chunk in rows.chunks():
            values_BPG = self.loss.values(chunk.outputs(parameters_PCE), chunk.labels_B)
            values_BPG = values_BPG if by_class else values_BPG.sum(-1, keepdim=True)
            total_PG = total_PG + (chunk.share_B @ values_BPG.flatten(1)).reshape(n_points, -1)
        return rows.summed(total_PG)

    def gradients_at(self, rows: Rows, parameters_PCE: Tensor) -> Tensor:
        """Return the gradient at each of P points, ``[P, C, E]``."""
        total_PCE = rows.once(self.gradient_without_rows(parameters_PCE))
        for chunk in rows.chunks():
            slopes_BPC = self.loss.slopes(chunk.outputs(parameters_PCE), chunk.labels_B)
            total_PCE = total_PCE + chunk.pull(slopes_BPC * chunk.share_B[:, None, None])
        return rows.summed(total_PCE)

    def gradient_without_rows(self, parameters_PCE: Tensor) -> Tensor:
        """Return the gradient of the regulariser and the linear term at each of P points, ``[P, C, E]``."""
        ridge_PCE = self.ridge_E * parameters_PCE
        return ridge_PCE if self.linear_CE is None else ridge_PCE + self.linear_CE

    def value(self, rows: Rows, parameters_CE: Tensor) -> float:
        """Return J at one point."""
        return float(self.values_at(rows, parameters_CE[None]).sum())

    def gradient(self, rows: Rows, parameters_CE: Tensor) -> Tensor:
        """Return the gradient of J at one point, ``[C, E]``."""
        return self.gradients_at(rows, parameters_CE[None])[0]

    def linearize(self, rows: Rows, parameters_CE: Tensor) -> Linearization:
        """Return value, gradient and output Hessians at one point, in one pass."""
        gradient_CE = self.ridge_E * parameters_CE
        value = 0.5 * float((parameters_CE * gradient_CE).sum())
        if self.linear_CE is not None:
            gradient_CE = gradient_CE + self.linear_CE
            value += float((parameters_CE * self.linear_CE).sum())
        value, gradient_CE, hessians = rows.once(value), rows.once(gradient_CE), []
        for chunk in rows.chunks():
            outputs_BC = chunk.outputs(parameters_CE)
            value += float(chunk.share_B @ self.loss.values(outputs_BC, chunk.labels_B).sum(-1))
            slopes_BC = self.loss.slopes(outputs_BC, chunk.labels_B)
            gradient_CE = gradient_CE + chunk.pull(slopes_BC * chunk.share_B[:, None])
            hessians.append(self.loss.curvature(outputs_BC, chunk.labels_B))
        return Linearization(*rows.summed_with(value, gradient_CE), hessians)

    def data_hessian(self, rows: Rows, parameters_CE: Tensor, layout: Layout) -> Tensor:
        """Return the data term's Hessian: ``[E, E]``, ``[C, E, E]`` (diagonal blocks) or ``[C E, C E]``, by ``layout``.

        ``shared`` is only right for the quadratic loss.
        """
        if rows.shared:
            return self._table_hessian(rows, parameters_CE)
        if layout is Layout.shared:
            return rows.moments()
        n_classes, width = parameters_CE.shape
        blocks_KEE = parameters_CE.new_zeros(n_classes, width, width)
        full = parameters_CE.new_zeros((n_classes * width,) * 2) if layout is Layout.dense else None
        for chunk in rows.linear_chunks():
            design_BE, share_B = chunk.design_BE, chunk.share_B
            hessian = self.loss.curvature(chunk.outputs(parameters_CE), chunk.labels_B)
            diagonal_BC = hessian.diagonal
            if layout is Layout.blocks and hessian.rank_one is not None:
                diagonal_BC = diagonal_BC - hessian.rank_one.square()
            for k in range(n_classes):
                add_gram(blocks_KEE[k], design_BE, design_BE * (share_B * diagonal_BC[:, k])[:, None])
            if full is not None and hessian.rank_one is not None:
                _subtract_rank_ones(full, design_BE, hessian.rank_one * share_B.sqrt()[:, None])
        return rows.summed(blocks_KEE if full is None else full + torch.block_diag(*blocks_KEE))

    def _table_hessian(self, rows: Rows, parameters_1K: Tensor) -> Tensor:
        """Return ``[K, K]`` for rows that are given by their Jacobian."""
        full_KK = parameters_1K.new_zeros((parameters_1K.shape[1],) * 2)
        for chunk in rows.chunks():
            assert isinstance(chunk, TableChunk)
            output_BCC = self.loss.curvature(chunk.outputs(parameters_1K), chunk.labels_B).dense()
            weighted_BCK = output_BCC @ chunk.jacobian_BCK * chunk.share_B[:, None, None]
            full_KK += torch.einsum("bck,bcl->kl", chunk.jacobian_BCK, weighted_BCK)
        return rows.summed(full_KK)


_PIECE = 1 << 24


def _subtract_rank_ones(full: Tensor, design_BE: Tensor, scaled_BC: Tensor) -> None:
    """Subtract ``sum_i (q_i x a_i)(q_i x a_i)^T`` from ``full``, some rows at a time to bound memory."""
    step = max(1, _PIECE // full.shape[0])
    for q_BC, a_BE in zip(scaled_BC.split(step), design_BE.split(step), strict=True):
        outer_BK = (q_BC[:, :, None] * a_BE[:, None, :]).flatten(1)
        add_gram(full, outer_BK, alpha=-1.0)
