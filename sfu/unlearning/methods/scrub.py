r"""SCRUB: a student that disagrees with its teacher on the forget set and agrees with it on the retained data.

The teacher is the trained head. Epochs alternate between ascent on :math:`d(x) = T^2\, KL(p_T(x) \| p_S(x))` over the
forget set (the first ``ascents`` of them) and descent over the retained data on
:math:`\gamma\, l(x, y) + \alpha\, d(x)`, with probabilities softened by the temperature T.

Source: Kurmanji, Triantafillou, Hayes and Triantafillou, Towards unbounded machine unlearning, NeurIPS 2023. Defaults
of the authors' code: 3 epochs of which 2 ascend, alpha 0.001, gamma 0.99, T = 4, SGD with lr 5e-4, momentum 0.9, weight
decay 5e-4, batches of 32 forget and 128 retained rows. The task's loss l is the head's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sfu.checks import above, at_least, whole
from sfu.request import Access, ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.descent import DescentMethod, DescentProblem, minibatches, n_batches
from sfu.unlearning.differentiable import forgotten, mean_loss, remaining


@dataclass(frozen=True)
class Scrub(DescentMethod):
    """See the module.

    Attributes:
        forget_batch_size: Rows of an ascent step.
        ascents: Epochs that begin with an ascent.
        alpha: Weight of agreement.
        gamma: Weight of the task's loss.
        temperature: T.
    """

    lr: float = 5e-4
    epochs: int = 3
    batch_size: int = 128
    forget_batch_size: int = 32
    ascents: int = 2
    alpha: float = 0.001
    gamma: float = 0.99
    temperature: float = 4.0

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: Naming the key, the value and what is accepted.
        """
        super().__post_init__()
        whole("scrub: forget_batch_size", self.forget_batch_size, 1)
        whole("scrub: ascents", self.ascents, 0)
        at_least("scrub: alpha", self.alpha, 0.0)
        at_least("scrub: gamma", self.gamma, 0.0)
        above("scrub: temperature", self.temperature, 0.0)

    @property
    def access(self) -> Access:
        """It descends on the retained data."""
        return Access.RETAINED

    def course(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None
    ) -> DescentProblem[Any]:
        """See the module."""
        gone, kept, head = forgotten(request), remaining(retained, request, "scrub"), request.head
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
                    yield from ((True, index) for index in minibatches(gone.count, self.forget_batch_size, 1, drawn))
                yield from ((False, index) for index in minibatches(kept.count, self.batch_size, 1, drawn))

        def loss(parameters_CE: Tensor, batch: tuple[bool, Tensor]) -> Tensor:
            ascend, index = batch
            if ascend:
                return -disagreement(parameters_CE, gone.features_ND[index])
            rows = kept.at(index)
            agreement = disagreement(parameters_CE, rows.features_ND)
            return self.gamma * mean_loss(head, parameters_CE, rows) + self.alpha * agreement

        total = self.epochs * n_batches(kept.count, self.batch_size)
        total += min(self.ascents, self.epochs) * n_batches(gone.count, self.forget_batch_size)
        return DescentProblem(batches(), loss, total)
