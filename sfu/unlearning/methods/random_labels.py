"""Random labels: every example to forget gets one wrong label, and the head is fine-tuned on them.

Source: Golatkar, Achille and Soatto, Eternal sunshine of the spotless net, CVPR 2020 (a baseline); Graves, Nagisetty
and Ganesh, Amnesiac machine learning, AAAI 2021. The defaults are those of the random-label recipe of Fan et al.,
SalUn, ICLR 2024: 10 epochs of SGD, lr 0.013, momentum 0.9, weight decay 5e-4, batches of 256. That recipe also passes
over the retained data, which are not to be had here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.descent import DescentMethod, DescentProblem
from sfu.unlearning.differentiable import forgotten, mean_loss, wrong_labels


@dataclass(frozen=True)
class RandomLabels(DescentMethod):
    """Labels are drawn once, uniformly among the other classes."""

    lr: float = 0.013
    epochs: int = 10

    def course(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None
    ) -> DescentProblem[Any]:
        """See the module."""
        labels_F = wrong_labels(request.labels_F, request.head.n_classes, context.generator("perturbation"))
        rows = replace(forgotten(request), labels_N=labels_F)

        def loss(parameters_CE: Tensor, index: Tensor) -> Tensor:
            return mean_loss(request.head, parameters_CE, rows.at(index))

        return self._over_rows(context, request.n_forget, loss)
