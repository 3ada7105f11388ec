r"""A positive semidefinite matrix in about one byte for each of its free entries.

With :math:`d_i = \sqrt{S_{ii}}`, the matrix :math:`S_{ij} / (d_i d_j)` has a unit diagonal, so the scale of a feature
does not matter. It is held as :math:`F^T F + t I`, with the entries of F in 8 bits and a scale for each row of F:

- ``cholesky``: F is the Cholesky factor, its diagonal in float32, and t = 0. All directions are held equally well.
- ``eigenpairs``: the rows of F are the leading eigenvectors times :math:`\sqrt{\lambda - t}`, as many as take the same
  bytes; t is the mean of the other eigenvalues.

Whatever the rounding, the decoded matrix is positive semidefinite.

Shapes: B blocks of side K, M rows of F, T = K (K - 1) / 2 entries above the diagonal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Self

from sfu.heads.settings import SketchKind
from sfu.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 127


@dataclass(frozen=True)
class Sketch:
    """An encoded matrix, or one for each class.

    Attributes:
        codes: Entries of F in units of their row's scale, int8: those above the diagonal, row by row, ``[B, T]``, or
            all of them, ``[B, M, K]``.
        scales: Scale of each row of F, float32, ``[B, K]`` or ``[B, M]``.
        diagonal: Diagonal of the Cholesky factor, ``[B, K]``, or t, ``[B, 1]``; float32.
        norms_BK: The d, float32.
    """

    codes: Tensor
    scales: Tensor
    diagonal: Tensor
    norms_BK: Tensor

    @property
    def kind(self) -> SketchKind:
        return SketchKind.cholesky if self.codes.ndim == 2 else SketchKind.eigenpairs

    @classmethod
    def encode(cls, blocks: Tensor, kind: SketchKind) -> Self:
        """Encode positive semidefinite blocks, ``[K, K]`` or ``[B, K, K]``; negative eigenvalues become 0."""
        blocks_BKK = (blocks if blocks.ndim == 3 else blocks[None]).double()
        parts = [_encode(block_KK, kind) for block_KK in blocks_BKK]
        return cls(*(torch.stack(some) for some in zip(*parts, strict=True)))

    def decode(self) -> Tensor:
        """Return the blocks in float64, ``[B, K, K]``."""
        return torch.stack([self._decode(index) for index in range(len(self.codes))])

    def _decode(self, index: int) -> Tensor:
        norms_K, scales = self.norms_BK[index].double(), self.scales[index].double()
        width = norms_K.shape[0]
        if self.kind is SketchKind.cholesky:
            factor = norms_K.new_zeros(width, width)
            row, column = torch.triu_indices(width, width, 1, device=factor.device)
            factor[row, column] = self.codes[index] * scales[row]
            factor += torch.diag(self.diagonal[index].double())
            rest = 0.0
        else:
            factor, rest = self.codes[index] * scales[:, None], float(self.diagonal[index])
        return (factor.T @ factor + torch.diag(torch.full_like(norms_K, rest))) * norms_K[:, None] * norms_K

    def to(self, device: torch.device) -> Self:
        """Return it on another device."""
        return type(self)(*(tensor.to(device) for tensor in self.tensors().values()))

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by the names of the attributes."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Return what :meth:`tensors` gave.

        Raises:
            ValueError: A tensor is missing, of another type or shape, or not finite, or a number is negative.
        """
        found = cls(*(_required(tensors, one.name) for one in fields(cls)))
        codes = found.codes
        if codes.dtype != torch.int8 or codes.ndim not in (2, 3) or found.norms_BK.ndim != 2:
            raise ValueError(f"the sketch's codes are {codes.dtype} of shape {list(codes.shape)}, not [B, T] in int8")
        count, width = found.norms_BK.shape
        triangular = found.kind is SketchKind.cholesky
        n_rows, n_diagonal = (width, width) if triangular else (codes.shape[1], 1)
        wanted = [count, width * (width - 1) // 2] if triangular else [count, n_rows, width]
        if list(codes.shape) != wanted:
            raise ValueError(f"the sketch's codes are {list(codes.shape)}, not {wanted}")
        for name, size in {"scales": n_rows, "diagonal": n_diagonal, "norms_BK": width}.items():
            tensor: Tensor = getattr(found, name)
            good = tensor.dtype == torch.float32 and list(tensor.shape) == [count, size]
            if not good or not bool((torch.isfinite(tensor) & (tensor >= 0)).all()):
                raise ValueError(f"the sketch's {name} are not {[count, size]} finite float32 numbers of at least 0")
        return found


def _required(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise ValueError(f"the sketch has no tensor {name}")
    return tensors[name]


def bytes_of_sketch(kind: SketchKind, count: int, width: int) -> int:
    """Return the bytes of a sketch of ``count`` blocks of side ``width``."""
    if kind is SketchKind.cholesky:
        return count * (width * (width - 1) // 2 + 3 * 4 * width)
    n_rows = min(n_eigenpairs(width), width)
    return count * (n_rows * (width + 4) + 4 + 4 * width)


def n_eigenpairs(width: int) -> int:
    """Return how many eigenpairs take at most the bytes of the Cholesky factor."""
    return max(1, (width * (width - 1) // 2 + 8 * width - 4) // (width + 4))


def _encode(block_KK: Tensor, kind: SketchKind) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    norms_K = block_KK.diagonal().clamp(min=0).sqrt()
    divisor_K = torch.where(norms_K > 0, norms_K, 1.0)
    values_K, vectors_KK = torch.linalg.eigh(block_KK / divisor_K / divisor_K[:, None])
    values_K = values_K.clamp(min=0)
    if kind is SketchKind.cholesky:  # from the eigenpairs, so that a singular matrix has one too
        factor_KK = torch.linalg.qr((vectors_KK * values_K.sqrt()).T, mode="r").R
        factor_KK = factor_KK * torch.where(factor_KK.diagonal() < 0, -1.0, 1.0)[:, None]
        width = len(factor_KK)
        codes, scales = _quantised(factor_KK.triu(1))
        row, column = torch.triu_indices(width, width, 1, device=codes.device)
        return codes[row, column], scales, factor_KK.diagonal().float(), norms_K.float()
    count = min(n_eigenpairs(len(values_K)), len(values_K))
    rest = values_K[:-count].mean() if count < len(values_K) else values_K.new_zeros(())
    factor_MK = (vectors_KK[:, -count:] * (values_K[-count:] - rest).clamp(min=0).sqrt()).T
    codes, scales = _quantised(factor_MK)
    return codes, scales, rest.float()[None], norms_K.float()


def _quantised(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes and the scale of each row."""
    scales = (factor.abs().amax(1) / _LARGEST).float()
    return (factor / torch.where(scales > 0, scales, 1.0).double()[:, None]).round().to(torch.int8), scales
