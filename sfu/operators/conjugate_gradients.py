r"""Conjugate gradients: preconditioned for one system, multi-shift for :math:`(A + \sigma_j I) x_j = b` at once.

The Krylov space of A and b is that of A + sigma I and b, so one product with A an iteration serves every shift: the
residuals of the shifted systems are multiples :math:`\zeta_j r` of the first one's, and three-term recurrences for
:math:`\zeta_j` give the rest. A shift is finished once its residual reaches the tolerance.

Sources: Hestenes and Stiefel 1952; Jegerlehner, Krylov space solvers for shifted linear systems, 1996.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sfu.deadline import check_time
from sfu.lazy import torch
from sfu.operators.base import LinearSolution

if TYPE_CHECKING:
    from torch import Tensor

Product = Callable[["Tensor"], "Tensor"]


def conjugate_gradients(
    product: Product,
    right: Tensor,
    precondition: Product,
    *,
    tolerance: float,
    max_iterations: int,
    note: Callable[[int, Tensor], None] | None = None,
) -> LinearSolution:
    """Solve ``A x = b`` for positive (semi)definite A, until ``|b - A x| <= tolerance |b|``; b in the range of A.

    ``precondition`` is ``r -> P^-1 r`` with P symmetric positive definite. ``note`` is called with the number of
    products done and the solution so far.
    """
    value, residual = torch.zeros_like(right), right.clone()
    size = float(right.norm())
    if size == 0:
        return LinearSolution(value, "conjugate_gradients", 0.0)
    preconditioned = precondition(residual)
    direction = preconditioned.clone()
    along = float((residual * preconditioned).sum())
    done = 0
    while done < max_iterations and float(residual.norm()) > tolerance * size:
        check_time()
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
        if note is not None:
            note(done, value)
    left = float(residual.norm()) / size
    return LinearSolution(value, "conjugate_gradients", left, done, left <= tolerance)


@dataclass(frozen=True)
class ShiftedSolutions:
    """Solutions ``[M, ...]`` in the order of the shifts, their relative residuals by the recurrence, and products."""

    values: Tensor
    residuals_M: Tensor
    iterations: int


def multishift_conjugate_gradients(
    product: Product, right: Tensor, shifts: list[float], *, tolerance: float, max_iterations: int
) -> ShiftedSolutions:
    """Solve ``(A + shift I) x = b`` for every shift from one Krylov space; A positive semidefinite, shifts >= 0."""

    def flat_product(vector: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        image = product(vector.reshape(right.shape)).reshape(-1)
        return image, image

    flat = right.reshape(-1)
    found = multishift_in_coordinates(
        flat_product, flat, flat, shifts, tolerance=tolerance, max_iterations=max_iterations
    )
    return replace(found, values=found.values.reshape(len(shifts), *right.shape))


def multishift_in_coordinates(
    product: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    right: Tensor,
    right_K: Tensor,
    shifts: list[float],
    *,
    tolerance: float,
    max_iterations: int,
) -> ShiftedSolutions:
    """Return solutions in K coordinates, ``[M, K]``: only one system's vectors are held in full.

    ``product`` maps a flat vector and its coordinates to its image and the image's coordinates.
    """
    shifts_M = torch.tensor(shifts, dtype=right.dtype, device=right.device)
    base = float(shifts_M.min())
    further_M = shifts_M - base
    values_MK = right_K.new_zeros(len(shifts), right_K.numel())
    directions_MK = right_K.repeat(len(shifts), 1)
    residual, direction, residual_K, direction_K = right.clone(), right.clone(), right_K, right_K
    zeta_M, zeta_before_M = torch.ones_like(shifts_M), torch.ones_like(shifts_M)
    square, size, done = float(right @ right), float(right.norm()), 0
    step_before, ratio_before = 1.0, 0.0
    active = torch.arange(len(shifts), device=right.device) if size > 0 else shifts_M.new_empty(0).long()
    residuals_M = torch.ones_like(shifts_M) if size > 0 else torch.zeros_like(shifts_M)
    while active.numel() and done < max_iterations:
        check_time()
        image, image_K = product(direction, direction_K)
        image, image_K = image + base * direction, image_K + base * direction_K
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
        values_MK[active] += (step * share_A)[:, None] * directions_MK[active]
        residual, residual_K = residual - step * image, residual_K - step * image_K
        square_before, square = square, float(residual @ residual)
        ratio = square / square_before
        before_AK = (ratio * share_A.square())[:, None] * directions_MK[active]
        directions_MK[active] = next_A[:, None] * residual_K + before_AK
        direction, direction_K = residual + ratio * direction, residual_K + ratio * direction_K
        zeta_before_M[active], zeta_M[active] = now_A, next_A
        step_before, ratio_before = step, ratio
        residuals_M[active] = next_A.abs() * square**0.5 / size
        active = active[residuals_M[active] > tolerance]
    return ShiftedSolutions(values_MK, residuals_M, done)
