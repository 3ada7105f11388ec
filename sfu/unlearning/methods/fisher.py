r"""Fisher forgetting: more noise on a parameter the less it matters to the retained data.

.. math:: w \leftarrow w + \sqrt{\alpha \min\!\left(\frac{1}{F + 10^{-8}},\, c\right)} \; z, \qquad z \sim N(0, I)

with F the diagonal of the Fisher information of the retained data.

Source: Golatkar, Achille and Soatto, Eternal sunshine of the spotless net, CVPR 2020; the form with the inverse root
and the cap is that of their code, with alpha = 3e-6 and, for a last layer, c = 100. (The paper's derivation has the
fourth root.) Their code also averages the variance over each row of weights, multiplies that of the last layer by 10
and, for a whole class, sets its weights to 0 with variance 1e-4. sfu does none of this.
"""

from __future__ import annotations

from dataclasses import dataclass

from sfu.lazy import torch
from sfu.request import Access, ForgetRequest, MethodContext, Retained
from sfu.schema import setting
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.differentiable import remaining
from sfu.unlearning.importance import fisher_diagonal
from sfu.unlearning.result import UnlearningResult


@dataclass(frozen=True)
class Fisher(UnlearningMethod, name="fisher"):
    """Add noise to every parameter."""

    alpha: float = setting(3e-6, "Size of the noise.", above=0)
    cap: float = setting(100.0, "c, the largest inverse information.", above=0)
    access = Access.RETAINED

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        head, rows = request.head, remaining(retained, request, self.method_name)
        fisher_CE = context.remember("fisher", lambda: fisher_diagonal(head, rows))
        std_CE = (self.alpha * (1 / (fisher_CE + 1e-8)).clamp(max=self.cap)).sqrt()
        drawn = torch.randn(std_CE.shape, generator=context.generator("noise"), dtype=torch.float64).to(std_CE)
        details = {"mean_noise_std": float(std_CE.mean())}
        return UnlearningResult(request.unlearned_head(head.parameters_CE + std_CE * drawn), details=details)
