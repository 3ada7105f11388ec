r"""Conjugate gradients: preconditioned for one system, multi-shift for :math:`(A + \sigma_j I) x_j = b` at once.

The Krylov space of A and b is that of A + sigma I and b, so one product with A an iteration serves every shift: the
residuals of the shifted systems are multiples :math:`\zeta_j r` of the first one's, and three-term recurrences for
:math:`\zeta_j` give the rest. A shift whose residual has reached the tolerance is left alone from then on.

Sources: Hestenes and Stiefel 1952; Jegerlehner, Krylov space solvers for shifted linear systems, 1996.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sfu.curvature.operators.base import Solution

Product = Callable[[Tensor], Tensor]


def conjugate_gradients(
    product: Product, right: Tensor, precondition: Product, *, tolerance: float, max_iterations: int
) -> Solution:
    """Solve ``A x = b`` for positive (semi)definite A; b in the range of A.

    Args:
        product: ``v -> A v``.
        right: b, of any shape.
        precondition: ``r -> P^-1 r``, symmetric positive definite.
        tolerance: Relative residual ``|b - A x| / |b|`` to stop at.
        max_iterations: Products at most.
    """
    value, residual = torch.zeros_like(right), right.clone()
    size = float(right.norm())
    if size == 0:
        return Solution(value, "conjugate_gradients", 0.0)
    preconditioned = precondition(residual)
    direction = preconditioned.clone()
    along = float((residual * preconditioned).sum())
    done = 0
    while done < max_iterations and float(residual.norm()) > tolerance * size:
        image = product(direction)
        curved = float((direction * image).sum())
        if not curved > 0:
            break
        done += 1
        step = along / curved
        value = value + step * direction
        residual = residual - step * image
        preconditioned = precondition(residual)
        before, along = along, float((residual * preconditioned).sum())
        direction = preconditioned + (along / before) * direction
    left = float(residual.norm()) / size
    return Solution(value, "conjugate_gradients", left, done, left <= tolerance)


@dataclass(frozen=True)
class ShiftedSolutions:
    """Solutions of all shifted systems.

    Attributes:
        values: ``[M, ...]``, in the order of the shifts.
        residuals_M: Relative residual of each, by the recurrence.
        iterations: Products with A.
    """

    values: Tensor
    residuals_M: Tensor
    iterations: int


def multishift_conjugate_gradients(
    product: Product, right: Tensor, shifts: list[float], *, tolerance: float, max_iterations: int
) -> ShiftedSolutions:
    """Solve ``(A + shift I) x = b`` for every shift from one Krylov space; A positive semidefinite, shifts >= 0."""
    shifts_M = torch.tensor(shifts, dtype=right.dtype, device=right.device)
    base = float(shifts_M.min())
    further_M = shifts_M - base
    flat = right.reshape(-1)
    values_MV = flat.new_zeros(len(shifts), flat.numel())
    directions_MV = flat.repeat(len(shifts), 1)
    residual, direction = flat.clone(), flat.clone()
    zeta_M, zeta_before_M = torch.ones_like(shifts_M), torch.ones_like(shifts_M)
    square, size, done = float(flat @ flat), float(flat.norm()), 0
    step_before, ratio_before = 1.0, 0.0
    active = torch.arange(len(shifts), device=right.device) if size > 0 else shifts_M.new_empty(0).long()
    residuals_M = torch.ones_like(shifts_M) if size > 0 else torch.zeros_like(shifts_M)
    while active.numel() and done < max_iterations:
        image = product(direction.reshape(right.shape)).reshape(-1) + base * direction
        curved = float(direction @ image)
        if not curved > 0:
            break
        done += 1
        step = square / curved
        now_A, before_A = zeta_M[active], zeta_before_M[active]
        next_A = now_A * before_A * step_before / (
            step_before * before_A * (1 + step * further_M[active]) + step * ratio_before * (before_A - now_A)
        )  # fmt: skip
        share_A = next_A / now_A
        values_MV[active] += (step * share_A)[:, None] * directions_MV[active]
        residual = residual - step * image
        square_before, square = square, float(residual @ residual)
        ratio = square / square_before
        directions_MV[active] = next_A[:, None] * residual + (ratio * share_A.square())[:, None] * directions_MV[active]
        direction = residual + ratio * direction
        zeta_before_M[active], zeta_M[active] = now_A, next_A
        step_before, ratio_before = step, ratio
        residuals_M[active] = next_A.abs() * square**0.5 / size
        active = active[residuals_M[active] > tolerance]
    return ShiftedSolutions(values_MV.reshape(len(shifts), *right.shape), residuals_M, done)
