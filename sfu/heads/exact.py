"""Exact training of a linear head under the quadratic loss, by Cholesky of the E x E Gram matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from sfu.errors import SingularHessianError
from sfu.heads.linear import LinearHead
from sfu.heads.moments import Moments


def solve_positive_definite(matrix_EE: Tensor, right_CE: Tensor, what: str) -> Tensor:
    """Solve ``X M = B`` for symmetric positive definite M by Cholesky, ``[C, E]``.

    Raises:
        SingularHessianError: M is singular or indefinite to working precision (its smallest eigenvalue, found by
            inverse iteration, is below ``8 E eps`` times its norm); ``what`` names it in the message.
    """
    factor, info = torch.linalg.cholesky_ex(matrix_EE)
    threshold = 8 * matrix_EE.shape[0] * torch.finfo(matrix_EE.dtype).eps * float(matrix_EE.norm())
    if int(info) != 0 or not _smallest_eigenvalue(factor) > threshold:
        raise SingularHessianError(
            f"{what} is singular to {matrix_EE.dtype} precision, so the optimum is not unique. Set head.l2 above 0 "
            "(1e-6 is small for rows of norm 1), or remove constant and duplicate feature columns."
        )
    return torch.cholesky_solve(right_CE.T, factor).T


def _smallest_eigenvalue(factor_EE: Tensor) -> float:
    """Of the matrix with this Cholesky factor, by a few inverse iterations from a fixed random vector."""
    start = torch.randn(factor_EE.shape[0], 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    vector = start.to(factor_EE)
    for _ in range(4):
        vector = torch.cholesky_solve(vector / vector.norm(), factor_EE)
    return 1.0 / float(vector.norm())


def train_exact(moments: Moments, *, l2: float, bias: bool, target_scale: float) -> LinearHead:
    """The unique minimiser of the mean quadratic objective of ``moments``.

    Raises:
        SingularHessianError: l2 is 0 (or too small) and the Gram matrix is singular.
    """
    regularized = torch.ones_like(moments.second_EE[0])
    if bias:
        regularized[-1] = 0.0
    hessian = moments.hessian(l2, regularized)
    what = f"the Gram matrix of the {moments.count} training rows plus head.l2={l2:g}"
    parameters = solve_positive_definite(hessian, target_scale * moments.cross_CE, what)
    gradient = moments.gradient(parameters, l2, regularized, target_scale)
    return LinearHead(parameters, gradient, l2, moments.count, bias, target_scale)
