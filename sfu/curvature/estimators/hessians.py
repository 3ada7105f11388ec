r"""Hessians that need no fit: of the forget rows, of the retained rows, their diagonal, and the stored one.

Shapes: C classes, E parameters of each (1 and p where they share them).
"""

from __future__ import annotations

from dataclasses import replace

from sfu.curvature.estimators.base import CurvatureEstimate, HessianEstimator, SettingsT
from sfu.curvature.observations import HessianObservation
from sfu.curvature.settings import ClosedFormSettings, ExactSettings, HutchinsonSettings, StoredSettings
from sfu.errors import ConfigError
from sfu.heads.base import Head
from sfu.lazy import torch
from sfu.losses.base import Layout
from sfu.losses.rows import Rows
from sfu.operators.build import build_operator, with_ridge
from sfu.operators.diagonal import DiagonalOperator
from sfu.operators.explicit import ExplicitOperator
from sfu.operators.plan import Plan
from sfu.operators.structure import Structure
from sfu.request import Access, ForgetRequest, MethodContext, Retained


class ForgetHessian(HessianEstimator[ClosedFormSettings], name="closed_form"):
    """The forget set's own Hessian, which every perturbation fit tends to with more and more perturbations."""

    def is_forget_hessian(self, request: ForgetRequest) -> bool:
        return True


class RetainedRowsEstimator(HessianEstimator[SettingsT]):
    """Base of estimators that look at the retained rows."""

    access = Access.RETAINED
    needs_validation = False

    def observe(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> HessianObservation:
        rows = self._rows(request, retained, context)
        structure = self.plan(request, rows.count).structure
        operator = build_operator(request.head.objective(), rows, request.head.parameters_CE, structure)
        return HessianObservation(operator, rows.weight)

    def _rows(self, request: ForgetRequest, retained: Retained, context: MethodContext) -> Rows:
        user = f"curvature.estimator={self.registered_name}"
        return request.retained_rows(retained, user=user, progress=context.progress)


class RetainedHessian(RetainedRowsEstimator[ExactSettings], name="exact"):
    """The retained data's own Hessian. Not source-free: it makes Unlearned(+)."""


class HutchinsonDiagonal(RetainedRowsEstimator[HutchinsonSettings], name="hutchinson"):
    r"""The diagonal of the retained data's Hessian, by ``curvature.probes`` random signs: :math:`E[v \odot H v]`.

    Not source-free. The authors' code inverts it for linearised networks. Where parameters act together, a Hessian is
    far from its diagonal and the step overshoots; nothing predicts its gain.

    Source: Bekas, Kokiopoulou and Saad, An estimator for the diagonal of a matrix, 2007.
    """

    def observe(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> HessianObservation:
        head, probes = request.head, self.settings.probes
        rows = self._rows(request, retained, context)
        operator = build_operator(head.objective(), rows, head.parameters_CE, Structure.products)
        drawn, total_CE = context.generator("perturbation"), torch.zeros_like(head.parameters_CE)
        for done in range(1, probes + 1):
            signs_CE = torch.randint(0, 2, total_CE.shape, generator=drawn, dtype=torch.int8).to(total_CE) * 2 - 1
            total_CE += signs_CE * operator.matmul(signs_CE) / probes
            context.report(done, probes)
        floor_CE = head.objective().ridge_E.expand_as(total_CE)  # no diagonal of a convex loss is below it
        return HessianObservation(DiagonalOperator(torch.maximum(total_CE, floor_CE), head.regularized_E), rows.weight)

    def estimate(self, observation: HessianObservation, request: ForgetRequest) -> CurvatureEstimate:
        return CurvatureEstimate(observation.operator, {"probes": self.settings.probes})


class StoredHessian(HessianEstimator[StoredSettings], name="stored"):
    r"""The retained Hessian from what the head keeps of its training rows (``head.keep``): numbers, no examples.

    With H the training data's Hessian at the head and H_f the forget set's, the retained one is
    :math:`(V H - V_f H_f) / V_r`. With ``head.keep=full`` it is without error, and the step is that of Unlearned(+).
    With ``head.keep=sketch``, negative eigenvalues of its data term become 0.
    """

    access = Access.STORED
    needs_validation = False

    def plan(self, request: ForgetRequest, count: int | None = None) -> Plan:
        """Return the plan of what was stored, whatever ``curvature.structure``."""
        own = StoredHessian(replace(self.settings, structure=Structure.auto))
        return super(StoredHessian, own).plan(request, count)

    def estimate(self, observation: HessianObservation, request: ForgetRequest) -> CurvatureEstimate:
        head, kept = request.head, request.head.kept
        stored = kept.hessian(head.layout)
        if stored is None:
            raise ConfigError(f"curvature.estimator=stored, but this head {_without_curvature(head)}")
        stored = stored.to(head.parameters_CE)
        whole = with_ridge(stored, head.objective(), head.n_classes)
        operator = request.retained_hessian(whole, observation.operator)
        if kept.data_hessian is None and isinstance(operator, ExplicitOperator):  # rounding may leave less than nothing
            operator = operator.raised(head.objective().ridge_E)
        return CurvatureEstimate(operator)


def _without_curvature(head: Head) -> str:
    if head.forgotten.requests and head.layout is not Layout.shared:
        return (
            f"has served a request, and under loss={head.loss.name} the curvature that was kept with it belongs to the "
            "parameters before. Choose another estimator."
        )
    if head.kept.bound is not None:
        return (
            "only keeps an upper bound of its curvature. Train it with head.keep=sketch or head.keep=full, or choose "
            "another estimator."
        )
    return "carries no curvature. Train it with head.keep=sketch or head.keep=full."
