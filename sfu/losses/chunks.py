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
