r"""One eigendecomposition, then the damped inverse :math:`(H + \rho R)^{-1} g` for any rho at the cost of a product.

R is the identity on regularised parameters and 0 on the bias, which is never damped: it is eliminated exactly (Schur
complement), so translating the features changes nothing.

Shapes: E = D (+ 1 with bias), C classes, K values of rho.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfu.curvature.psd_fit.projection import eigh
from sfu.errors import SingularHessianError


class SpectralInverse:
    """The family ``(H + rho R)^-1``.

    Attributes:
        eigenvalues_D: Ascending eigenvalues of H restricted to the regularised parameters (the bias eliminated).
    """

    def __init__(self, hessian_EE: Tensor, regularized_E: Tensor) -> None:
        """Decompose.

        Args:
            hessian_EE: Symmetric Hessian block.
            regularized_E: 1 for damped parameters; at most one 0, in the last place.

        Raises:
            SingularHessianError: The bias's own curvature is not positive.
        """
        self._has_bias = bool(regularized_E[-1] == 0)
        block = hessian_EE
        if self._has_bias:
            self._bias_curvature = float(hessian_EE[-1, -1])
            if not self._bias_curvature > 0:
                raise SingularHessianError(
                    f"the estimated curvature of the bias is {self._bias_curvature:g}; it must be positive. Use "
                    "curvature.lower_bound=l2 with curvature.prior=identity, or head.bias=false."
                )
            self._coupling_D = hessian_EE[:-1, -1] / self._bias_curvature
            block = hessian_EE[:-1, :-1] - torch.outer(self._coupling_D, hessian_EE[-1, :-1])
        self.eigenvalues_D, self._vectors_DD = eigh((block + block.T) / 2)

    @property
    def mean_eigenvalue(self) -> float:
        """Mean of the positive parts of the eigenvalues."""
        return float(self.eigenvalues_D.clamp(min=0).mean())

    def solve(self, right_CE: Tensor, rho: float = 0.0, *, floor: float = 0.0) -> Tensor:
        """``(H + rho R)^-1`` applied to each row of ``right_CE``.

        Args:
            right_CE: Right-hand sides.
            rho: Damping, at least 0.
            floor: A known lower bound of the eigenvalues, to which smaller ones are raised. With a floor of 0,
                eigenvalues that are 0 to working precision are left out (Moore-Penrose inverse).
        """
        return self.solve_many(right_CE, [rho], floor=floor)[0]

    def solve_many(self, right_CE: Tensor, rhos: list[float], *, floor: float = 0.0) -> Tensor:
        """:meth:`solve` for every rho, ``[K, C, E]``."""
        features_CD = right_CE
        if self._has_bias:
            features_CD = right_CE[:, :-1] - right_CE[:, -1:] * self._coupling_D
        damped_KD = self.eigenvalues_D.clamp(min=floor) + self.eigenvalues_D.new_tensor(rhos)[:, None]
        cutoff = damped_KD.shape[1] * torch.finfo(damped_KD.dtype).eps * damped_KD.abs().amax(1, keepdim=True)
        inverse_KD = torch.where(damped_KD > cutoff, 1.0 / damped_KD.clamp(min=cutoff), 0.0)
        rotated_CD = features_CD @ self._vectors_DD
        solved_KCD = (rotated_CD * inverse_KD[:, None]) @ self._vectors_DD.T
        if not self._has_bias:
            return solved_KCD
        bias_KC = right_CE[:, -1] / self._bias_curvature - solved_KCD @ self._coupling_D
        return torch.cat([solved_KCD, bias_KC[..., None]], dim=-1)
