"""Fine-tuning: on the retained data, or on the forget set with wrong labels.

``fine_tune`` hopes that what is not rehearsed is forgotten. Source: a baseline of Golatkar, Achille and Soatto, Eternal
sunshine of the spotless net, CVPR 2020. Defaults of Jia et al., Model sparsity can simplify machine unlearning, NeurIPS
2023 ("FT"): 10 epochs of SGD, lr 0.01, momentum 0.9, batches of 256, and the weight decay of training, which is the
head's l2.

``random_labels`` gives every example to forget one wrong label. Source: Golatkar et al., CVPR 2020 (a baseline);
Graves, Nagisetty and Ganesh, Amnesiac machine learning, AAAI 2021. The defaults are those of the random-label recipe of
Fan et al., SalUn, ICLR 2024: 10 epochs of SGD, lr 0.013, momentum 0.9, batches of 256, and the weight decay of
training. That recipe draws the labels anew in every epoch, the true one among them, and after the forget set it passes
over the retained data, which this method does not see.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sfu.request import Access, ForgetRequest, MethodContext, Retained
from sfu.schema import setting
from sfu.unlearning.descent import DescentMethod, DescentProblem
from sfu.unlearning.differentiable import forgotten, mean_loss, remaining, wrong_labels

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FineTune(DescentMethod, name="fine_tune"):
    """Descend on the head's own objective over the retained data."""

    lr: float = setting(0.01, above=0)
    epochs: int = setting(10, at_least=1)
    access = Access.RETAINED

    def problem(self, request: ForgetRequest, context: MethodContext, retained: Retained) -> DescentProblem:
        retain, head = remaining(retained, request, self.method_name), request.head

        def loss(parameters_CE: Tensor, index: Tensor) -> Tensor:
            return mean_loss(head, parameters_CE, retain.at(index))

        return self._over_rows(context, retain.count, loss)


@dataclass(frozen=True)
class RandomLabels(DescentMethod, name="random_labels"):
    """Descend on the forget set with wrong labels, drawn once and uniformly among the other classes."""

    lr: float = setting(0.013, above=0)
    epochs: int = setting(10, at_least=1)

    def problem(self, request: ForgetRequest, context: MethodContext, retained: Retained) -> DescentProblem:
        labels_F = wrong_labels(request.labels_F, request.head.n_classes, context.generator("perturbation"))
        rows = replace(forgotten(request), labels_N=labels_F)

        def loss(parameters_CE: Tensor, index: Tensor) -> Tensor:
            return mean_loss(request.head, parameters_CE, rows.at(index))

        return self._over_rows(context, request.n_forget, loss)
