"""The problem that every algorithm here solves, its dual, and the projection both need.

Both kinds of measurement reduce, by shifting the lower bound to zero, to

    minimise over Y >= 0    f(Y) = 1/2 |Y - B|^2 + 1/(2c) |A(Y) - t|^2.

Its dual is the smooth convex problem of minimising over z, in the space of the targets,

    phi(z) = 1/2 |Y(z)|^2 - <t, z> + c/2 |z|^2,        Y(z) = Proj_{>=0}(B + A*(z)),

whose gradient is ``F(z) = A Y(z) - t + c z``. For any z, the primal value at Y(z) exceeds the dual value by exactly
``|F(z)|^2 / (2c)`` (expand both and use ``<Y, B + A* z> = |Y|^2``): the residual of the dual is the certificate of the
primal, without cancellation.

Shapes: D features (or the rank of the perturbations after reduction), P measurements, R positive eigenvalues, K = D - R
others. ``z`` and ``t`` have the shape of the target space: (P,) for losses, (D, D) for gradients.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from sfu.lazy import torch
from sfu.operators.spectral import eigh

if TYPE_CHECKING:
    from torch import Tensor

LinearMap = Callable[["Tensor"], "Tensor"]


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The eigendecomposition of a symmetric matrix, split by sign, from which the projection and its derivative follow.

    The derivative of the projection in a direction S is ``U (Omega o (U^T S U)) U^T`` with Omega = 1 between positive
    eigenvalues, 0 between the others and ``a / (a + b)`` between a positive a and a non-positive -b
    (Sun & Sun, 2002, "Semismooth matrix-valued functions").

    Attributes:
        value_D: Eigenvalues, ascending.
        vector_DD: Eigenvectors, by column.
        split: K, how many eigenvalues are not positive.
        omega_RK: The mixed block of Omega.
    """

    value_D: Tensor
    vector_DD: Tensor
    split: int
    omega_RK: Tensor

    @classmethod
    def of(cls, matrix_DD: Tensor) -> Spectrum:
        value_D, vector_DD = eigh(matrix_DD)
        return cls._split(value_D, vector_DD, int((value_D <= 0).sum()))

    @classmethod
    def _split(cls, value_D: Tensor, vector_DD: Tensor, split: int) -> Spectrum:
        positive_R1, other_1K = value_D[split:, None], -value_D[None, :split]
        return cls(value_D, vector_DD, split, positive_R1 / (positive_R1 + other_1K))

    def with_negative_scaled(self, factor: float) -> Spectrum:
        """Return the spectrum of the matrix whose negative part is ``factor > 0`` times as large."""
        value_D = self.value_D.clone()
        value_D[: self.split] *= factor
        return Spectrum._split(value_D, self.vector_DD, self.split)

    def omega(self) -> Tensor:
        """Return Omega as one D x D matrix."""
        omega_DD = torch.zeros_like(self.vector_DD)
        omega_DD[self.split :, self.split :] = 1
        omega_DD[self.split :, : self.split] = self.omega_RK
        omega_DD[: self.split, self.split :] = self.omega_RK.T
        return omega_DD

    def projection(self) -> Tensor:
        """Return the nearest positive-semidefinite matrix."""
        vector_DR = self.vector_DD[:, self.split :]
        return (vector_DR * self.value_D[self.split :]) @ vector_DR.T

    def derivative(self, direction_DD: Tensor) -> Tensor:
        """Return the directional derivative of the projection (four D x D x D products); the direction is symmetric."""
        rotated_DD = self.vector_DD.T @ direction_DD @ self.vector_DD
        rotated_DD[: self.split, : self.split] = 0
        rotated_DD[self.split :, : self.split] *= self.omega_RK
        rotated_DD[: self.split, self.split :] *= self.omega_RK.T
        return self.vector_DD @ rotated_DD @ self.vector_DD.T


def project(matrix_DD: Tensor) -> Tensor:
    """Return the nearest positive-semidefinite matrix, by clipping eigenvalues."""
    return Spectrum.of(matrix_DD).projection()


@dataclass(frozen=True, eq=False)
class Minimiser:
    """The minimiser of a standard form, with its certificate."""

    matrix_DD: Tensor  # Y >= 0
    dual: Tensor  # z
    iterations: int
    value: float  # f(Y)
    relative_gap: float  # duality gap over the original objective
    message: str = ""  # why it stopped before the tolerance


