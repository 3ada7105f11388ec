r"""NegGrad: gradient ascent on the loss of the examples to forget.

.. math:: w \leftarrow w + \eta \nabla \frac{1}{|B|} \sum_{i \in B} l(f(x_i; w), y_i), \qquad B \subset D_f

Source: Golatkar, Achille and Soatto, Eternal sunshine of the spotless net, CVPR 2020 (there a baseline). The defaults
are those of Jia et al., Model sparsity can simplify machine unlearning, NeurIPS 2023 ("GA"): 5 epochs of SGD, lr 1e-4,
momentum 0.9, weight decay 5e-4, batches of 256, no clipping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.descent import DescentMethod, DescentProblem
from sfu.unlearning.differentiable import forgotten, mean_loss


@dataclass(frozen=True)
class NegGrad(DescentMethod):
    """See the module."""

    def course(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None
    ) -> DescentProblem[Any]:
        """See the module."""
        rows = forgotten(request)

        def ascent(parameters_CE: Tensor, index: Tensor) -> Tensor:
            return -mean_loss(request.head, parameters_CE, rows.at(index))

        return self._over_rows(context, request.n_forget, ascent)
