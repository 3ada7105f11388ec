"""The forget set's own Hessian: what every perturbation fit tends to with more and more perturbations."""

from __future__ import annotations

from collections.abc import Sequence

from sfu.curvature.estimators.base import CurvatureEstimate, CurvatureEstimator
from sfu.heads.moments import Moments
from sfu.unlearning.method import RetainedSet, Tools
from sfu.unlearning.request import ForgetRequest


class ClosedForm(CurvatureEstimator[Moments]):
    """``H_f = mean of a a^T over the forget rows + l2 R``."""

    def observe(self, request: ForgetRequest, tools: Tools, retained: RetainedSet | None = None) -> Moments:
        """Second moments of the forget rows."""
        return request.moments()

    def merge(self, observations: Sequence[Moments]) -> Moments:
        """Moments of the union."""
        return Moments.merge(observations)

    def estimate(self, observation: Moments, request: ForgetRequest, weight: float | None = None) -> CurvatureEstimate:
        """Their Hessian."""
        return CurvatureEstimate(observation.hessian(request.head.l2, request.head.regularized_E))
