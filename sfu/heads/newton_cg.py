r"""Training to the optimum by Newton's method, with the gradient norm as certificate.

Each step solves :math:`H d = -g` by conjugate gradients only as far as it helps (the residual shrinks with the
gradient), preconditioned by the mean output Hessian times the second moments of the rows, or by Cholesky where forming
H is less work. The step is shortened until the objective falls. Gradients are float64. The products of conjugate
gradients, which need a relative accuracy of 0.1 to 0.001, are float32. A large set is first minimised roughly in
float32, on one row in eight and then on all. Rows are streamed: memory is bounded by a chunk, the outputs, and E x E
(small sets of rows are cached). For the Huberised hinge, whose second derivative jumps, this is the semismooth Newton
method.

Source: Nocedal and Wright, Numerical Optimization, 2nd edition, chapter 7 (line-search Newton-CG).
Shapes: C classes, E = D (+ 1 with bias), or ``[1, p]`` parameters that the classes share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from sfu.heads.optimum import Optimum, not_reached
from sfu.lazy import torch
from sfu.losses.objective import Linearization, Objective
from sfu.losses.rows import Rows
from sfu.operators.build import build_operator, products_of
from sfu.operators.conjugate_gradients import conjugate_gradients
from sfu.operators.explicit import ExplicitOperator
from sfu.operators.plan import plan_structure
from sfu.operators.spectral import SpectralInverse
from sfu.operators.structure import Structure

if TYPE_CHECKING:
    from torch import Tensor

_LOOSEST, _TIGHTEST = 0.1, 1e-3  # relative residuals of conjugate gradients
_STRIDE, _MANY, _ROUGHLY, _STEPS = 8, 16_384, 1e-2, 20
_TRIES, _SHORTEST = 30, 0.01
_FLAT = 1e-3
_SUFFICIENT = 1e-4
_ROUNDING = 500.0  # units of the working precision


class _Descent:
    """Newton steps on one set of rows, from one point on."""

    def __init__(self, objective: Objective, rows: Rows, rows_32: Rows, start_CE: Tensor, target: float) -> None:
        """Evaluate the start; ``rows_32`` are the rows in float32, ``target`` is the gradient norm to reach."""
        self._objective, self._rows, self._rows_32 = objective, rows, rows_32
        self.point_CE, self.here = start_CE, objective.linearize(rows, start_CE)
        self._moments: SpectralInverse | None = None
        self.steps = 0
        self._first, self._target = self.size, target
        self._structure, self._enough = self._plan()
        self._by_matrix = False

    @property
    def size(self) -> float:
        """Gradient norm."""
        return float(self.here.gradient_CE.norm())

    def step(self) -> bool:
        """Take one step; return ``False`` if no step along the direction is better."""
        self.steps += 1
        found = _search(self._objective, self._rows, self.point_CE, self.here, self._direction())
        if found is None:
            return False
        self.point_CE, self.here = found
        return True

    def _plan(self) -> tuple[Structure, int]:
        """Return how a Hessian would be formed and how many products cost as much; ``products`` if it would not fit.

        Forming one only pays for steps in float64. If conjugate gradients need more products than that (badly scaled
        features under a small l2), all further steps form the Hessian.
        """
        n_classes, width = self.point_CE.shape
        if self.point_CE.dtype != torch.float64 or self._rows.shared:
            return Structure.products, self.point_CE.numel()
        plan = plan_structure(self._objective.loss.layout, n_classes, width, self._rows.count, self._rows.device)
        if not self._rows.everywhere(plan.structure is not Structure.products):
            return Structure.products, self.point_CE.numel()
        return plan.structure, 2 * (n_classes * width if plan.structure is Structure.dense else width)

    def _direction(self) -> Tensor:
        if self._by_matrix:
            return self._exact_direction()
        operator = products_of(self._objective, self._rows, self.here.hessians, self.point_CE.shape[0])
        if self._moments is None:
            self._moments = operator.moments()
        hessians_32 = [hessian.to_float32() for hessian in self.here.hessians]
        fast = products_of(self._objective.to_float32(), self._rows_32, hessians_32, self.point_CE.shape[0])
        damping_E = self._damping()
        found = conjugate_gradients(
            lambda vector_CE: fast.matmul(vector_CE.float()).to(vector_CE) + damping_E * vector_CE,
            -self.here.gradient_CE,
            operator.preconditioner(self._moments),
            tolerance=max(
                _TIGHTEST, min(_LOOSEST, max((self.size / self._first) ** 0.5, 0.3 * self._target / self.size))
            ),
            max_iterations=max(100, self._enough),
        )
        self._by_matrix = not found.converged and self._structure is not Structure.products
        return self._without_free_shift(found.value_CE)

    def _exact_direction(self) -> Tensor:
        """Form the Hessian and factorise it."""
        operator = build_operator(self._objective, self._rows, self.point_CE, self._structure)
        assert isinstance(operator, ExplicitOperator)
        repeats = operator.regularized_K.shape[0] // self.point_CE.shape[1]
        blocks_BKK = operator.blocks_BKK + torch.diag(self._damping().repeat(repeats))
        found = ExplicitOperator(blocks_BKK, operator.n_classes, operator.regularized_E).solve(-self.here.gradient_CE)
        return self._without_free_shift(found.value_CE)

    def _damping(self) -> Tensor:
        """Return a damping that bounds steps along flat directions (a hinge far from its corner, no ridge).

        It is proportional to the gradient, so it vanishes at the optimum.
        """
        flat = 0.0 if math.isfinite(self._objective.loss.constants.curvature_lipschitz) else _FLAT * self.size
        return flat * (self._objective.ridge_E == 0)

    def _without_free_shift(self, direction_CE: Tensor) -> Tensor:
        """Remove equal biases, which do not change a softmax, so that they do not drift by rounding."""
        if not self._objective.loss.shift_invariant or self._rows.shared:
            return direction_CE
        free_E = self._objective.ridge_E == 0
        return direction_CE - free_E * direction_CE.mean(0)


def minimize(
    objective: Objective,
    rows: Rows,
    start_CE: Tensor,
    *,
    tolerance: float,
    max_iterations: int,
    warm: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Optimum:
    """Minimise until ``|gradient| <= tolerance``; from a ``warm`` start without the rough minimisation in float32.

    Raises:
        SolverError: It takes more than ``max_iterations`` steps, or no step is better.
    """
    rows_32 = rows.to_float32()
    if rows.count >= _MANY and not warm:
        start_CE = _rough(objective, rows.thinned(_STRIDE).to_float32(), start_CE, tolerance)
        start_CE = _rough(objective, rows_32, start_CE, tolerance)
    descent = _Descent(objective, rows, rows_32, start_CE, tolerance)
    while descent.size > tolerance:
        if descent.steps == max_iterations:
            raise not_reached(descent.size, tolerance, f"after head.max_iterations={max_iterations} steps", rows=rows)
        if not descent.step():
            raise not_reached(descent.size, tolerance, "and no shorter step lowers the objective", rows=rows)
        if progress is not None:
            progress(descent.steps, max_iterations)
    return Optimum(descent.point_CE, descent.here.gradient_CE)


def _rough(objective: Objective, rows: Rows, start_CE: Tensor, tolerance: float) -> Tensor:
    """Reduce the gradient to about a hundredth, in float32."""
    descent = _Descent(objective.to_float32(), rows, rows, start_CE.float(), tolerance)
    enough = max(_ROUGHLY * descent.size, tolerance)
    while descent.size > enough and descent.steps < _STEPS and descent.step():
        pass
    return descent.point_CE.to(start_CE)


def _search(
    objective: Objective, rows: Rows, point_CE: Tensor, here: Linearization, direction_CE: Tensor
) -> tuple[Tensor, Linearization] | None:
    """Shorten the step until the objective falls enough; return the point and what is known there.

    Where the fall is below rounding, a smaller gradient counts as progress.
    """
    slope, norm = float((here.gradient_CE * direction_CE).sum()), float(here.gradient_CE.norm())
    rounding = _ROUNDING * torch.finfo(point_CE.dtype).eps * abs(here.value)
    share = 1.0
    for _ in range(_TRIES):
        trial_CE = point_CE + share * direction_CE
        there = objective.linearize(rows, trial_CE)
        fallen = there.value - here.value <= _SUFFICIENT * share * slope
        level = there.value - here.value <= rounding and float(there.gradient_CE.norm()) < norm
        if bool(torch.isfinite(there.gradient_CE).all()) and (fallen or level):
            return trial_CE, there
        excess = there.value - here.value - share * slope  # above the tangent
        lowest = -slope * share / (2 * excess) if math.isfinite(excess) and excess > 0 else 0.5  # of a parabola
        share *= min(max(lowest, _SHORTEST), 0.5)
    return None
