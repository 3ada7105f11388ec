r"""Fisher forgetting: noise on every parameter, the more the less it matters to the retained data.

.. math:: w \leftarrow w + \sqrt{\alpha \min\!\left(\frac{1}{F + 10^{-8}},\, c\right)} \; z, \qquad z \sim N(0, I)

with F the diagonal of the Fisher information of the retained data.

Source: Golatkar, Achille and Soatto, Eternal sunshine of the spotless net, CVPR 2020; the form with the inverse root
and the cap is that of their code, with alpha = 3e-6 and, for a last layer, c = 100. (The paper's derivation has the
fourth root.) Their special treatment of a whole class is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sfu.checks import above
from sfu.request import Access, ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.base import UnlearningMethod, UnlearningResult
from sfu.unlearning.differentiable import remaining
from sfu.unlearning.importance import fisher_diagonal


@dataclass(frozen=True)
class Fisher(UnlearningMethod):
    """See the module.

    Attributes:
        alpha: Size of the noise.
        cap: c, the largest inverse information.
    """

    alpha: float = 3e-6
    cap: float = 100.0

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: Naming the key, the value and what is accepted.
        """
        above("fisher: alpha", self.alpha, 0.0)
        above("fisher: cap", self.cap, 0.0)

    @property
    def access(self) -> Access:
        """The information is that of the retained data."""
        return Access.RETAINED

    def unlearn(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None = None
    ) -> UnlearningResult:
        """Add noise.

        Raises:
            SourceFreeError: No retained data were given.
        """
        head, kept = request.head, remaining(retained, request, "fisher")
        fisher_CE = context.remember("fisher", lambda: fisher_diagonal(head, kept))
        std_CE = (self.alpha * (1 / (fisher_CE + 1e-8)).clamp(max=self.cap)).sqrt()
        drawn = torch.randn(std_CE.shape, generator=context.generator("noise"), dtype=torch.float64).to(std_CE)
        details = {"mean_noise_std": float(std_CE.mean())}
        return UnlearningResult(request.unlearned_head(head.parameters_CE + std_CE * drawn), details=details)
