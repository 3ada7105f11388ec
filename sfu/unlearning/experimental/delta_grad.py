r"""DeltaGrad: replay gradient descent without the forgotten rows, with most gradients taken from the original's path.

Training by full-batch gradient descent caches its points and gradients :math:`(w_t, \nabla F(w_t))`. The replay
computes the gradient of the retained rows in the first ``burn_in`` steps and every ``period``-th after, and elsewhere
approximates that of all rows, :math:`\nabla F(w^I_t) \approx \nabla F(w_t) + B_t (w^I_t - w_t)`, with an L-BFGS
quasi-Hessian :math:`B_t` of the last ``memory`` true differences, and subtracts the forget rows' own gradient:

.. math:: w^I_{t+1} = w^I_t - \eta \frac{V \hat\nabla F(w^I_t) - V_f \nabla F_f(w^I_t)}{V_r}

Source: Wu, Dobriban and Davidson, DeltaGrad: rapid retraining of machine learning models, ICML 2020; burn-in 10, period
5, memory 2.

**Caveat.** sfu trains heads to their optimum and stores no path, so this method makes a path from zero over all rows
(hence ``retained``) and adds the shift of its end to the head, :math:`w^* + (w^I_T - w_T)`. If the path reaches the
optimum, that is DeltaGrad itself. Its seconds include making the path.

Shapes: C classes, E parameters of a class, M memory; vectors are flat, ``[K]``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sfu.errors import DivergedError
from sfu.heads.base import Head
from sfu.lazy import torch
from sfu.losses.rows import Rows
from sfu.operators.base import CurvatureOperator
from sfu.operators.build import build_operator
from sfu.operators.plan import plan_structure
from sfu.operators.structure import Structure
from sfu.request import Access, ForgetRequest, MethodContext, Retained
from sfu.schema import setting
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.result import UnlearningResult

if TYPE_CHECKING:
    from torch import Tensor

_POWER_STEPS = 15
_SAFE = 1.5


class QuasiHessian:
    """L-BFGS's B from pairs (s, y), applied to vectors by the compact form of Byrd, Nocedal and Schnabel (1994)."""

    def __init__(self, memory: int) -> None:
        self._pairs: deque[tuple[Tensor, Tensor]] = deque(maxlen=memory)

    def add(self, step_K: Tensor, change_K: Tensor) -> None:
        """Add a pair, if its curvature is above 0."""
        if float(step_K @ change_K) > 1e-14 * float(step_K.norm() * change_K.norm()):
            self._pairs.append((step_K, change_K))

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def apply(self, vector_K: Tensor) -> Tensor:
        """Return ``B v``."""
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
class DeltaGrad(UnlearningMethod, name="delta_grad"):
    """Replay gradient descent without the forgotten rows.

    By default, ``lr`` is 1.5 over ``period`` times the objective's largest curvature. Until the quasi-Hessian has a
    pair, the steps between two true gradients act as one step ``period`` times as long, which overshoots and grows if
    it is above 2 over that curvature.
    """

    steps: int = setting(200, "T, the length of the path.", at_least=1)
    lr: float | None = setting(None, "Step length; ``None`` for the default above.", above=0)
    burn_in: int = setting(10, "Steps with true gradients at the beginning.", at_least=1)
    period: int = setting(5, "After that, one step in so many has a true gradient.", at_least=1)
    memory: int = setting(2, "Pairs of the quasi-Hessian.", at_least=1)
    access = Access.RETAINED

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        head, rows = request.head, request.retained_rows(retained, user=self.method_name)
        of_forget, of_retain = (_Gradient(head, some) for some in (request.data(cache=True), rows))
        share = request.weight / head.total_weight
        lr = self.lr if self.lr is not None else _SAFE / (self.period * of_retain.largest_curvature())

        def of_all(point_CE: Tensor) -> Tensor:
            return share * of_forget(point_CE) + (1 - share) * of_retain(point_CE)

        path: list[tuple[Tensor, Tensor]] = []
        point_CE = torch.zeros_like(head.parameters_CE)
        for done in range(self.steps):
            gradient_CE = of_all(point_CE)
            path.append((point_CE, gradient_CE))
            point_CE = point_CE - lr * gradient_CE
            if not float(point_CE.norm()) < 1e4 * max(1.0, float(head.parameters_CE.norm())):
                raise DivergedError(f"the path diverged at step {done + 1} with lr={lr:g}. Lower lr.")
            context.report(done + 1, 2 * self.steps)
        moved_CE, true_gradients = self._replay(path, of_retain, of_forget, share, lr, context)
        details = {
            "steps": self.steps, "exact_steps": true_gradients, "lr": lr,
            "path_gradient_norm": float(path[-1][1].norm()),
            "storage_mb": 2 * self.steps * moved_CE.numel() * moved_CE.element_size() / 2**20,
        }  # fmt: skip
        return UnlearningResult(request.unlearned_head(head.parameters_CE + moved_CE - point_CE), details=details)

    def _replay(
        self, path: list[tuple[Tensor, Tensor]], of_retain: _Gradient, of_forget: _Gradient, share: float, lr: float,
        context: MethodContext,
    ) -> tuple[Tensor, int]:  # fmt: skip
        """Return the end of the path without the forgotten rows, and the number of true gradients."""
        point_CE, curvature, true_gradients = path[0][0], QuasiHessian(self.memory), 0
        for done, (cached_CE, gradient_CE) in enumerate(path):
            apart_K = (point_CE - cached_CE).flatten()
            of_forget_CE = of_forget(point_CE)
            if done < self.burn_in or (done - self.burn_in) % self.period == 0 or not curvature:
                step_CE = of_retain(point_CE)
                of_all_CE = share * of_forget_CE + (1 - share) * step_CE
                if bool(apart_K.any()):
                    curvature.add(apart_K, (of_all_CE - gradient_CE).flatten())
                true_gradients += 1
            else:
                of_all_CE = gradient_CE + curvature.apply(apart_K).reshape_as(point_CE)
                step_CE = (of_all_CE - share * of_forget_CE) / (1 - share)
            point_CE = point_CE - lr * step_CE
            context.report(len(path) + done + 1, 2 * len(path))
        return point_CE, true_gradients


