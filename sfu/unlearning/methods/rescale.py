"""Shrink the weights: a row that knows nothing of the examples, to keep the others honest.

Without a bias it leaves every prediction as it was, and so every accuracy; losses, and with them membership inference,
change. Ours; the factor is arbitrary.
"""

from __future__ import annotations

from dataclasses import dataclass

from sfu.checks import finite
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.base import UnlearningMethod, UnlearningResult


@dataclass(frozen=True)
class Rescale(UnlearningMethod):
    """All parameters times ``factor``."""

    factor: float = 0.9

    def __post_init__(self) -> None:
        """Check the factor.

        Raises:
            ConfigError: It is no finite number.
        """
        finite("rescale: factor", self.factor)

    def unlearn(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None = None
    ) -> UnlearningResult:
        """Multiply."""
        return UnlearningResult(
            request.unlearned_head(self.factor * request.head.parameters_CE), details={"factor": self.factor}
        )
