"""Loss measurements in standard form: ``A(Y)_i = 1/2 d_i^T Y d_i``.

``A A* = (Delta Delta^T)^2 / 4`` elementwise, a P x P matrix; nothing of size P x D^2 is ever formed.

Shapes: P perturbations, D features (the rank of the perturbations after reduction), R positive eigenvalues, K others.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from sfu.curvature.psd_fit.problem import LossMeasurements, dense
from sfu.curvature.psd_fit.standard_form import LinearMap, Spectrum, StandardForm, perron_bound
from sfu.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

# Up to this many measurements, float32 saves nothing.
SMALL_COUNT = 512
# Negative losses matter from this share of the sum of squares.
NEGATIVE_SHARE = 1e-3
# Multiplications at most for a Jacobian that is formed.
SMALL_PRODUCT = 1 << 24


class LossForm(StandardForm):
    """Losses in standard form: ``c = mu P / 2``, ``B = X0 - L``, ``t = target - A(L)``, ``scale = mu``.

    When there are fewer perturbations than features and L and X0 are multiples of the identity, the data say nothing
    outside the span of the perturbations: the solution there is ``max(L, X0)`` times the identity, and the problem is
    solved inside the span (QR of ``Delta^T``).
    """

    def __init__(
        self,
        measurements: LossMeasurements,
        lower: Tensor,
        prior: Tensor,
        mu: float | None,
        prior_strength: float,
    ) -> None:
        delta_PD = measurements.delta_PD.double()
        target_P = measurements.target_P.to(delta_PD)
        count, dimension = delta_PD.shape
        self._lower, self._basis_FD, self._outside = lower, None, 0.0
        outside_objective = 0.0
        if count < dimension and lower.ndim == 0 and prior.ndim == 0:
            self._basis_FD, triangle = torch.linalg.qr(delta_PD.T)
            delta_PD = triangle.T.contiguous()
            shift = float(prior - lower)
            self._outside = max(shift, 0.0)
            outside_objective = (dimension - delta_PD.shape[1]) / 2 * min(shift, 0.0) ** 2
        lower_DD = dense(lower, delta_PD)
        base_DD = dense(prior, delta_PD) - lower_DD
        target_P = target_P - ((delta_PD @ lower_DD) * delta_PD).sum(1) / 2

        self.delta_PD, self.target = delta_PD, target_P
        misfit = self._observe()
        unknowns = delta_PD.shape[1] * (delta_PD.shape[1] + 1) // 2
        rest = float(self.gram_PP.diagonal().sum()) - self.operator_norm
        self.bulk = max(rest, 0.0) / max(1, min(count, unknowns) - 1)
        # with every perturbation zero the data say nothing: any positive mu gives the prior
        self.mu = mu if mu is not None else prior_strength * 2 / count * self.operator_norm or 1.0
        self.base_DD = base_DD
        self.weight = self.mu * count / 2
        self.scale = self.mu
        self.offset = self.mu * outside_objective + misfit / count
        data_scale = float(target_P.square().mean())
        self.floor = 1e-20 * (data_scale + self.mu / 2 * float(base_DD.square().sum()))

    def _observe(self) -> float:
        """Set ``A A*`` and its norm, and return the part of ``|t|^2`` that no X changes."""
        self.gram_PP = (self.delta_PD @ self.delta_PD.T).square_().div_(4)
        self.operator_norm = perron_bound(lambda vector_P: self.gram_PP @ vector_P, self.gram_PP.diagonal())
        return 0.0

    def forward(self, matrix_DD: Tensor) -> Tensor:
        return ((self.delta_PD @ matrix_DD) * self.delta_PD).sum(1) / 2

    def adjoint(self, dual: Tensor) -> Tensor:
        matrix_DD = self.delta_PD.T @ (dual[:, None] * self.delta_PD) / 2
        return (matrix_DD + matrix_DD.T) / 2

    def solve_inactive(self) -> Tensor:
        rhs_P = self.target - self.forward(self.base_DD)
        dual_P = self._inactive(rhs_P)
        return dual_P + self._inactive(rhs_P - self.gram_PP @ dual_P - self.weight * dual_P)

    def at_weight(self, weight: float) -> LossForm:
        form = super().at_weight(weight)
        form.__dict__.pop("_inactive", None)
        return form

    @cached_property
    def _inactive(self) -> LinearMap:
        """The inverse of ``A A* + c I``."""
        return inverse_of(self.gram_PP.clone(), self.weight)

    def rough_inverse(self, shift: float) -> LinearMap:
        unit = self.operator_norm or 1.0  # its entries may be too large for float32
        dtype = torch.float32 if self.gram_PP.shape[0] > SMALL_COUNT else self.gram_PP.dtype
        return inverse_of((self.gram_PP / unit).to(dtype), shift / unit, unit)

    def evaluate(self, dual: Tensor) -> tuple[Spectrum, Tensor]:
        spectrum = Spectrum.of(self.base_DD + self.adjoint(dual))
        self._rotated = (spectrum, self.delta_PD @ spectrum.vector_DD)
        split = spectrum.split
        return spectrum, self._rotated[1][:, split:].square() @ spectrum.value_D[split:] / 2

    def _blocks(self, spectrum: Spectrum) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``Delta U``, and its columns on the positive and on the other eigenvectors."""
        cached, rotated_PD = self._rotated
        if cached is not spectrum:
            rotated_PD = self.delta_PD @ spectrum.vector_DD
        return rotated_PD, rotated_PD[:, spectrum.split :], rotated_PD[:, : spectrum.split]

    def jacobian(self, spectrum: Spectrum) -> LinearMap:
        """``A Proj' A*`` in the eigenbasis, through whichever side of the spectrum is the smaller.

        With few positive eigenvalues only their rows of ``U^T A*(v) U`` matter (4 P R D flops); with few others,
        ``Proj' = I - (its complement)`` and ``A A*`` is at hand (2 P^2 + 4 P K D flops).
        """
        rotated_PD, positive_PR, other_PK = self._blocks(spectrum)
        split, omega_RK = spectrum.split, spectrum.omega_RK
        if split >= rotated_PD.shape[1] - split:

            def from_positive(vector_P: Tensor) -> Tensor:
                mixed_RD = positive_PR.T @ (vector_P[:, None] * rotated_PD)
                mixed_RD[:, :split] *= 2 * omega_RK
                return ((positive_PR @ mixed_RD) * rotated_PD).sum(1) / 4

            return from_positive

        def from_other(vector_P: Tensor) -> Tensor:
            mixed_KD = other_PK.T @ (vector_P[:, None] * rotated_PD)
            mixed_KD[:, split:] *= 2 * (1 - omega_RK.T)
            return self.gram_PP @ vector_P - ((other_PK @ mixed_KD) * rotated_PD).sum(1) / 4

        return from_other

    def preconditioner(self, spectrum: Spectrum, precise: bool) -> LinearMap:
        """Cholesky of the Jacobian with the mixed block of Omega replaced by its best rank-one ``left right^T``.

        A rank-one block makes that part of the Jacobian the elementwise product of two P x P Gram matrices. Both
        vectors are positive (Perron), so the matrix stays positive semidefinite. Omega = a / (a + b) is Cauchy-like:
        near rank one, and the nearer the larger b is. Two to ten conjugate-gradient steps remain. Unless it is to be
        precise, all of it is float32, at half the time. A small Jacobian is formed as it is.
        """
        if spectrum.split == 0:
            return self._inactive
        if self.delta_PD.shape[0] ** 2 * spectrum.omega_RK.numel() <= SMALL_PRODUCT:
            return inverse_of(self._exact_jacobian(spectrum), self.weight)
        dtype = self.delta_PD.dtype if precise else torch.float32
        rotated_PD, *blocks = self._blocks(spectrum)
        size = float(rotated_PD.square().mean()) ** 0.5 or 1.0  # entries of size 1, which float32 can square twice
        positive_PR, other_PK = ((block / size).to(dtype) for block in blocks)
        matrix_PP = (positive_PR @ positive_PR.T).square_().div_(4)
        if positive_PR.shape[1] > 0:
            left_R, right_K = _rank_one(spectrum.omega_RK.float())
            positive_PR, other_PK = positive_PR.float(), other_PK.float()
            mixed_PP = ((positive_PR * left_R) @ positive_PR.T).mul_((other_PK * right_K) @ other_PK.T)
            matrix_PP.add_(mixed_PP, alpha=0.5)
        return inverse_of(matrix_PP, self.weight / size**4, size**4)

    def _exact_jacobian(self, spectrum: Spectrum) -> Tensor:
        _, positive_PR, other_PK = self._blocks(spectrum)
        matrix_PP = (positive_PR @ positive_PR.T).square_().div_(4)
        mixed_PQ = (positive_PR[:, :, None] * other_PK[:, None, :] * spectrum.omega_RK.sqrt()).flatten(1)
        return matrix_PP.addmm_(mixed_PQ, mixed_PQ.T, alpha=0.5)

    def prefers_first_order(self) -> bool:
        """Whether losses outnumber the unknowns, so that the data term is well conditioned and P x P matrices large."""
        count, size = self.delta_PD.shape
        return count > size * (size + 1) // 2

    def beyond_reach(self) -> bool:
        """Whether some losses are negative: d^T Y d is not, for any Y >= 0."""
        negative = float(self.target.clamp(max=0).square().sum())
        return negative > NEGATIVE_SHARE * float(self.target.square().sum())

    def lift(self, matrix_DD: Tensor) -> tuple[Tensor, Tensor]:
        shifted_FF = matrix_DD
        if self._basis_FD is not None:
            inside_FF = self._basis_FD @ shifted_FF @ self._basis_FD.T
            eye_FF = torch.eye(inside_FF.shape[0], dtype=inside_FF.dtype, device=inside_FF.device)
            shifted_FF = inside_FF + self._outside * (eye_FF - self._basis_FD @ self._basis_FD.T)
        shifted_FF = (shifted_FF + shifted_FF.T) / 2
        return shifted_FF, shifted_FF + dense(self._lower, shifted_FF)