class StandardForm(ABC):
    """``min over Y >= 0 of 1/2 |Y - B|^2 + 1/(2c) |A(Y) - t|^2``, and the way back to the problem it came from.

    Attributes:
        base_DD: B.
        target: t.
        weight: c > 0.
        scale: The original objective is ``scale * f + offset``.
        offset: See ``scale``.
        floor: Objectives below this are zero to working precision (the gap is relative to at least this much).
        mu: Weight of the prior in the original problem.
        operator_norm: An upper bound on the largest eigenvalue of ``A A*``, tight to about 1e-6 relative.
        bulk: The mean of the other eigenvalues of ``A A*`` that are not zero, or an estimate.
    """

    base_DD: Tensor
    target: Tensor
    weight: float
    scale: float
    offset: float
    floor: float
    mu: float
    operator_norm: float
    bulk: float

    @abstractmethod
    def forward(self, matrix_DD: Tensor) -> Tensor:
        """Return A(Y) for a symmetric Y."""

    @abstractmethod
    def adjoint(self, dual: Tensor) -> Tensor:
        """Return A*(z), which is symmetric."""

    @abstractmethod
    def solve_inactive(self) -> Tensor:
        """Return the dual solution ``(A A* + c I) z = t - A B`` when the constraint does not bind."""

    @abstractmethod
    def rough_inverse(self, shift: float) -> LinearMap:
        """Return the inverse of ``A A* + shift I`` to about five digits, for a shift not far below the spectrum."""

    @abstractmethod
    def evaluate(self, dual: Tensor) -> tuple[Spectrum, Tensor]:
        """Return the spectrum of ``B + A*(z)`` and ``A Y(z)``."""

    @abstractmethod
    def jacobian(self, spectrum: Spectrum) -> LinearMap:
        """Return the map ``v -> A Proj'(A* v)``, an element of the generalised Jacobian of ``z -> A Y(z)``."""

    @abstractmethod
    def preconditioner(self, spectrum: Spectrum, precise: bool) -> LinearMap:
        """Return an approximate inverse of ``A Proj' A* + c I``.

        ``precise`` asks for one that is good in the directions of the smallest eigenvalues, too, which are c or little
        more where the projection leaves ``A Proj' A*`` singular.
        """

    @abstractmethod
    def lift(self, matrix_DD: Tensor) -> tuple[Tensor, Tensor]:
        """Return X - L and X of the original problem for a minimiser Y."""

    def at_weight(self, weight: float) -> Self:
        """Return the same form with another c."""
        form = copy.copy(self)
        form.weight = weight
        return form

    def prefers_first_order(self) -> bool:
        """Whether projected gradient is the cheaper way."""
        return False

    def beyond_reach(self) -> bool:
        """Whether it is plain that no Y >= 0 comes near the targets."""
        return False

    def value(self, matrix_DD: Tensor, image: Tensor) -> float:
        """Return f(Y), given A(Y)."""
        fit = (image - self.target).square().sum() / (2 * self.weight)
        return float((matrix_DD - self.base_DD).square().sum() / 2 + fit)

    def objective(self, value: float) -> float:
        """Return the objective of the original problem, given f(Y)."""
        return self.scale * value + self.offset

    def relative_gap(self, gap: float, value: float) -> float:
        """Return a gap in f, relative to the original objective."""
        if gap == 0:
            return 0.0
        denominator = max(abs(self.objective(value)), self.floor)
        return self.scale * gap / denominator if denominator > 0 else float("inf")


@dataclass(frozen=True, eq=False)
class DualPoint:
    """Everything that is known at one z: Y(z), F(z), phi(z) and f(Y(z))."""

    dual: Tensor
    spectrum: Spectrum  # of B + A*(z)
    matrix_DD: Tensor  # Y(z)
    residual: Tensor  # F(z)
    phi: float
    value: float  # f(Y(z))
    gap: float  # f(Y(z)) less the dual value at z

    @classmethod
    def at(cls, form: StandardForm, dual: Tensor) -> DualPoint:
        spectrum, image = form.evaluate(dual)
        matrix_DD = spectrum.projection()
        residual = image - form.target + form.weight * dual
        phi = (
            spectrum.value_D.clamp(min=0).square().sum() / 2
            - (form.target * dual).sum()
            + form.weight / 2 * dual.square().sum()
        )
        gap = float(residual.square().sum()) / (2 * form.weight)
        return cls(dual, spectrum, matrix_DD, residual, float(phi), form.value(matrix_DD, image), gap)

    def relative_gap(self, form: StandardForm) -> float:
        """Return the gap relative to the original objective."""
        return form.relative_gap(self.gap, self.value)

    def minimiser(self, form: StandardForm, iterations: int, message: str = "") -> Minimiser:
        return Minimiser(self.matrix_DD, self.dual, iterations, self.value, self.relative_gap(form), message)


def certify(form: StandardForm, matrix_DD: Tensor, image: Tensor, iterations: int) -> Minimiser:
    """Return the better of Y >= 0 and Y(z), for the dual point ``z = (t - A Y) / c`` that Y implies, with its gap.

    The gap of the pair (Y(z), z) is ``|F(z)|^2 / (2c)``; that of (Y, z) is
    ``1/2 |Y - Y(z)|^2 + <Y, Proj(-(B + A* z))>``: terms that are not negative, so no digits cancel. ``image`` is A(Y).
    """
    value = form.value(matrix_DD, image)
    point = DualPoint.at(form, (form.target - image) / form.weight)
    if not value < point.value:
        return point.minimiser(form, iterations)
    outside_DD = point.matrix_DD - form.base_DD - form.adjoint(point.dual)
    slack = (matrix_DD * outside_DD).sum().clamp(min=0)
    gap = float((matrix_DD - point.matrix_DD).square().sum() / 2 + slack)
    return Minimiser(matrix_DD, point.dual, iterations, value, form.relative_gap(gap, value))


def perron_bound(product: LinearMap, diagonal_P: Tensor, tolerance: float = 1e-7, iterations: int = 1000) -> float:
    """Bound the largest eigenvalue of a symmetric matrix without negative entries from above, by power iteration.

    For every positive v, ``max_i (M v)_i / v_i`` bounds the eigenvalue from above and ``min_i`` from below
    (Collatz-Wielandt), so the iteration stops on a proof: once the bracket's relative width is ``tolerance``. The bound
    holds whichever iteration is the last.
    """
    used_P = diagonal_P > 0  # rows of zeros belong to the eigenvalue 0
    if not used_P.any():
        return 0.0
    vector_P = used_P.to(diagonal_P)
    upper = float("inf")
    for _ in range(iterations):
        image_P = product(vector_P)
        ratio_P = (image_P / vector_P)[used_P]
        upper, lower = float(ratio_P.max()), float(ratio_P.min())
        if upper - lower <= tolerance * upper:
            break
        vector_P = image_P / image_P.max()
    return upper
