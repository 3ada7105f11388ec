r"""The diagonal of the retained data's Hessian, by random signs: :math:`\mathbb{E}[v \odot H v]`. Not source-free.

It is what the authors' code inverts for linearised networks. A Hessian is far from its diagonal where parameters act
together, and then the step overshoots: nothing predicts its gain.

Source: Bekas, Kokiopoulou and Saad, An estimator for the diagonal of a matrix, 2007.
Shapes: C classes, E parameters of each (1 and p where they share them).
"""

from __future__ import annotations

import torch

from sfu.curvature.estimators.base import CurvatureEstimate, HessianEstimator, HessianObservation
from sfu.errors import SourceFreeError
from sfu.operators.build import build_operator
from sfu.operators.diagonal import DiagonalOperator
from sfu.request import Access, ForgetRequest, MethodContext, RetainedSet
from sfu.settings import Structure


class Hutchinson(HessianEstimator):
    """``diag(H_r)`` from ``curvature.probes`` products."""

    @property
    def access(self) -> Access:
        """Needs the retained data."""
        return Access.RETAINED

    @property
    def is_exact(self) -> bool:
        """There is nothing to cross-validate on: it never looks at the forget set."""
        return True

    def observe(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None = None
    ) -> HessianObservation:
        """The diagonal.

        Raises:
            SourceFreeError: No retained data were given.
        """
        if retained is None:
            raise SourceFreeError("curvature.estimator=hutchinson needs the retained data.")
        head, probes = request.head, self.config.probes
        rows = request.retained_rows(retained)
        operator = build_operator(head.objective(), rows, head.parameters_CE, Structure.products)
        drawn, total_CE = context.generator("perturbation"), torch.zeros_like(head.parameters_CE)
        for done in range(1, probes + 1):
            signs_CE = torch.randint(0, 2, total_CE.shape, generator=drawn, dtype=torch.int8).to(total_CE) * 2 - 1
            total_CE += signs_CE * operator.matmul(signs_CE) / probes
            if context.progress is not None:
                context.progress(done, probes)
        floor_CE = head.objective().ridge_E.expand_as(total_CE)  # no diagonal of a convex loss is below it
        return HessianObservation(DiagonalOperator(torch.maximum(total_CE, floor_CE), head.regularized_E), rows.weight)

    def estimate(
        self, observation: HessianObservation, request: ForgetRequest, weight: float | None = None
    ) -> CurvatureEstimate:
        """As seen."""
        return CurvatureEstimate(observation.operator, {"probes": self.config.probes})