def _factor(matrix_PP: Tensor, weight: float) -> Tensor:
    """Return the Cholesky factor of ``matrix + weight I`` (in place), raising the shift until it is positive definite.

    Raises:
        torch.linalg.LinAlgError: The matrix is not finite.
    """
    about = torch.finfo(matrix_PP.dtype)
    extra = max(float(matrix_PP.diagonal().mean()) * about.eps, about.tiny)
    matrix_PP.diagonal().add_(weight)
    factor_PP, info = torch.linalg.cholesky_ex(matrix_PP)
    while int(info) != 0:  # ends: the shift grows tenfold until it outweighs the matrix
        if not torch.isfinite(matrix_PP).all():
            raise torch.linalg.LinAlgError("a product of the measurements is not finite")
        matrix_PP.diagonal().add_(extra)
        extra *= 10
        factor_PP, info = torch.linalg.cholesky_ex(matrix_PP)
    return factor_PP


def inverse_of(matrix_PP: Tensor, weight: float, unit: float = 1.0) -> LinearMap:
    """Return the inverse of ``unit (matrix + weight I)`` as a map of vectors in any dtype, and overwrite the matrix."""
    factor_PP = _factor(matrix_PP, weight)
    upper_PP = factor_PP.mT

    def solve(vector_P: Tensor) -> Tensor:
        right_P1 = (vector_P / unit)[:, None]
        length = 1.0
        if right_P1.dtype != factor_PP.dtype:
            length = float(right_P1.norm()) or 1.0
            right_P1 = (right_P1 / length).to(factor_PP.dtype)
        half_P1 = torch.linalg.solve_triangular(factor_PP, right_P1, upper=False)
        return torch.linalg.solve_triangular(upper_PP, half_P1, upper=True)[:, 0].to(vector_P) * length

    return solve


def _rank_one(omega_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the leading singular pair of a matrix with positive entries, the singular value in ``right_K``."""
    right_K = torch.ones_like(omega_RK[0])
    for _ in range(4):
        left_R = omega_RK @ right_K
        left_R = left_R / left_R.norm()
        right_K = left_R @ omega_RK
    return left_R, right_K
