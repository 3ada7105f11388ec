r"""NegGrad+: descend on the retained data and ascend on the examples to forget, in one weighted objective.

.. math:: \alpha\, \bar l(D_r) - (1 - \alpha)\, \bar l(D_f)

Every step takes a batch of each. Source: Kurmanji et al., Towards unbounded machine unlearning (SCRUB), NeurIPS 2023,
which proposes it as a stronger baseline. Its learning rate there was tuned for each case; the defaults are those of its
public code as far as known: 5 epochs over the retained rows, alpha 0.95, SGD with momentum 0.9, lr 0.01.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from torch import Tensor

from sfu.checks import between
from sfu.request import Access, ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.descent import DescentMethod, DescentProblem, minibatches, n_batches
from sfu.unlearning.differentiable import forgotten, mean_loss, regularizer, remaining


@dataclass(frozen=True)
class NegGradPlus(DescentMethod):
    """See the module.

    Attributes:
        alpha: Share of the retained data.
    """

    lr: float = 0.01
    weight_decay: float = 0.0
    alpha: float = 0.95

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: Naming the key, the value and what is accepted.
        """
        super().__post_init__()
        between("neg_grad_plus: alpha", self.alpha, 0.0, 1.0)

    @property
    def access(self) -> Access:
        """It descends on the retained data."""
        return Access.RETAINED

    def course(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None
    ) -> DescentProblem[Any]:
        """See the module."""
        kept, head, gone = remaining(retained, request, "neg_grad_plus"), request.head, forgotten(request)

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            again = chain.from_iterable(
                minibatches(gone.count, self.batch_size, 1, drawn) for drawn in repeat(context.generator("folds"))
            )
            yield from zip(
                minibatches(kept.count, self.batch_size, self.epochs, context.generator("training")),
                again,
                strict=False,
            )

        def loss(parameters_CE: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
            stay = mean_loss(head, parameters_CE, kept.at(batch[0])) + regularizer(head, parameters_CE)
            return self.alpha * stay - (1 - self.alpha) * mean_loss(head, parameters_CE, gone.at(batch[1]))

        total = self.epochs * n_batches(kept.count, self.batch_size)
        return DescentProblem(pairs(), loss, total, {"alpha": self.alpha})
