r"""One eigendecomposition, then the damped inverse :math:`(H + \rho R)^{-1} g` for any rho at the cost of a product.

R is the identity on regularised parameters and 0 on biases, which are never damped: they are eliminated exactly (Schur
complement), so translating the features changes nothing.

Shapes: B blocks of side K, of whose parameters D are regularised and U are biases; C classes, E = D (+ 1 with bias); M
values of rho. ``C E`` parameters are ``[B, C E / (B K), K]``, see :mod:`sfu.operators.explicit`.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from sfu.errors import SingularHessianError
from sfu.operators.base import DampedInverse

log = logging.getLogger(__name__)


def eigh(matrix_DD: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (ascending) and eigenvectors; an eigen-solve that fails on a GPU is repeated on the CPU in float64.

    Raises:
        torch.linalg.LinAlgError: the CPU fails too (values that are not finite).
    """
    try:
        return torch.linalg.eigh(matrix_DD)
    except torch.linalg.LinAlgError:
        if matrix_DD.device.type == "cpu":
            raise
        log.warning(
            "eigh of a %d x %d %s matrix failed on %s; repeated on the CPU in float64",
            *matrix_DD.shape,
            matrix_DD.dtype,
            matrix_DD.device,
        )
        value_D, vector_DD = torch.linalg.eigh(matrix_DD.double().cpu())
        return value_D.to(matrix_DD), vector_DD.to(matrix_DD)


class SpectralInverse(DampedInverse):
    """The family ``(H + rho R)^-1`` of explicit blocks.

    Attributes:
        eigenvalues_BD: Ascending eigenvalues of each block restricted to the regularised parameters (biases
        eliminated).
    """

    def __init__(self, blocks: Tensor, regularized_K: Tensor) -> None:
        """Decompose.

        Args:
            blocks: Symmetric Hessian blocks ``[B, K, K]``, or a single one.
            regularized_K: 1 for damped parameters, 0 for biases.

        Raises:
            SingularHessianError: The biases' own curvature is not positive.
        """
        blocks_BKK = blocks if blocks.ndim == 3 else blocks[None]
        self._kept, self._biases = ((regularized_K == flag).nonzero()[:, 0] for flag in (1, 0))
        if self._biases.numel():
            blocks_BKK = self._eliminate(blocks_BKK)
        pairs = [eigh((block + block.T) / 2) for block in blocks_BKK]
        self.eigenvalues_BD = torch.stack([values for values, _ in pairs])
        self._vectors_BDD = torch.stack([vectors for _, vectors in pairs])

    def _eliminate(self, blocks_BKK: Tensor) -> Tensor:
        rows_BUK = blocks_BKK[:, self._biases]
        own_BUU, cross_BUD = rows_BUK[:, :, self._biases], rows_BUK[:, :, self._kept]
        self._bias_inverse_BUU = torch.stack([bias_inverse(block) for block in own_BUU])
        self._coupling_BUD = self._bias_inverse_BUU @ cross_BUD
        return blocks_BKK[:, self._kept][:, :, self._kept] - cross_BUD.mT @ self._coupling_BUD

    @property
    def mean_eigenvalue(self) -> float:
        """Mean of the positive parts of the eigenvalues."""
        return float(self.eigenvalues_BD.clamp(min=0).mean())

    @property
    def invertible(self) -> bool:
        """No block is singular to working precision."""
        eps = self.eigenvalues_BD.shape[1] * torch.finfo(self.eigenvalues_BD.dtype).eps
        return bool((self.eigenvalues_BD[:, 0] > eps * self.eigenvalues_BD[:, -1]).all())

    def solve_many(self, right_CE: Tensor, rhos: list[float], *, floor: float = 0.0) -> Tensor:
        """See the base."""
        count, width = self.eigenvalues_BD.shape
        right_BNK = right_CE.reshape(count, -1, width + self._biases.numel())
        features_BND = right_BNK[..., self._kept]
        if self._biases.numel():
            bias_BNU = right_BNK[..., self._biases]
            features_BND = features_BND - bias_BNU @ self._coupling_BUD
        damped_MBD = self.eigenvalues_BD.clamp(min=floor) + self.eigenvalues_BD.new_tensor(rhos)[:, None, None]
        cutoff = width * torch.finfo(damped_MBD.dtype).eps * damped_MBD.abs().amax(2, keepdim=True)
        inverse_MBD = torch.where(damped_MBD > cutoff, 1.0 / damped_MBD.clamp(min=cutoff), 0.0)
        rotated_BND = features_BND @ self._vectors_BDD
        scaled_MBND = rotated_BND * inverse_MBD[:, :, None]
        solved_MBND = torch.einsum("mbnd,bed->mbne", scaled_MBND, self._vectors_BDD)  # @ would copy the vectors M times
        if not self._biases.numel():
            return solved_MBND.reshape(len(rhos), *right_CE.shape)
        whole = right_BNK.new_empty(len(rhos), *right_BNK.shape)
        whole[..., self._kept] = solved_MBND
        whole[..., self._biases] = bias_BNU @ self._bias_inverse_BUU - solved_MBND @ self._coupling_BUD.mT
        return whole.reshape(len(rhos), *right_CE.shape)

    def solve_rows(self, right_CE: Tensor, rho_C: Tensor) -> Tensor:
        """Of a single block, with a rho of its own for each row of the right-hand side, ``[C, E]``."""
        features_CD = right_CE[:, self._kept]
        if self._biases.numel():
            features_CD = features_CD - right_CE[:, self._biases] @ self._coupling_BUD[0]
        damped_CD = self.eigenvalues_BD.clamp(min=0) + rho_C[:, None]
        cutoff = damped_CD.shape[1] * torch.finfo(damped_CD.dtype).eps * float(damped_CD.max())
        solved_CD = (features_CD @ self._vectors_BDD[0] / damped_CD.clamp(min=cutoff)) @ self._vectors_BDD[0].T
        if not self._biases.numel():
            return solved_CD
        whole = torch.empty_like(right_CE)
        whole[:, self._kept] = solved_CD
        own = right_CE[:, self._biases] @ self._bias_inverse_BUU[0]
        whole[:, self._biases] = own - solved_CD @ self._coupling_BUD[0].T
        return whole


def bias_inverse(own_UU: Tensor) -> Tensor:
    """Pseudo-inverse of the biases' own curvature: a softmax does not feel equal biases.

    Raises:
        SingularHessianError: It is not positive anywhere, or negative somewhere.
    """
    values_U, vectors_UU = torch.linalg.eigh((own_UU + own_UU.T) / 2)
    cutoff = 1e-12 * float(values_U[-1])
    if not float(values_U[-1]) > 0 or float(values_U[0]) < -cutoff:
        raise SingularHessianError(
            f"the estimated curvature of the bias is {float(values_U[0]):g}; it must be positive. Use "
            "curvature.lower_bound=l2 with curvature.prior=identity, or head.bias=false."
        )
    inverse_U = torch.where(values_U > cutoff, 1 / values_U.clamp(min=cutoff), 0.0)
    return (vectors_UU * inverse_U) @ vectors_UU.T
