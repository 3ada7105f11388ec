"""Gradient measurements in standard form, after a congruence that makes them well conditioned.

With ``G`` the second moment of the perturbations and ``K`` the cross moment, the data term is
``tr(X G X) - 2 <K, X> + const``; in the eigenbasis of G its Hessian (with the prior) is elementwise,
``g_i + g_j + mu``.
The congruence ``Y = T Z T`` with ``T_i = (2 g_i + mu)^(-1/4)`` keeps ``Y >= 0`` and turns the Hessian into

    h_ij = (g_i + g_j + mu) / sqrt((2 g_i + mu) (2 g_j + mu))  >= 1,

an arithmetic over a geometric mean: its condition number is about half the square root of that of G. So ``h = 1 + E``
with ``E >= 0``, and the problem is the standard form with ``A = sqrt(E)`` elementwise, ``t = 0``, ``c = 1``.

Shapes: D features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfu.curvature.psd_fit.problem import GradientMeasurements, dense
from sfu.curvature.psd_fit.standard_form import LinearMap, Spectrum, StandardForm
from sfu.errors import ConfigError
from sfu.lazy import torch
from sfu.operators.spectral import eigh

if TYPE_CHECKING:
    from torch import Tensor

# A prior of this strength or less is a tie-breaker: it is dropped where the data already have one minimiser.
TIE_BREAK = 1e-8
# The perturbations span the space when the smallest eigenvalue of G is above this share of the largest.
FULL_RANK = 1e-10


class GradientForm(StandardForm):
    """Gradients in standard form; ``scale = 1`` and ``offset`` holds the constants of the data term."""

    def __init__(
        self,
        measurements: GradientMeasurements,
        lower: Tensor,
        prior: Tensor,
        mu: float | None,
        prior_strength: float,
    ) -> None:
        gram_DD = measurements.gram_DD.double()
        cross_DD = measurements.cross_DD.to(gram_DD)
        gram_D, self._vector_DD = eigh(gram_DD)
        gram_D = gram_D.clamp(min=0)
        largest = float(gram_D[-1])
        full_rank = float(gram_D[0]) > FULL_RANK * largest
        if mu is None:
            dropped = full_rank and prior_strength <= TIE_BREAK
            mu = 0.0 if dropped else prior_strength * 2 * largest or 1.0
        if mu == 0 and not full_rank:
            raise ConfigError(
                "mu=0 leaves the curvature undetermined, because the perturbations do not span the space. Give mu > 0 "
                "(or mu=None), or at least D independent perturbations."
            )
        lower_DD, prior_DD = dense(lower, gram_DD), dense(prior, gram_DD)
        base_DD = prior_DD - lower_DD
        bound_gram_DD = lower_DD @ gram_DD
        linear_DD = 2 * cross_DD - bound_gram_DD - bound_gram_DD.T + mu * base_DD
        self._congruence_D = (2 * gram_D + mu).pow(-0.25)
        outer_DD = self._congruence_D[:, None] * self._congruence_D
        excess_DD = ((gram_D[:, None] + gram_D + mu) * outer_DD.square() - 1).clamp(min=0)
        rotated_DD = outer_DD * (self._vector_DD.T @ linear_DD @ self._vector_DD)

        self.mu = mu
        self.excess_DD = excess_DD
        self.operator_norm = float(excess_DD.max())
        self.bulk = float(excess_DD.mean())
        self._root_DD = excess_DD.sqrt()
        self.base_DD = (rotated_DD + rotated_DD.T) / 2
        self.target = torch.zeros_like(self.base_DD)
        self.weight = 1.0
        self.scale = 1.0
        self.offset = (
            float((bound_gram_DD * lower_DD).sum() - 2 * (cross_DD * lower_DD).sum() + mu / 2 * base_DD.square().sum())
            + measurements.response_square
            - float(self.base_DD.square().sum()) / 2
        )
        # the objective is a difference of terms of this size: below 1e-14 of it there are no digits left
        self.floor = 1e-14 * (measurements.response_square + float(self.base_DD.square().sum()) / 2)
        self._lower = lower

    def forward(self, matrix_DD: Tensor) -> Tensor:
        return self._root_DD * matrix_DD

    def adjoint(self, dual: Tensor) -> Tensor:
        return self._root_DD * dual

    def solve_inactive(self) -> Tensor:
        """Elementwise: the Sylvester equation ``X G + G X + mu X = 2 K + mu X0`` in the eigenbasis of G."""
        return -self._root_DD * self.base_DD / (self.excess_DD + self.weight)

    def rough_inverse(self, shift: float) -> LinearMap:
        return lambda vector_DD: vector_DD / (self.excess_DD + shift)

    def evaluate(self, dual: Tensor) -> tuple[Spectrum, Tensor]:
        spectrum = Spectrum.of(self.base_DD + self.adjoint(dual))
        return spectrum, self.forward(spectrum.projection())

    def jacobian(self, spectrum: Spectrum) -> LinearMap:
        return lambda vector_DD: self._root_DD * spectrum.derivative(self._root_DD * vector_DD)

    def preconditioner(self, spectrum: Spectrum, precise: bool) -> LinearMap:
        """The diagonal of the Jacobian in the eigenbasis of G, from squares of the eigenvectors.

        Entry ij of the diagonal of ``Proj'`` on symmetric matrices is a quadratic form of Omega in the squares of the
        eigenvectors (plus an exchange term, left out).
        """
        square_DD = spectrum.vector_DD.square()
        diagonal_DD = self.excess_DD * (square_DD @ spectrum.omega() @ square_DD.T) + self.weight
        return lambda vector_DD: vector_DD / diagonal_DD

    def lift(self, matrix_DD: Tensor) -> tuple[Tensor, Tensor]:
        factor_DD = self._vector_DD * self._congruence_D
        shifted_DD = factor_DD @ matrix_DD @ factor_DD.T
        shifted_DD = (shifted_DD + shifted_DD.T) / 2
        return shifted_DD, shifted_DD + dense(self._lower, shifted_DD)
