"""Lower bounds and priors given as a number, a diagonal or a matrix.

Shapes: D features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sfu.errors import DataError

MatrixLike = float | Tensor


@dataclass(frozen=True, eq=False)
class SymmetricTerm:
    """A symmetric D x D matrix that remembers whether it is a multiple of the identity.

    Args:
        scale: the multiple, or None when the matrix is not known to be one.
        matrix_DD: the matrix itself, or None when ``scale`` says it all.
        dimension: D.
    """

    scale: float | None
    matrix_DD: Tensor | None
    dimension: int

    def dense(self, like: Tensor) -> Tensor:
        """The D x D matrix with the dtype and device of ``like``."""
        if self.matrix_DD is not None:
            return self.matrix_DD.to(like)
        assert self.scale is not None
        return self.scale * torch.eye(self.dimension, dtype=like.dtype, device=like.device)


def symmetric_term(name: str, value: MatrixLike, dimension: int) -> SymmetricTerm:
    """Read a lower bound or prior: a number (times the identity), a vector (a diagonal) or a symmetric matrix.

    Args:
        name: the setting, for messages.
        value: what was given.
        dimension: D.

    Raises:
        DataError: not finite, of the wrong shape, or not symmetric.
    """
    given = torch.as_tensor(value, dtype=torch.float64)
    if not torch.isfinite(given).all():
        raise DataError(f"{name} is not finite; give a finite number, a diagonal of length D={dimension} or a matrix.")
    if given.ndim == 0:
        return SymmetricTerm(float(given), None, dimension)
    if given.shape == (dimension,):
        return SymmetricTerm(None, torch.diag(given), dimension)
    if given.shape != (dimension, dimension):
        raise DataError(
            f"{name} has shape {tuple(given.shape)}; accepted are a number, a diagonal of shape ({dimension},) or a "
            f"matrix of shape ({dimension}, {dimension})."
        )
    if (given - given.T).abs().max() > 1e-8 * given.abs().max():
        raise DataError(f"{name} is not symmetric; give (M + M.T) / 2.")
    return SymmetricTerm(None, (given + given.T) / 2, dimension)
