r"""One step along the gradient: the Newton step with the identity for a Hessian, to keep the others honest.

.. math:: w_u = w^* + \eta \frac{V_f}{V_r} \left(g_f - \frac{V}{V_f} g\right)

What Newton's method adds is the difference to this row. Ours; :math:`\eta = 1` is the identity taken at its word.
"""

from __future__ import annotations

from dataclasses import dataclass

from sfu.checks import above
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.base import UnlearningMethod, UnlearningResult


@dataclass(frozen=True)
class GradientStep(UnlearningMethod):
    """One step of length ``lr``."""

    lr: float = 1.0

    def __post_init__(self) -> None:
        """Check the length.

        Raises:
            ConfigError: It is not above 0.
        """
        above("gradient_step: lr", self.lr, 0.0)

    def unlearn(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None = None
    ) -> UnlearningResult:
        """Step."""
        step_CE = self.lr * request.step_ratio * request.newton_gradient()
        return UnlearningResult(request.unlearned_head(request.head.parameters_CE + step_CE), details={"lr": self.lr})
