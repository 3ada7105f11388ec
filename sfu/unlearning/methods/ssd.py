r"""Selective synaptic dampening: shrink the parameters that matter more to the examples to forget than to all.

With importances I over all training data D and over the forget set:

.. math:: w_j \leftarrow \beta_j w_j \;\text{ where } I_f > \alpha I_D, \qquad \beta = \min(\lambda I_D / I_f, 1)

The paper defines I as the diagonal of the Fisher information. The authors' code, for which alpha = 10 was made, takes
the mean over batches of the squared gradient of the batch's *mean* cross-entropy (``importance: batches``). The
square of a mean over B random rows is about 1/B of that of one row, so a forget set of fewer than B rows seems more
important than the data whatever it holds, about B / N_f times. ``importance: rows`` takes the mean over rows of the
squared gradient of the head's own loss, weighted as the head weights its rows: the diagonal of the empirical Fisher
information, which does not depend on N_f.

Source: Foster, Schoepf and Brintrup, Fast machine unlearning without retraining through selective synaptic dampening,
AAAI 2024; alpha = 10, lambda = 1, batches of 128 random rows. :math:`I_D` could be stored with a model at training
time; sfu's heads store no such thing, so it is computed here from the retained data and the examples to forget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sfu.heads.base import Head
from sfu.lazy import torch
from sfu.request import Access, ForgetRequest, MethodContext, Retained
from sfu.schema import setting
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.differentiable import Labelled, forgotten, remaining, together
from sfu.unlearning.importance import squared_batch_gradients, squared_gradients
from sfu.unlearning.result import UnlearningResult

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Ssd(UnlearningMethod, name="ssd"):
    """Dampen the parameters that matter most to the forget set."""

    alpha: float = setting(10.0, "A parameter this many times as important to the forget set is dampened.", above=0)
    dampening: float = setting(1.0, "lambda.", above=0)
    importance: str = setting(
        "batches", "Squared gradients of what: a batch's mean cross-entropy (as published), or each row's own loss.",
        choices=("batches", "rows"),
    )  # fmt: skip
    batch_size: int = setting(128, "Rows of a batch, for importance=batches.", at_least=1)
    access = Access.RETAINED

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        head, retain, forget = request.head, remaining(retained, request, self.method_name), forgotten(request)

        def importances() -> tuple[Tensor, Tensor]:
            if self.importance == "batches":
                return self._of_batches(head, forget, retain, context.generator("training"))
            share = request.weight / head.total_weight
            of_forget = squared_gradients(head, forget)
            return of_forget, share * of_forget + (1 - share) * squared_gradients(head, retain)

        key = f"ssd {self.importance} {self.batch_size}"
        of_forget, of_all = context.remember(key, importances)
        chosen = of_forget > self.alpha * of_all
        factor = torch.where(chosen, (self.dampening * of_all / of_forget).clamp(max=1.0), torch.ones_like(of_all))
        return UnlearningResult(
            request.unlearned_head(factor * head.parameters_CE),
            applied=bool(chosen.any()),
            details={"dampened": int(chosen.sum()), "parameters": chosen.numel()},
            note=None if chosen.any() else f"no parameter matters {self.alpha:g} times more to the forget set",
        )

    def _of_batches(
        self, head: Head, forget: Labelled, retain: Labelled, drawn: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the importances of the forget set and of all data: the retained rows, then those to forget."""
        order_F = torch.randperm(forget.count, generator=drawn)
        *full, rest = torch.randperm(retain.count, generator=drawn).split(self.batch_size)
        tail = together(retain.at(rest), forget.at(order_F))

        def of_all() -> Iterator[Labelled]:
            yield from (retain.at(index) for index in full)
            yield from (tail.at(index) for index in torch.arange(tail.count).split(self.batch_size))

        of_forget = squared_batch_gradients(head, (forget.at(index) for index in order_F.split(self.batch_size)))
        return of_forget, squared_batch_gradients(head, of_all())
