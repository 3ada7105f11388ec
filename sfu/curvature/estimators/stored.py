r"""A summary of the training data's curvature, saved with the head when it was trained: numbers, no examples.

With H the training data's Hessian at the head and H_f the forget set's, the retained one is
:math:`(V H - V_f H_f) / V_r`: exact, so the step is that of Unlearned(+).
"""

from __future__ import annotations

from dataclasses import replace

from sfu.curvature.estimators.base import CurvatureEstimate, HessianEstimator, HessianObservation
from sfu.errors import ConfigError
from sfu.operators.build import with_ridge
from sfu.operators.plan import Plan
from sfu.request import Access, ForgetRequest
from sfu.settings import Structure


class Stored(HessianEstimator):
    """The retained Hessian from the stored training Hessian less the forget set's."""

    @property
    def access(self) -> Access:
        """Needs what was stored with the head."""
        return Access.STORED

    @property
    def is_exact(self) -> bool:
        """It is."""
        return True

    def plan(self, request: ForgetRequest, count: int | None = None) -> Plan:
        """That of what was stored, whatever ``curvature.structure``."""
        own = Stored(replace(self.config, structure=Structure.auto))
        return super(Stored, own).plan(request, count)

    def estimate(
        self, observation: HessianObservation, request: ForgetRequest, weight: float | None = None
    ) -> CurvatureEstimate:
        """Subtract.

        Raises:
            ConfigError: The head carries no curvature.
        """
        head = request.head
        if head.data_hessian is None:
            raise ConfigError("curvature.estimator=stored needs a head trained with head.store_curvature=true.")
        whole = with_ridge(head.data_hessian, head.objective(), head.n_classes)
        left = head.total_weight - observation.weight
        share = [head.total_weight / left, -observation.weight / left]
        return CurvatureEstimate(whole.combine([observation.operator], share))
