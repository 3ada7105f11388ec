r"""Selective synaptic dampening: shrink the parameters that matter more to the examples to forget than to all.

With importances I (mean squared gradients of the loss) over all training data D and the forget set:

.. math:: w_j \leftarrow \beta_j w_j \;\text{ where } I_f > \alpha I_D, \qquad \beta = \min(\lambda I_D / I_f, 1)

Source: Foster, Schoepf and Brintrup, Fast machine unlearning without retraining through selective synaptic dampening,
AAAI 2024; alpha = 10, lambda = 1. :math:`I_D` could be stored with a model at training time; sfu's heads store no
such thing, so it is computed here from the retained data and the examples to forget.
"""

from __future__ import annotations

from dataclasses import dataclass

from sfu.lazy import torch
from sfu.request import Access, ForgetRequest, MethodContext, Retained
from sfu.schema import setting
from sfu.unlearning.base import UnlearningMethod, UnlearningResult
from sfu.unlearning.differentiable import forgotten, remaining
from sfu.unlearning.importance import squared_gradients


@dataclass(frozen=True)
class Ssd(UnlearningMethod, name="ssd"):
    """Dampen the parameters that matter most to the forget set."""

    alpha: float = setting(10.0, "A parameter this many times as important to the forget set is dampened.", above=0)
    dampening: float = setting(1.0, "lambda.", above=0)
    access = Access.RETAINED

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        head, rows = request.head, remaining(retained, request, self.method_name)

        def importances() -> tuple[torch.Tensor, torch.Tensor]:
            return squared_gradients(head, forgotten(request)), squared_gradients(head, rows)

        of_forget, of_retained = context.remember("ssd", importances)
        share = request.weight / head.total_weight
        of_all = share * of_forget + (1 - share) * of_retained
        chosen = of_forget > self.alpha * of_all
        factor = torch.where(chosen, (self.dampening * of_all / of_forget).clamp(max=1.0), torch.ones_like(of_all))
        return UnlearningResult(
            request.unlearned_head(factor * head.parameters_CE),
            applied=bool(chosen.any()),
            details={"dampened": int(chosen.sum()), "parameters": chosen.numel()},
            note=None if chosen.any() else f"no parameter matters {self.alpha:g} times more to the forget set",
        )
