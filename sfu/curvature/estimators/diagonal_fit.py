r"""A diagonal fitted to loss perturbations of the forget set by non-negative least squares.

.. math:: \min_{h \ge l_2} \frac1P \sum_i \Big(\tfrac12 \sum_g h_g \sum_{e \in g} d_{ie}^2 - t_i\Big)^2
          + \tfrac\mu2 \|h - h_0\|^2, \qquad t_i = J_f(w^* + d_i) - J_f(w^*) - g_f^T d_i

There is one value for each parameter as long as perturbations times parameters fit in memory. Beyond that, all
parameters of an output channel (of a linear head: of a feature) share one value. Their perturbations are then scaled by
a common random factor, which tells the groups apart.

Shapes: P perturbations, G groups, C classes, E parameters of each (1 and p where they share them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sfu.curvature.estimators.base import CurvatureEstimate, CurvatureEstimator
from sfu.curvature.observations import DEFAULT_LOSSES, default_scale
from sfu.curvature.settings import DiagonalSettings
from sfu.heads.base import Head
from sfu.lazy import torch
from sfu.operators.diagonal import DiagonalOperator
from sfu.request import ForgetRequest, MethodContext, Retained

if TYPE_CHECKING:
    from torch import Tensor

_NUMBERS = 1 << 25  # of perturbations times groups
_ACTIVE_SET_GROUPS = 1000  # up to which an active-set method is quick


class LossChanges(NamedTuple):
    """Half the squares of each perturbation, summed by groups, and the changes of the mean loss."""

    squares_PG: Tensor
    target_P: Tensor
    weight: float


class DiagonalFit(CurvatureEstimator[DiagonalSettings, LossChanges], name="diagonal"):
    """The diagonal of the Hessian, fitted to losses at perturbed heads.

    ``numbers`` bounds perturbations times groups, and with it the memory.
    """

    def __init__(self, settings: DiagonalSettings, numbers: int = _NUMBERS) -> None:
        super().__init__(settings)
        self._numbers = numbers

    def observe(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> LossChanges:
        head, rows, objective = request.head, request.data(cache=True), request.head.objective()
        count = self.settings.perturbations or DEFAULT_LOSSES
        group_CE, n_groups = groups_of(head, count, self._numbers)
        here, gradient_CE = objective.value(rows, head.parameters_CE), request.forget_gradient()
        scale = self.settings.scale or default_scale(request)
        drawn = context.generator("perturbation")
        squares_PG, target_P = torch.zeros(count, n_groups, dtype=torch.float64), torch.zeros(count).double()
        single = n_groups == head.parameters_CE.numel()
        for i in range(count):
            delta_CE = torch.randn(head.parameters_CE.shape, generator=drawn, dtype=torch.float64)
            if not single:
                delta_CE *= torch.randn(n_groups, generator=drawn, dtype=torch.float64)[group_CE]
            squares_PG[i].index_add_(0, group_CE.reshape(-1), 0.5 * scale**2 * delta_CE.square().reshape(-1))
            moved_CE = (scale * delta_CE).to(head.parameters_CE)
            change = objective.value(rows, head.parameters_CE + moved_CE) - here
            target_P[i] = change - float((gradient_CE * moved_CE).sum())
            context.report(i + 1, count)
        return LossChanges(squares_PG, target_P, request.weight)

    def merge(self, observations: Sequence[LossChanges]) -> LossChanges:
        weight = sum(part.weight for part in observations)
        targets = torch.stack([part.target_P * (part.weight / weight) for part in observations])
        return LossChanges(observations[0].squares_PG, targets.sum(0), weight)

    def estimate(self, observation: LossChanges, request: ForgetRequest) -> CurvatureEstimate:
        head = request.head
        group_CE, n_groups = groups_of(head, len(observation.target_P), self._numbers)
        values_G, status = fit_diagonal(
            observation.squares_PG.numpy(),
            observation.target_P.numpy(),
            floor=head.l2,
            strength=self.settings.prior_strength,
        )
        values_CE = torch.from_numpy(values_G).to(head.parameters_CE)[group_CE.to(head.parameters_CE.device)]
        details = {"measurements": len(observation.target_P), "groups": n_groups, "fit_status": status}
        note = None if status == "converged" else f"the fit of the diagonal did not converge: {status}"
        return CurvatureEstimate(DiagonalOperator(values_CE, head.regularized_E), details, note)


def groups_of(head: Head, count: int, numbers: int = _NUMBERS) -> tuple[Tensor, int]:
    """Return the group of each parameter, ``[C, E]``, and the number of groups; ``numbers`` bounds count x groups."""
    shape, numel = head.parameters_CE.shape, head.parameters_CE.numel()
    if count * numel <= numbers:
        return torch.arange(numel).reshape(shape), numel
    groups_CE = head.parameter_groups()
    return groups_CE, int(groups_CE.max()) + 1


def fit_diagonal(
    squares_PG: np.ndarray,
    target_P: np.ndarray,
    *,
    floor: float,
    strength: float,
    active_set_groups: int = _ACTIVE_SET_GROUPS,
) -> tuple[np.ndarray, str]:
    """Return the minimiser over ``h >= floor``, ``[G]``, and ``converged`` or the solver's complaint.

    The prior is the constant that fits best; ``strength`` is relative to the largest curvature of the data term.
    """
    from scipy.optimize import minimize, nnls

    count, n_groups = squares_PG.shape
    whole_P = squares_PG.sum(1)
    prior = max(floor, float(target_P @ whole_P / (whole_P @ whole_P)))
    largest = np.linalg.norm(squares_PG, 2) ** 2 / count
    mu = 2.0 * strength * largest
    rows = squares_PG / np.sqrt(count)
    left = (target_P - floor * whole_P) / np.sqrt(count)
    if n_groups <= active_set_groups:
        stacked = np.concatenate([rows, np.sqrt(mu / 2) * np.eye(n_groups)])
        found, _ = nnls(stacked, np.concatenate([left, np.full(n_groups, np.sqrt(mu / 2) * (prior - floor))]))
        return found + floor, "converged"

    def objective(values: np.ndarray) -> tuple[float, np.ndarray]:
        miss, away = rows @ values - left, values - (prior - floor)
        return float(miss @ miss + mu / 2 * away @ away), 2 * rows.T @ miss + mu * away

    start = np.full(n_groups, prior - floor)
    result = minimize(
        objective, start, jac=True, method="L-BFGS-B", bounds=[(0, None)] * n_groups,
        options={"maxiter": 2000, "maxfun": 4000, "ftol": 1e-15, "gtol": 1e-10 * largest * max(prior, floor, 1e-300)},
    )  # fmt: skip
    return np.maximum(result.x, 0) + floor, "converged" if result.success else str(result.message)
