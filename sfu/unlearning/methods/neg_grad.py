r"""NegGrad and NegGrad+: gradient ascent on the loss of the examples to forget.

NegGrad ascends on the forget set alone,

.. math:: w \leftarrow w + \eta \nabla \frac{1}{|B|} \sum_{i \in B} l(f(x_i; w), y_i), \qquad B \subset D_f

Source: Golatkar, Achille and Soatto, Eternal sunshine of the spotless net, CVPR 2020 (there a baseline). The defaults
are those of Jia et al., Model sparsity can simplify machine unlearning, NeurIPS 2023 ("GA"): 5 epochs of SGD, lr 1e-4,
momentum 0.9, batches of 256, no clipping, and the weight decay of training, which is the head's l2.

NegGrad+ minimises :math:`\alpha\, \bar l(D_r) - (1 - \alpha)\, \bar l(D_f)`; every step takes a batch of each. Source:
Kurmanji et al., Towards unbounded machine unlearning (SCRUB), NeurIPS 2023, who propose it as a stronger baseline. They
tuned its learning rate for each case; the defaults are those of their public code as far as known: 5 epochs over the
retained rows, alpha 0.95, SGD with momentum 0.9, lr 0.01.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sfu.request import Access, ForgetRequest, MethodContext, Retained
from sfu.schema import setting
from sfu.unlearning.descent import DescentMethod, DescentProblem, minibatches, n_batches
from sfu.unlearning.differentiable import forgotten, mean_loss, regularizer, remaining

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class NegGrad(DescentMethod, name="neg_grad"):
    """Ascend on the forget set's loss."""

    def problem(self, request: ForgetRequest, context: MethodContext, retained: Retained) -> DescentProblem:
        rows = forgotten(request)

        def ascent(parameters_CE: Tensor, index: Tensor) -> Tensor:
            return -mean_loss(request.head, parameters_CE, rows.at(index))

        return self._over_rows(context, request.n_forget, ascent)


@dataclass(frozen=True)
class NegGradPlus(DescentMethod, name="neg_grad_plus"):
    """Descend on the retained data and ascend on the forget set, in one weighted objective."""

    lr: float = setting(0.01, above=0)
    weight_decay: float | None = setting(0.0, "On top of the head's l2, which is in the objective.", at_least=0)
    alpha: float = setting(0.95, "Share of the retained data.", above=0, below=1)
    access = Access.RETAINED

    def problem(self, request: ForgetRequest, context: MethodContext, retained: Retained) -> DescentProblem:
        retain, forget, head = remaining(retained, request, self.method_name), forgotten(request), request.head

        def loss(parameters_CE: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
            descent = mean_loss(head, parameters_CE, retain.at(batch[0])) + regularizer(head, parameters_CE)
            return self.alpha * descent - (1 - self.alpha) * mean_loss(head, parameters_CE, forget.at(batch[1]))

        pairs = zip(
            minibatches(retain.count, self.batch_size, self.epochs, context.generator("training")),
            minibatches(forget.count, self.batch_size, None, context.generator("folds")),
            strict=False,
        )
        total = self.epochs * n_batches(retain.count, self.batch_size)
        return DescentProblem(pairs, loss, total, {"alpha": self.alpha})
