r"""The damped inverse :math:`(H + \rho R)^{-1} g` for any rho at the cost of a product, after one eigendecomposition.

R is the identity on regularised parameters and 0 on biases, which are never damped: they are eliminated exactly (Schur
complement), so translating the features changes nothing.

Shapes: B blocks of side K, of whose parameters D are regularised and U are biases; C classes, E = D (+ 1 with bias); M
values of rho. ``C E`` parameters are ``[B, C E / (B K), K]``, see :mod:`sfu.operators.explicit`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sfu.deadline import check_time
from sfu.errors import SingularHessianError
from sfu.lazy import torch
from sfu.operators.base import NOTHING_UNSEEN, CurvatureOperator, DampedInverse, Unseen
from sfu.operators.threads import one_thread

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

# A second thread does not speed up eigendecompositions up to this size.
SMALL_SIDE = 128


def eigh(matrix_DD: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues (ascending) and eigenvectors, falling back to float64 on the CPU if the GPU's solver fails.

    Raises:
        TimeLimitError: There is no time left.
        torch.linalg.LinAlgError: The CPU's solver fails too, because values are not finite.
    """
    check_time()
    try:
        with one_thread(matrix_DD.shape[-1] <= SMALL_SIDE):
            return torch.linalg.eigh(matrix_DD)
    except torch.linalg.LinAlgError:
        if matrix_DD.device.type == "cpu":
            raise
        log.warning(
            "The eigendecomposition of a %d x %d %s matrix failed on %s and is repeated on the CPU in float64.",
            *matrix_DD.shape, matrix_DD.dtype, matrix_DD.device,
        )  # fmt: skip
        value_D, vector_DD = torch.linalg.eigh(matrix_DD.double().cpu())
        return value_D.to(matrix_DD), vector_DD.to(matrix_DD)


def without_negative(blocks: Tensor) -> Tensor:
    """Return the nearest positive semidefinite matrices to symmetric ``[K, K]`` or ``[B, K, K]``."""
    pairs = [eigh((block + block.T) / 2) for block in (blocks if blocks.ndim == 3 else blocks[None])]
    clipped = torch.stack([(vectors * values.clamp(min=0)) @ vectors.T for values, vectors in pairs])
    return clipped.reshape(blocks.shape)


