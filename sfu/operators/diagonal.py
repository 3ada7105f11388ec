"""A diagonal curvature.

Shapes: C classes, E parameters of each (1 and p where they share them), M values of rho.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sfu.errors import SingularHessianError
from sfu.lazy import torch
from sfu.operators.base import CurvatureOperator, DampedInverse, LinearSolution

if TYPE_CHECKING:
    from torch import Tensor


class DiagonalOperator(CurvatureOperator):
    """A diagonal matrix ``values_CE``, the regulariser included."""

    structure = "diagonal"

    def __init__(self, values_CE: Tensor, regularized_E: Tensor) -> None:
        self.values_CE, self.regularized_E, self.n_classes = values_CE, regularized_E, values_CE.shape[0]

    def matmul(self, vectors: Tensor) -> Tensor:
        return self.values_CE * vectors

    def trace(self) -> float:
        return float(self.values_CE.sum())

    def damped(self) -> DampedInverse:
        return DiagonalInverse(self)

    def solve(self, right_CE: Tensor, rho: float = 0.0) -> LinearSolution:
        """Divide entry by entry.

        Raises:
            SingularHessianError: An entry is not positive.
        """
        damped_CE = self.values_CE + rho * self.regularized_E
        if not bool((damped_CE > 0).all()):
            raise SingularHessianError(
                f"the smallest entry of the estimated diagonal is {float(damped_CE.min()):g}, so it has no inverse. "
                "Set head.l2 above 0, or damp it with curvature.regularization=fixed and curvature.rho."
            )
        return LinearSolution(right_CE / damped_CE, "diagonal", 0.0)

    def combine(self, others: Sequence[CurvatureOperator], coefficients: Sequence[float]) -> DiagonalOperator:
        total = coefficients[0] * self.values_CE
        for other, coefficient in zip(others, coefficients[1:], strict=True):
            assert isinstance(other, DiagonalOperator)
            total = total + coefficient * other.values_CE
        return DiagonalOperator(total, self.regularized_E)


class DiagonalInverse(DampedInverse):
    """The damped inverses of a diagonal; entries that are 0 are left out."""

    def __init__(self, operator: DiagonalOperator) -> None:
        self._operator = operator

    @property
    def mean_eigenvalue(self) -> float:
        return float(self._operator.values_CE.clamp(min=0).mean())

    @property
    def invertible(self) -> bool:
        return bool((self._operator.values_CE > 0).all())

    def solve_many(self, right_CE: Tensor, rhos: list[float], *, floor: float = 0.0) -> Tensor:
        rhos_M = torch.tensor(rhos, dtype=right_CE.dtype, device=right_CE.device)[:, None, None]
        damped_MCE = self._operator.values_CE.clamp(min=floor) + rhos_M * self._operator.regularized_E
        return torch.where(damped_MCE > 0, right_CE / damped_MCE, 0.0)
