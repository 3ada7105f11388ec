"""The retained data's own Hessian. Not source-free: it makes Unlearned(+), the upper row."""

from __future__ import annotations

from collections.abc import Sequence

from sfu.curvature.estimators.base import CurvatureEstimate, CurvatureEstimator
from sfu.errors import SourceFreeError
from sfu.heads.moments import Moments, compute_moments
from sfu.unlearning.method import Access, RetainedSet, Tools
from sfu.unlearning.request import ForgetRequest


class Exact(CurvatureEstimator[Moments]):
    """``H_r = mean of a a^T over the retained rows + l2 R``."""

    @property
    def access(self) -> Access:
        """Needs the retained data."""
        return Access.RETAINED

    @property
    def is_exact(self) -> bool:
        """It is."""
        return True

    def observe(self, request: ForgetRequest, tools: Tools, retained: RetainedSet | None = None) -> Moments:
        """Second moments of the retained rows.

        Raises:
            SourceFreeError: No retained data were given.
        """
        if retained is None:
            raise SourceFreeError("curvature.estimator=exact needs the retained data.")
        parameters = request.head.parameters_CE
        return compute_moments(
            retained.features_RD,
            retained.labels_R,
            request.head.n_classes,
            bias=request.head.bias,
            device=parameters.device,
            dtype=parameters.dtype,
            progress=tools.progress,
        )

    def merge(self, observations: Sequence[Moments]) -> Moments:
        """Moments of the union."""
        return Moments.merge(observations)

    def estimate(self, observation: Moments, request: ForgetRequest, weight: float | None = None) -> CurvatureEstimate:
        """Their Hessian."""
        return CurvatureEstimate(observation.hessian(request.head.l2, request.head.regularized_E))
