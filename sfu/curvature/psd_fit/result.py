"""What a fit returns: the matrix, how it was found, and the certificate that it is the minimiser.

Shapes: D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from sfu.errors import SolverError


class Status(Enum):
    """How a fit ended."""

    CONVERGED = "converged"
    MAX_ITERATIONS = "max_iterations"
    STALLED = "stalled"
    FAILED = "failed"


@dataclass(frozen=True, eq=False)
class PsdFitResult:
    """A fitted curvature and its certificate.

    Attributes:
        value_DD: the minimiser X in float64, ``X >= L``; None only when ``status`` is FAILED.
        status: CONVERGED when ``gap <= tolerance``; anything else must be handled by the caller (see :meth:`require`).
        iterations: Newton steps or projected-gradient steps.
        objective: ``1/P |A(X) - t|^2 + mu/2 |X - X0|_F^2`` at ``value_DD``.
        gap: objective minus a lower bound on its minimum (the dual value), over the objective.
        min_eigenvalue: smallest eigenvalue of ``X - L``.
        mu: the weight of the prior that was used.
        seconds: wall clock.
        algorithm: "unconstrained", "dual_newton" or "projected_gradient".
        message: what happened and, unless converged, what to change.
    """

    value_DD: Tensor | None
    status: Status
    iterations: int
    objective: float
    gap: float
    min_eigenvalue: float
    mu: float
    seconds: float
    algorithm: str
    message: str

    def require(self) -> Tensor:
        """The fitted matrix, or an error that says what to change.

        Raises:
            SolverError: the fit did not reach its tolerance.
        """
        if self.status is not Status.CONVERGED or self.value_DD is None:
            raise SolverError(f"psd_fit ({self.algorithm}) ended with status '{self.status.value}': {self.message}")
        return self.value_DD

    @classmethod
    def failed(cls, message: str, algorithm: str) -> PsdFitResult:
        """The result of a problem that could not be solved at all, for a batch in which the others go on."""
        nan = float("nan")
        return cls(None, Status.FAILED, 0, nan, nan, nan, nan, 0.0, algorithm, message)
