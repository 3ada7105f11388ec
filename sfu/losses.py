r"""The quadratic loss of a linear head, all normalised as means over the rows given.

.. math:: J_S(w) = \frac{1}{|S|} \sum_{i \in S} \tfrac12 \|W a_i - y_i\|^2 + \tfrac{l_2}{2} \|W_{features}\|^2

where :math:`a_i` is a feature row (with a trailing 1 if the head has a bias; the bias is never regularised) and
:math:`y_i` a one-hot target times ``target_scale``. The loss is a sum over classes, so its Hessian is one E x E block
for all of them: :math:`A = \frac{1}{|S|} \sum a_i a_i^T + l_2 R`, with R the identity but for a 0 at the bias.

Shapes: N rows, E = D features (+ 1 with bias), C classes, P parameter points.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class QuadraticLoss:
    """Squared error on scaled one-hot targets, of rows ``design_NE`` with labels ``labels_N``.

    Attributes:
        l2: Weight of the regulariser.
        target_scale: Value of the hot target.
        regularized_E: 1 where a parameter is regularised, 0 where it is not.
        n_classes: C.
    """

    l2: float
    target_scale: float
    regularized_E: Tensor
    n_classes: int

    def targets(self, labels_N: Tensor) -> Tensor:
        """One-hot targets ``[N, C]`` times ``target_scale``, in the dtype of the parameters."""
        hot = torch.nn.functional.one_hot(labels_N, self.n_classes)
        return hot.to(self.regularized_E.dtype) * self.target_scale

    def values(self, design_NE: Tensor, labels_N: Tensor, parameters_PCE: Tensor) -> Tensor:
        """Mean loss of each class at each of P points, ``[P, C]``; their sum over C is J."""
        n_points, n_classes, width = parameters_PCE.shape
        outputs_NPC = (design_NE @ parameters_PCE.reshape(-1, width).T).reshape(-1, n_points, n_classes)
        outputs_NPC -= self.targets(labels_N)[:, None]
        data_PC = 0.5 * outputs_NPC.square_().mean(0)
        return data_PC + 0.5 * self.l2 * (parameters_PCE.square() @ self.regularized_E)

    def gradients(self, design_NE: Tensor, labels_N: Tensor, parameters_PCE: Tensor) -> Tensor:
        """Gradient of the mean loss at each of P points, ``[P, C, E]``."""
        n_points, n_classes, width = parameters_PCE.shape
        residual_NQ = design_NE @ parameters_PCE.reshape(-1, width).T
        residual_NQ -= self.targets(labels_N).repeat(1, n_points)
        data_PCE = (residual_NQ.T @ design_NE).reshape(n_points, n_classes, width) / design_NE.shape[0]
        return data_PCE + self.l2 * self.regularized_E * parameters_PCE
