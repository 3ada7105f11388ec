r"""Some rows whose outputs are affine in the parameters: all that losses, curvature and training ask of them.

.. math:: z_i(w) = z_i^0 + A_i w

The linear head has :math:`A_i W = W a_i` with the design row :math:`a_i`. Another head is another chunk.

Shapes: B rows, E = D features (+ 1 with bias), C classes. Parameters and vectors are ``[..., C, E]``, or
``[..., 1, p]`` where the classes share all p of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


def outputs_of(design_BE: Tensor, parameters_QE: Tensor) -> Tensor:
    """``a W^T`` for each row, ``[B, Q]``, laid out so that the product back with the rows is a fast one."""
    return (parameters_QE @ design_BE.T).T


@dataclass(frozen=True)
class Chunk(ABC):
    """See the module.

    Attributes:
        labels_B: Class indices.
        share_B: What each row counts for; the shares of all chunks sum to 1, so that sums weighted by them are means.
    """

    labels_B: Tensor
    share_B: Tensor

    @abstractmethod
    def outputs(self, parameters: Tensor) -> Tensor:
        """``z^0 + A w``, ``[B, ..., C]``."""

    @abstractmethod
    def push(self, vectors: Tensor) -> Tensor:
        """``A v``, ``[B, ..., C]``."""

    @abstractmethod
    def pull(self, bent: Tensor) -> Tensor:
        """``sum_i A_i^T b_i`` for b of shape ``[B, ..., C]``, in the shape of the parameters."""

    @abstractmethod
    def squares(self, bent_BC: Tensor) -> float:
        """``sum_i |A_i^T b_i|^2``."""


@dataclass(frozen=True)
class LinearChunk(Chunk):
    """Rows of a linear head.

    Attributes:
        design_BE: Design rows.
    """

    design_BE: Tensor

    def outputs(self, parameters: Tensor) -> Tensor:
        """Nothing but the linear part."""
        return self.push(parameters)

    def push(self, vectors: Tensor) -> Tensor:
        """One product for all vectors."""
        flat_BQ = outputs_of(self.design_BE, vectors.reshape(-1, vectors.shape[-1]))
        return flat_BQ.unflatten(1, vectors.shape[:-1])

    def pull(self, bent: Tensor) -> Tensor:
        """One product for all vectors."""
        flat_BQ = bent.reshape(bent.shape[0], -1)
        return (flat_BQ.T @ self.design_BE).reshape(*bent.shape[1:], self.design_BE.shape[1])

    def squares(self, bent_BC: Tensor) -> float:
        """Norms of outer products multiply."""
        return float(bent_BC.square().sum(1) @ self.design_BE.square().sum(1))


@dataclass(frozen=True)
class TableChunk(Chunk):
    """Rows given by their Jacobian, for a few parameters that all classes share: parameters are ``[..., 1, K]``.

    Attributes:
        jacobian_BCK: A.
        at_BC: Outputs at the origin.
        origin_1K: Parameters there.
    """

    jacobian_BCK: Tensor
    at_BC: Tensor
    origin_1K: Tensor

    def outputs(self, parameters: Tensor) -> Tensor:
        """Affine about the origin."""
        middle = [1] * (parameters.ndim - 2)
        return self.at_BC.unflatten(1, (*middle, -1)) + self.push(parameters - self.origin_1K)

    def push(self, vectors: Tensor) -> Tensor:
        """One product for all vectors."""
        flat_MK = vectors.reshape(-1, vectors.shape[-1])
        pushed_BMC = (self.jacobian_BCK @ flat_MK.T).mT
        return pushed_BMC.reshape(pushed_BMC.shape[0], *vectors.shape[:-2], pushed_BMC.shape[2])

    def pull(self, bent: Tensor) -> Tensor:
        """One product for all vectors."""
        flat_BMC = bent.reshape(bent.shape[0], -1, bent.shape[-1])
        return (flat_BMC @ self.jacobian_BCK).sum(0).reshape(*bent.shape[1:-1], 1, -1)

    def squares(self, bent_BC: Tensor) -> float:
        """Row by row."""
        return float((bent_BC[:, None] @ self.jacobian_BCK).square().sum())
