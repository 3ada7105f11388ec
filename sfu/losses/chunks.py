r"""Rows whose outputs are affine in the parameters: all that losses, curvature and training ask of a head.

.. math:: z_i(w) = z_i^0 + A_i w

A linear head has :math:`A_i W = W a_i` with the design row :math:`a_i`. Another kind of head brings another chunk.

Shapes: B rows, C classes, M vectors (any leading axes). Parameters are ``[..., C, E]`` where each class has E of its
own (D features, + 1 with bias), and ``[..., 1, p]`` where the classes share all p of them: the suffix ``_CE`` stands
for either. Output vectors (``cotangent``) are ``[B, ..., C]``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def outputs_of(design_BE: Tensor, parameters_QE: Tensor) -> Tensor:
    """Return ``a W^T`` of each row, ``[B, Q]``.

    The product is laid out so that the one back with the rows is fast, also under ``torch.func.vmap`` over W, where
    ``design @ W.T`` becomes a batch of small products (``scripts/bench_kernels.py``).
    """
    return (parameters_QE @ design_BE.T).T


@dataclass(frozen=True)
class Chunk(ABC):
    """Some rows with their labels and shares.

    Attributes:
        labels_B: Class indices, or targets ``[B, C]``.
        share_B: What each row counts for. The shares of a whole set sum to 1, so sums weighted by them are means.
    """

    labels_B: Tensor
    share_B: Tensor

    @abstractmethod
    def outputs(self, parameters: Tensor) -> Tensor:
        """Return ``z^0 + A w``, ``[B, ..., C]``."""

    @abstractmethod
    def push(self, vectors: Tensor) -> Tensor:
        """Return ``A v``, ``[B, ..., C]``."""

    @abstractmethod
    def pull(self, cotangent: Tensor) -> Tensor:
        """Return ``sum_i A_i^T b_i`` for b of shape ``[B, ..., C]``, in the shape of the parameters."""

    @abstractmethod
    def squares(self, cotangent_BC: Tensor) -> float:
        """Return ``sum_i |A_i^T b_i|^2``."""

    @abstractmethod
    def squares_of_rows(self) -> Tensor:
        """Return ``|A_i|_F^2`` of each row, ``[B]``; of a linear head ``|a_i|^2``, which is that of one class."""


@dataclass(frozen=True)
class LinearChunk(Chunk):
    """Design rows of a linear head."""

    design_BE: Tensor

    def outputs(self, parameters: Tensor) -> Tensor:
        return self.push(parameters)

    def push(self, vectors: Tensor) -> Tensor:
        flat_BQ = outputs_of(self.design_BE, vectors.reshape(-1, vectors.shape[-1]))
        return flat_BQ.unflatten(1, vectors.shape[:-1])

    def pull(self, cotangent: Tensor) -> Tensor:
        return (cotangent.flatten(1).T @ self.design_BE).reshape(*cotangent.shape[1:], self.design_BE.shape[1])

    def squares(self, cotangent_BC: Tensor) -> float:
        return float(cotangent_BC.square().sum(1) @ self.design_BE.square().sum(1))

    def squares_of_rows(self) -> Tensor:
        return self.design_BE.double().square().sum(1)


@dataclass(frozen=True)
class TableChunk(Chunk):
    """Rows given by their Jacobian A and their outputs at one point, for K parameters that all classes share."""

    jacobian_BCK: Tensor
    at_BC: Tensor
    origin_1K: Tensor

    def outputs(self, parameters: Tensor) -> Tensor:
        middle = [1] * (parameters.ndim - 2)
        return self.at_BC.unflatten(1, (*middle, -1)) + self.push(parameters - self.origin_1K)

    def push(self, vectors: Tensor) -> Tensor:
        flat_MK = vectors.reshape(-1, vectors.shape[-1])
        pushed_BMC = (self.jacobian_BCK @ flat_MK.T).mT
        return pushed_BMC.reshape(pushed_BMC.shape[0], *vectors.shape[:-2], pushed_BMC.shape[2])

    def pull(self, cotangent: Tensor) -> Tensor:
        flat_BMC = cotangent.reshape(cotangent.shape[0], -1, cotangent.shape[-1])
        return (flat_BMC @ self.jacobian_BCK).sum(0).reshape(*cotangent.shape[1:-1], 1, -1)

    def squares(self, cotangent_BC: Tensor) -> float:
        return float((cotangent_BC[:, None] @ self.jacobian_BCK).square().sum())

    def squares_of_rows(self) -> Tensor:
        return self.jacobian_BCK.square().sum((1, 2))