class _Gradient:
    """The gradient of an objective over some rows; one pass over the rows if it is affine in the parameters."""

    def __init__(self, head: Head, rows: Rows) -> None:
        objective = head.objective()
        self._head, self._objective, self._rows = head, objective, rows
        self._zero_CE = torch.zeros_like(head.parameters_CE)
        self._hessian: CurvatureOperator | None = None
        if objective.loss.constants.curvature_lipschitz == 0:
            plan = plan_structure(head.layout, head.n_classes, rows.width, rows.count, rows.device)
            self._hessian = build_operator(objective, rows, self._zero_CE, plan.structure)
            self._constant_CE = objective.gradient(rows, self._zero_CE)

    def __call__(self, point_CE: Tensor) -> Tensor:
        if self._hessian is None:
            return self._objective.gradient(self._rows, point_CE)
        return self._constant_CE + self._hessian.matmul(point_CE)

    def largest_curvature(self) -> float:
        """Return the largest eigenvalue of the Hessian, at the head and at zero, by the power method."""
        drawn, found = torch.Generator().manual_seed(0), []
        for at_CE in [self._head.parameters_CE] if self._hessian else [self._head.parameters_CE, self._zero_CE]:
            hessian = self._hessian or build_operator(self._objective, self._rows, at_CE, Structure.products)
            vector_CE = torch.randn(at_CE.shape, generator=drawn, dtype=torch.float64).to(at_CE)
            for _ in range(_POWER_STEPS):
                vector_CE = hessian.matmul(vector_CE / vector_CE.norm())
            found.append(float(vector_CE.norm()))
        return max(found)
