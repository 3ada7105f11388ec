"""Fine-tuning on the retained data, in the hope that what is not rehearsed is forgotten.

Source: a baseline of Golatkar, Achille and Soatto, CVPR 2020. Defaults of Jia et al., Model sparsity can simplify
machine unlearning, NeurIPS 2023 ("FT"): 10 epochs of SGD, lr 0.01, momentum 0.9, batches of 256. The objective is the
one the head was trained on, its own l2 in the place of a weight decay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sfu.request import Access, ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.descent import DescentMethod, DescentProblem
from sfu.unlearning.differentiable import mean_loss, regularizer, remaining


@dataclass(frozen=True)
class FineTune(DescentMethod):
    """See the module."""

    lr: float = 0.01
    epochs: int = 10
    weight_decay: float = 0.0

    @property
    def access(self) -> Access:
        """It descends on the retained data."""
        return Access.RETAINED

    def course(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None
    ) -> DescentProblem[Any]:
        """See the module."""
        kept, head = remaining(retained, request, "fine_tune"), request.head

        def loss(parameters_CE: Tensor, index: Tensor) -> Tensor:
            return mean_loss(head, parameters_CE, kept.at(index)) + regularizer(head, parameters_CE)

        return self._over_rows(context, kept.count, loss)