class SpectralInverse(DampedInverse):
    """The family ``(H + rho R)^-1`` of explicit blocks; ``eigenvalues_BD`` ascend, with biases eliminated."""

    def __init__(self, blocks: Tensor, regularized_K: Tensor, unseen: Unseen = NOTHING_UNSEEN) -> None:
        """Decompose symmetric blocks ``[B, K, K]``, or a single one; ``unseen`` are further directions of each.

        Raises:
            SingularHessianError: The biases' own curvature is not positive.
        """
        blocks_BKK = blocks if blocks.ndim == 3 else blocks[None]
        self._unseen = unseen
        self._regularized, self._biases = ((regularized_K == flag).nonzero()[:, 0] for flag in (1, 0))
        if self._biases.numel():
            blocks_BKK = self._eliminate(blocks_BKK)
        pairs = [eigh((block + block.T) / 2) for block in blocks_BKK]
        self.eigenvalues_BD = torch.stack([values for values, _ in pairs])
        self._vectors_BDD = torch.stack([vectors for _, vectors in pairs])

    def _eliminate(self, blocks_BKK: Tensor) -> Tensor:
        rows_BUK = blocks_BKK[:, self._biases]
        own_BUU, cross_BUD = rows_BUK[:, :, self._biases], rows_BUK[:, :, self._regularized]
        self._bias_inverse_BUU = torch.stack([bias_inverse(block) for block in own_BUU])
        self._coupling_BUD = self._bias_inverse_BUU @ cross_BUD
        return blocks_BKK[:, self._regularized][:, :, self._regularized] - cross_BUD.mT @ self._coupling_BUD

    @property
    def mean_eigenvalue(self) -> float:
        return self._unseen.mean_with(float(self.eigenvalues_BD.clamp(min=0).mean()), self.eigenvalues_BD.shape[1])

    @property
    def eigenvalues(self) -> Tensor:
        return self.eigenvalues_BD.flatten()

    @property
    def invertible(self) -> bool:
        eps = self.eigenvalues_BD.shape[1] * torch.finfo(self.eigenvalues_BD.dtype).eps
        return bool((self.eigenvalues_BD[:, 0] > eps * self.eigenvalues_BD[:, -1]).all())

    def solve_many(self, right_CE: Tensor, rhos: list[float], *, floor: float = 0.0) -> Tensor:
        count, width = self.eigenvalues_BD.shape
        right_BNK = right_CE.reshape(count, -1, width + self._biases.numel())
        scaled_MBND = (self._reduce(right_BNK) @ self._vectors_BDD) * self._inverses(rhos, floor)[:, :, None]
        solved_MBND = torch.einsum("mbnd,bed->mbne", scaled_MBND, self._vectors_BDD)  # @ would copy the vectors M times
        return self._with_biases(solved_MBND, right_BNK).reshape(len(rhos), *right_CE.shape)

    def _inverses(self, rhos: list[float], floor: float) -> Tensor:
        """Return the inverse of each damped eigenvalue, ``[M, B, D]``; 0 for one that is 0 to working precision."""
        damped_MBD = self.eigenvalues_BD.clamp(min=floor) + self.eigenvalues_BD.new_tensor(rhos)[:, None, None]
        cutoff = damped_MBD.shape[2] * torch.finfo(damped_MBD.dtype).eps * damped_MBD.abs().amax(2, keepdim=True)
        return torch.where(damped_MBD > cutoff, 1.0 / damped_MBD.clamp(min=cutoff), 0.0)

    def scores(
        self, right_CE: Tensor, rhos: list[float], held_out: CurvatureOperator, *, floor: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Score; where there are many solutions of one block, without forming any of them."""
        blocks_BKK = getattr(held_out, "blocks_BKK", None)
        side = self.eigenvalues_BD.shape[1] + self._biases.numel()
        if blocks_BKK is None or blocks_BKK.shape != (1, side, side) or len(self.eigenvalues_BD) > 1:
            return super().scores(right_CE, rhos, held_out, floor=floor)
        right_NK = right_CE.reshape(-1, side)
        if len(right_NK) * len(rhos) <= side:
            return super().scores(right_CE, rhos, held_out, floor=floor)
        return self._scores(right_NK, self._inverses(rhos, floor)[:, 0], blocks_BKK[0])

    def _scores(self, right_NK: Tensor, inverse_MD: Tensor, held_out_KK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r"""Score ``u_n = V (d * r_n)`` for the diagonals d, with r the right-hand sides in eigenvectors V.

        .. math:: \sum_n u_n^T H u_n = d^T \bigl((V^T H V) \odot \sum_n r_n r_n^T\bigr) d

        Biases are affine in u: what they add to the regularised parameters is put into H, a linear term and a constant.
        """
        vectors_DD, features, biases = self._vectors_BDD[0], self._regularized, self._biases
        rotated_ND = self._reduce(right_NK[None])[0] @ vectors_DD
        curvature_DD = held_out_KK[features][:, features]
        outer_DD, rotated_D = rotated_ND.T @ rotated_ND, rotated_ND.square().sum(0)
        along, linear_D, constant = right_NK.new_zeros(()), torch.zeros_like(inverse_MD[0]), right_NK.new_zeros(())
        square_M = inverse_MD.square() @ rotated_D
        if biases.numel():
            coupling_UD, cross_UD = self._coupling_BUD[0], held_out_KK[biases][:, features]
            own_UU, own_NU = held_out_KK[biases][:, biases], right_NK[:, biases] @ self._bias_inverse_BUU[0]
            mixed_DD = cross_UD.T @ coupling_UD
            curvature_DD = curvature_DD - mixed_DD - mixed_DD.T + coupling_UD.T @ own_UU @ coupling_UD
            along = (own_NU * right_NK[:, biases]).sum()
            linear_D = 2 * ((own_NU @ (cross_UD - own_UU @ coupling_UD) @ vectors_DD) * rotated_ND).sum(0)
            constant = (own_NU @ own_UU * own_NU).sum()
            of_biases_UD = coupling_UD @ vectors_DD
            square_M += ((inverse_MD @ ((of_biases_UD.T @ of_biases_UD) * outer_DD)) * inverse_MD).sum(1)
            square_M += own_NU.square().sum() - 2 * inverse_MD @ ((own_NU @ of_biases_UD) * rotated_ND).sum(0)
        weighed_DD = (vectors_DD.T @ curvature_DD @ vectors_DD) * outer_DD
        curved_M = ((inverse_MD @ weighed_DD) * inverse_MD).sum(1) + inverse_MD @ linear_D + constant
        return inverse_MD @ rotated_D + along, curved_M, square_M

    def solve_rows(self, right_CE: Tensor, rho_C: Tensor) -> Tensor:
        """Solve with a single block and one rho for each row of the right-hand side, ``[C, E]``."""
        damped_CD = self.eigenvalues_BD.clamp(min=0) + rho_C[:, None]
        cutoff = damped_CD.shape[1] * torch.finfo(damped_CD.dtype).eps * float(damped_CD.max())
        rotated_1CD = self._reduce(right_CE[None]) @ self._vectors_BDD / damped_CD.clamp(min=cutoff)
        return self._with_biases(rotated_1CD @ self._vectors_BDD.mT, right_CE[None])[0]

    def _reduce(self, right_BNK: Tensor) -> Tensor:
        """Eliminate the biases from right-hand sides, ``[B, N, D]``."""
        features_BND = right_BNK[..., self._regularized]
        if not self._biases.numel():
            return features_BND
        return features_BND - right_BNK[..., self._biases] @ self._coupling_BUD

    def _with_biases(self, solved: Tensor, right_BNK: Tensor) -> Tensor:
        """Add the biases to solutions ``[..., B, N, D]`` of the reduced system."""
        if not self._biases.numel():
            return solved
        whole = solved.new_empty(*solved.shape[:-1], right_BNK.shape[-1])
        whole[..., self._regularized] = solved
        own_BNU = right_BNK[..., self._biases] @ self._bias_inverse_BUU
        whole[..., self._biases] = own_BNU - solved @ self._coupling_BUD.mT
        return whole


def bias_inverse(own_UU: Tensor) -> Tensor:
    """Return the pseudo-inverse of the biases' own curvature; that of a softmax is singular along equal biases.

    Raises:
        SingularHessianError: An eigenvalue is negative beyond rounding, or none is positive.
    """
    values_U, vectors_UU = torch.linalg.eigh((own_UU + own_UU.T) / 2)
    # entries of up to 1 are subtracted: that of a well-fitted softmax is far smaller than their rounding
    cutoff = max(1e-12 * float(values_U[-1]), 1e-13)
    if not float(values_U[-1]) > 0 or float(values_U[0]) < -cutoff:
        raise SingularHessianError(
            f"the estimated curvature of the bias is {float(values_U[0]):g}, but it must be positive to be inverted. "
            "Set curvature.lower_bound=l2 with curvature.prior=identity, or head.bias=false."
        )
    inverse_U = torch.where(values_U > cutoff, 1 / values_U.clamp(min=cutoff), 0.0)
    return (vectors_UU * inverse_U) @ vectors_UU.T
