r"""DeltaGrad: replay gradient descent without the forgotten rows, with most gradients taken from the original's path.

Training by full-batch gradient descent caches its points and gradients :math:`(w_t, \nabla F(w_t))`. The replay
computes the gradient of the retained rows in the first ``burn_in`` steps and every ``period``-th after, and elsewhere
approximates that of all rows, :math:`\nabla F(w^I_t) \approx \nabla F(w_t) + B_t (w^I_t - w_t)`, with an L-BFGS
quasi-Hessian :math:`B_t` of the last ``memory`` exact differences, and takes off the forget rows' own gradient:

.. math:: w^I_{t+1} = w^I_t - \eta \frac{V \hat\nabla F(w^I_t) - V_f \nabla F_f(w^I_t)}{V_r}

Source: Wu, Dobriban and Davidson, DeltaGrad: rapid retraining of machine learning models, ICML 2020; burn-in 10, period
5, memory 2. sfu's heads are trained to their optimum and keep no path, so the path is made here, from zero, over all
rows (hence ``retained``); its length and step are settings. What the row adds to the trained head is the shift of the
path's end, :math:`w^* + (w^I_T - w_T)`: for a path that reaches the optimum, DeltaGrad itself.

Shapes: C classes, E parameters of a class, M memory; vectors are flat, ``[K]``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from sfu.checks import above, whole
from sfu.errors import DivergedError
from sfu.heads.base import Head
from sfu.losses import Objective, Rows
from sfu.operators.base import CurvatureOperator
from sfu.operators.build import build_operator
from sfu.operators.plan import plan_structure
from sfu.request import Access, ForgetRequest, MethodContext, RetainedSet
from sfu.settings import Structure
from sfu.unlearning.base import UnlearningMethod, UnlearningResult
from sfu.unlearning.differentiable import remaining

_POWER_STEPS = 15
_SAFE = 1.5


class QuasiHessian:
    """L-BFGS's B from pairs (s, y), applied to vectors by the compact form of Byrd, Nocedal and Schnabel (1994)."""

    def __init__(self, memory: int) -> None:
        """Keep the last ``memory`` pairs."""
        self._pairs: deque[tuple[Tensor, Tensor]] = deque(maxlen=memory)

    def add(self, step_K: Tensor, change_K: Tensor) -> None:
        """A pair, unless its curvature is not above 0."""
        if float(step_K @ change_K) > 1e-14 * float(step_K.norm() * change_K.norm()):
            self._pairs.append((step_K, change_K))

    def __bool__(self) -> bool:
        """Whether there is a pair."""
        return bool(self._pairs)

    def apply(self, vector_K: Tensor) -> Tensor:
        """``B v``."""
        step_KM, change_KM = (torch.stack(list(column), 1) for column in zip(*self._pairs, strict=True))
        last_step_K, last_change_K = self._pairs[-1]
        sigma = float(last_change_K @ last_step_K) / float(last_step_K @ last_step_K)
        cross_MM = step_KM.T @ change_KM
        lower_MM = cross_MM.tril(-1)
        middle = torch.cat([
            torch.cat([sigma * step_KM.T @ step_KM, lower_MM], 1),
            torch.cat([lower_MM.T, -torch.diag(cross_MM.diagonal())], 1),
        ])  # fmt: skip
        right = torch.cat([sigma * step_KM.T @ vector_K, change_KM.T @ vector_K])
        weights = torch.linalg.solve(middle, right)
        return sigma * vector_K - torch.cat([sigma * step_KM, change_KM], 1) @ weights


