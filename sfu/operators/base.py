r"""What a curvature operator offers: products, its trace, one solve, and the family :math:`(H + \rho R)^{-1}`.

H is the Hessian of a mean objective over all C E parameters, the regulariser included; R is the identity on regularised
parameters and 0 on biases, which are never damped.

Shapes: C classes, E = D (+ 1 with bias), M values of rho.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 1 << 26
"""Numbers of all solutions that are held at one time."""


@dataclass(frozen=True)
class Solution:
    """What a solve returns.

    Attributes:
        value_CE: The solution.
        solver: ``cholesky``, ``eigenvalues`` or ``conjugate_gradients``.
        residual: ``|b - (H + rho R) x| / |b|``, measured; 0 for b = 0.
        iterations: Of conjugate gradients, else 0.
        converged: Whether the residual reached what was asked for.
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

    def account(self) -> dict[str, float | int | str]:
        """How the last solve went, where that is worth saying."""
        return {}

    @abstractmethod
    def solve_many(self, right_CE: Tensor, rhos: list[float], *, floor: float = 0.0) -> Tensor:
        """Solutions for every rho, ``[M, C, E]``.

        Args:
            right_CE: Right-hand side.
            rhos: Dampings, at least 0.
            floor: A known lower bound of the eigenvalues, to which smaller ones are raised where they are known. With
                a floor of 0, eigenvalues that are 0 to working precision are left out (Moore-Penrose inverse).
        """

    def solutions(self, right_CE: Tensor, rhos: list[float], *, floor: float = 0.0) -> Iterator[Tensor]:
        """:meth:`solve_many` in pieces ``[m, C, E]`` that bound memory."""
        step = max(1, PIECE // right_CE.numel())
        for start in range(0, len(rhos), step):
            yield self.solve_many(right_CE, rhos[start : start + step], floor=floor)

    def scores(
        self, right_CE: Tensor, rhos: list[float], held_out: CurvatureOperator, *, floor: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """``<u, b>`` and ``u^T H' u`` of every solution u, ``[M]`` each, for another curvature H'."""
        pieces = self.solutions(right_CE, rhos, floor=floor)
        scored = [((u * right_CE).sum((1, 2)), held_out.quadratic(u)) for u in pieces]
        along, curved = (torch.cat(list(part)) for part in zip(*scored, strict=True))
        return along, curved

    def solve(self, right_CE: Tensor, rho: float = 0.0, *, floor: float = 0.0) -> Tensor:
        """:meth:`solve_many` for one rho, ``[C, E]``."""
        return self.solve_many(right_CE, [rho], floor=floor)[0]


class CurvatureOperator(ABC):
    """A symmetric operator on ``[C, E]`` parameters."""

    n_classes: int
    regularized_E: Tensor

    @property
    @abstractmethod
    def structure(self) -> str:
        """``shared``, ``blocks``, ``dense`` or ``products``: how it is held."""

    @abstractmethod
    def matmul(self, vectors: Tensor) -> Tensor:
        """``H v`` for vectors ``[..., C, E]``."""

    @abstractmethod
    def trace(self) -> float:
        """Trace over all C E parameters."""

    @abstractmethod
    def damped(self) -> DampedInverse:
        """The family of damped inverses."""

    @abstractmethod
    def solve(self, right_CE: Tensor, rho: float = 0.0) -> Solution:
        """``(H + rho R) x = b`` for one rho, by what suits the structure; the solution says which."""

    @abstractmethod
    def combine(self, others: Sequence[CurvatureOperator], coefficients: Sequence[float]) -> CurvatureOperator:
        """``coefficients[0] H + coefficients[1] H_1 + ...`` of operators of one structure; coefficients sum to 1.

        A mean over a union, a mixture, or a mean over what is left when a set is taken away: the regulariser, which
        is the same in all, stays as it is.
        """

    def quadratic(self, vectors: Tensor) -> Tensor:
        """``v^T H v`` for vectors ``[..., C, E]``, ``[...]``."""
        return (self.matmul(vectors) * vectors).sum((-2, -1))
