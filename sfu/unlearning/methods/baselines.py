r"""Rows that use little or nothing of the examples, as a check on the others.

``gradient_step`` is the Newton step with the identity for a Hessian,
:math:`w_u = w^* + \eta \frac{V_f}{V_r} (g_f - \frac{V}{V_f} g)`; what Newton's method adds is the difference from this
row. ``rescale`` shrinks the weights: without a bias it leaves every prediction, and so every accuracy, as it was, but
changes losses and with them membership inference. Both are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from sfu.request import Access, ForgetRequest, MethodContext, Retained
from sfu.schema import setting
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.result import UnlearningResult


@dataclass(frozen=True)
class Original(UnlearningMethod, name="original"):
    """Do nothing: the row that every method must beat."""

    access = Access.NONE

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        return UnlearningResult(request.head, applied=False)


@dataclass(frozen=True)
class Rescale(UnlearningMethod, name="rescale"):
    """Multiply all parameters by ``factor``."""

    factor: float = setting(0.9, "All parameters are multiplied by it.")

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        head = request.unlearned_head(self.factor * request.head.parameters_CE)
        return UnlearningResult(head, details={"factor": self.factor})


@dataclass(frozen=True)
class GradientStep(UnlearningMethod, name="gradient_step"):
    """Take one step along the gradient; ``lr`` is eta, and 1 takes the identity for the Hessian."""

    lr: float = setting(1.0, "Length of the step.", above=0)

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        step_CE = self.lr * request.step_ratio * request.newton_gradient()
        return UnlearningResult(request.unlearned_head(request.head.parameters_CE + step_CE), details={"lr": self.lr})
