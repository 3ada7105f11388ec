r"""The interface of curvature: products, trace, one solve, and the family :math:`(H + \rho R)^{-1}`.

H is the Hessian of a mean objective over all parameters, the regulariser included. R is the identity on regularised
parameters and 0 on biases, which are never damped.

Shapes: C classes, E = D (+ 1 with bias), M values of rho. Where the classes share their p parameters (a linearised
head), vectors ``_CE`` are ``[1, p]``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sfu.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


PIECE = 1 << 26
"""Numbers of all solutions that are held at one time."""


class Unseen(NamedTuple):
    """Regularised parameters of each class that an operator leaves out, because no row reaches them.

    Traces and mean eigenvalues count them, so that they do not depend on what is left out.
    """

    directions: int = 0
    curvature: float = 0.0

    def mean_with(self, mean: float, count: float) -> float:
        """Return the mean eigenvalue of these directions and of ``count`` others, whose own mean is given."""
        return (mean * count + self.curvature * self.directions) / (count + self.directions)


NOTHING_UNSEEN = Unseen()


@dataclass(frozen=True)
class LinearSolution:
    """The solution of one linear system.

    Attributes:
        solver: ``cholesky``, ``eigenvalues``, ``diagonal`` or ``conjugate_gradients``.
        residual: ``|b - (H + rho R) x| / |b|``, measured; 0 for b = 0.
        iterations: Iterations of conjugate gradients, else 0.
        converged: Whether the residual reached the tolerance.
    """

    value_CE: Tensor
    solver: str
    residual: float
    iterations: int = 0
    converged: bool = True


class DampedInverse(ABC):
    """The family ``(H + rho R)^-1`` of one operator, prepared once for many rho."""

    @property
    @abstractmethod
    def mean_eigenvalue(self) -> float:
        """Mean of the eigenvalues (of their positive parts, where they are known): the natural unit of rho."""

    @property
    @abstractmethod
    def invertible(self) -> bool:
        """Whether rho = 0 may be used."""

    @property
    def eigenvalues(self) -> Tensor | None:
        """Eigenvalues of H, with biases eliminated, each once where the classes share them; ``None`` if not known."""
        return None

    def account(self) -> dict[str, float | int | str]:
        """Describe the last solve, for the record; empty for a direct method."""
        return {}

    @abstractmethod
    def solve_many(self, right_CE: Tensor, rhos: list[float], *, floor: float = 0.0) -> Tensor:
        """Return the solutions for every rho of at least 0, ``[M, C, E]``.

        ``floor`` is a known lower bound of the eigenvalues, to which smaller ones are raised where they are known. With
        a floor of 0, eigenvalues that are 0 to working precision are left out (Moore-Penrose inverse).
        """

    def solutions(self, right_CE: Tensor, rhos: list[float], *, floor: float = 0.0) -> Iterator[Tensor]:
        """Yield :meth:`solve_many` in pieces ``[m, C, E]`` that bound memory."""
        step = max(1, PIECE // right_CE.numel())
        for start in range(0, len(rhos), step):
            yield self.solve_many(right_CE, rhos[start : start + step], floor=floor)

    def scores(
        self, right_CE: Tensor, rhos: list[float], held_out: CurvatureOperator, *, floor: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``<u, b>``, ``u^T H' u`` and ``|u|^2`` of every solution u, ``[M]`` each, for another curvature H'."""
        pieces = self.solutions(right_CE, rhos, floor=floor)
        scored = [((u * right_CE).sum((1, 2)), held_out.quadratic(u), u.square().sum((1, 2))) for u in pieces]
        along, curved, square = (torch.cat(list(part)) for part in zip(*scored, strict=True))
        return along, curved, square

    def solve(self, right_CE: Tensor, rho: float = 0.0, *, floor: float = 0.0) -> Tensor:
        """Return :meth:`solve_many` for one rho, ``[C, E]``."""
        return self.solve_many(right_CE, [rho], floor=floor)[0]


class CurvatureOperator(ABC):
    """A symmetric operator on parameters ``[C, E]``."""

    n_classes: int
    regularized_E: Tensor

    @property
    @abstractmethod
    def structure(self) -> str:
        """How the curvature is held, such as ``shared``, ``blocks``, ``dense`` or ``products``."""

    @abstractmethod
    def matmul(self, vectors: Tensor) -> Tensor:
        """Return ``H v`` for vectors ``[..., C, E]``."""

    @abstractmethod
    def trace(self) -> float:
        """Return the trace over all parameters."""

    @abstractmethod
    def damped(self) -> DampedInverse:
        """Prepare the family of damped inverses."""

    @abstractmethod
    def solve(self, right_CE: Tensor, rho: float = 0.0) -> LinearSolution:
        """Solve ``(H + rho R) x = b`` for one rho, by the solver that suits the structure."""

    @abstractmethod
    def combine(self, others: Sequence[CurvatureOperator], coefficients: Sequence[float]) -> CurvatureOperator:
        """Return ``coefficients[0] H + coefficients[1] H_1 + ...`` of operators of one structure.

        The coefficients sum to 1: a mean over a union, a mixture, or a mean over the rest when a set is taken away. The
        regulariser is the same in all operators, so it stays as it is.
        """

    def quadratic(self, vectors: Tensor) -> Tensor:
        """Return ``v^T H v`` for vectors ``[..., C, E]``, ``[...]``."""
        return (self.matmul(vectors) * vectors).sum((-2, -1))

    def residual(self, value_CE: Tensor, right_CE: Tensor, rho: float) -> float:
        """Measure ``|b - (H + rho R) x| / |b|``; 0 for b = 0."""
        size = float(right_CE.norm())
        left_CE = right_CE - self.matmul(value_CE) - rho * self.regularized_E * value_CE
        return float(left_CE.norm()) / size if size > 0 else 0.0