@dataclass(frozen=True)
class DeltaGrad(UnlearningMethod):
    """See the module.

    Attributes:
        steps: T, the length of the path.
        lr: Step, or ``None`` for 1.5 over ``period`` times the objective's largest curvature: where the quasi-Hessian
            has no pair, the steps between two exact ones act as one step ``period`` times as long, which overshoots
            and grows if it is above 2 over that curvature.
        burn_in: Exact steps at the beginning.
        period: Exact steps after that, one in so many.
        memory: Pairs of the quasi-Hessian.
    """

    steps: int = 200
    lr: float | None = None
    burn_in: int = 10
    period: int = 5
    memory: int = 2

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: Naming the key, the value and what is accepted.
        """
        for key in ("steps", "burn_in", "period", "memory"):
            whole(f"delta_grad: {key}", getattr(self, key), 1)
        if self.lr is not None:
            above("delta_grad: lr", self.lr, 0.0)

    @property
    def access(self) -> Access:
        """Path and exact steps are over the retained data."""
        return Access.RETAINED

    def unlearn(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None = None
    ) -> UnlearningResult:
        """Make the path, replay it.

        Raises:
            SourceFreeError: No retained data were given.
            DivergedError: The path does not converge with this ``lr``.
        """
        head, kept = request.head, remaining(retained, request, "delta_grad")
        rows = head.rows(kept.features_ND, kept.labels_N, kept.weights_N, cache=True)
        objective = head.objective()
        of_gone, of_kept = (_Gradient(objective, some, head) for some in (request.data(keep=True), rows))
        share = request.weight / head.total_weight
        lr = self.lr if self.lr is not None else _SAFE / (self.period * of_kept.largest_curvature())

        def of_all(point_CE: Tensor) -> Tensor:
            return share * of_gone(point_CE) + (1 - share) * of_kept(point_CE)

        path: list[tuple[Tensor, Tensor]] = []
        point_CE = torch.zeros_like(head.parameters_CE)
        for done in range(self.steps):
            gradient_CE = of_all(point_CE)
            path.append((point_CE, gradient_CE))
            point_CE = point_CE - lr * gradient_CE
            if not float(point_CE.norm()) < 1e4 * max(1.0, float(head.parameters_CE.norm())):
                raise DivergedError(f"the path diverged at step {done + 1} with lr={lr:g}; lower lr")
            if context.progress is not None:
                context.progress(done + 1, 2 * self.steps)
        moved_CE, exact = self._replay(path, of_kept, of_gone, share, lr, context)
        details = {
            "steps": self.steps, "exact_steps": exact, "lr": lr, "path_gradient_norm": float(path[-1][1].norm()),
            "storage_mb": 2 * self.steps * moved_CE.numel() * moved_CE.element_size() / 2**20,
        }  # fmt: skip
        return UnlearningResult(request.unlearned_head(head.parameters_CE + moved_CE - point_CE), details=details)

    def _replay(
        self, path: list[tuple[Tensor, Tensor]], of_kept: _Gradient, of_gone: _Gradient, share: float, lr: float,
        context: MethodContext,
    ) -> tuple[Tensor, int]:  # fmt: skip
        """The end of the path without the forgotten rows, and how many of its gradients were exact."""
        point_CE, curvature, exact = path[0][0], QuasiHessian(self.memory), 0
        for done, (cached_CE, gradient_CE) in enumerate(path):
            apart_K = (point_CE - cached_CE).flatten()
            of_gone_CE = of_gone(point_CE)
            if done < self.burn_in or (done - self.burn_in) % self.period == 0 or not curvature:
                step_CE = of_kept(point_CE)
                of_all_CE = share * of_gone_CE + (1 - share) * step_CE
                if bool(apart_K.any()):
                    curvature.add(apart_K, (of_all_CE - gradient_CE).flatten())
                exact += 1
            else:
                of_all_CE = gradient_CE + curvature.apply(apart_K).reshape_as(point_CE)
                step_CE = (of_all_CE - share * of_gone_CE) / (1 - share)
            point_CE = point_CE - lr * step_CE
            if context.progress is not None:
                context.progress(len(path) + done + 1, 2 * len(path))
        return point_CE, exact


class _Gradient:
    """Of an objective over some rows, anywhere; where it is affine in the parameters, from one pass over the rows."""

    def __init__(self, objective: Objective, rows: Rows, head: Head) -> None:
        """Make that pass."""
        self._objective, self._rows, self._zero_CE = objective, rows, torch.zeros_like(head.parameters_CE)
        self._head = head
        self._hessian: CurvatureOperator | None = None
        if objective.loss.constants.curvature_lipschitz == 0:
            plan = plan_structure(head.layout, head.n_classes, rows.width, rows.count, rows.device)
            self._hessian = build_operator(objective, rows, self._zero_CE, plan.structure)
            self._constant_CE = objective.gradient(rows, self._zero_CE)

    def __call__(self, point_CE: Tensor) -> Tensor:
        """At a point."""
        if self._hessian is None:
            return self._objective.gradient(self._rows, point_CE)
        return self._constant_CE + self._hessian.matmul(point_CE)

    def largest_curvature(self) -> float:
        """Largest eigenvalue of the Hessian, at the head and at zero, by the power method."""
        drawn, found = torch.Generator().manual_seed(0), []
        for at_CE in [self._head.parameters_CE] if self._hessian else [self._head.parameters_CE, self._zero_CE]:
            hessian = self._hessian or build_operator(self._objective, self._rows, at_CE, Structure.products)
            vector_CE = torch.randn(at_CE.shape, generator=drawn, dtype=torch.float64).to(at_CE)
            for _ in range(_POWER_STEPS):
                vector_CE = hessian.matmul(vector_CE / vector_CE.norm())
            found.append(float(vector_CE.norm()))
        return max(found)
