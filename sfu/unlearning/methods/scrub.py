r"""SCRUB: a student that disagrees with its teacher on the forget set and agrees with it on the retained data.

The teacher is the trained head. Epochs alternate between ascent on :math:`d(x) = T^2\, KL(p_T(x) \| p_S(x))` over the
forget set (the first ``ascents`` of them) and descent over the retained data on
:math:`\gamma\, l(x, y) + \alpha\, d(x)`, with probabilities softened by the temperature T.

Source: Kurmanji, Triantafillou, Hayes and Triantafillou, Towards unbounded machine unlearning, NeurIPS 2023. Defaults
of the authors' code for CIFAR-10: 3 epochs of which 2 ascend, alpha 0.001, gamma 0.99, T = 4, SGD with lr 5e-4,
momentum 0.9, batches of 32 forget and 128 retained rows, and the weight decay that the model was trained with, which
is the head's l2. The task's loss l is the head's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sfu.request import Access, ForgetRequest, MethodContext, Retained
from sfu.schema import setting
from sfu.unlearning.descent import DescentMethod, DescentProblem, minibatches, n_batches
from sfu.unlearning.differentiable import forgotten, mean_loss, remaining

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Scrub(DescentMethod, name="scrub"):
    """Alternate between ascent on the forget set and descent on the retained data."""

    lr: float = setting(5e-4, above=0)
    epochs: int = setting(3, at_least=1)
    batch_size: int = setting(128, at_least=1)
    forget_batch_size: int = setting(32, "Rows of an ascent step.", at_least=1)
    ascents: int = setting(2, "Epochs that begin with an ascent.", at_least=0)
    alpha: float = setting(0.001, "Weight of the agreement with the teacher.", at_least=0)
    gamma: float = setting(0.99, "Weight of the task's loss.", at_least=0)
    temperature: float = setting(4.0, "T.", above=0)
    access = Access.RETAINED

    def problem(self, request: ForgetRequest, context: MethodContext, retained: Retained) -> DescentProblem:
        forget, retain, head = forgotten(request), remaining(retained, request, self.method_name), request.head
        drawn = context.generator("training")

        def disagreement(parameters_CE: Tensor, features_BD: Tensor) -> Tensor:
            student, teacher = (
                (head.outputs(features_BD, at) / self.temperature).log_softmax(1)
                for at in (parameters_CE, head.parameters_CE)
            )
            return self.temperature**2 * (teacher.exp() * (teacher - student)).sum(1).mean()

        def batches() -> Iterator[tuple[bool, Tensor]]:
            for epoch in range(self.epochs):
                if epoch < self.ascents:
                    yield from ((True, index) for index in minibatches(forget.count, self.forget_batch_size, 1, drawn))
                yield from ((False, index) for index in minibatches(retain.count, self.batch_size, 1, drawn))

        def loss(parameters_CE: Tensor, batch: tuple[bool, Tensor]) -> Tensor:
            ascend, index = batch
            if ascend:
                return -disagreement(parameters_CE, forget.features_ND[index])
            rows = retain.at(index)
            agreement = disagreement(parameters_CE, rows.features_ND)
            return self.gamma * mean_loss(head, parameters_CE, rows) + self.alpha * agreement

        total = self.epochs * n_batches(retain.count, self.batch_size)
        total += min(self.ascents, self.epochs) * n_batches(forget.count, self.forget_batch_size)
        return DescentProblem(batches(), loss, total)
