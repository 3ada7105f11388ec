r"""A summary of the training data's curvature, saved with the head when it was trained: D x D numbers, no examples.

With S the training data's second moments and S_f the forget set's, the retained ones are
:math:`(N S - N_f S_f) / N_r`: exact, so the step is that of Unlearned(+).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sfu.curvature.estimators.base import CurvatureEstimate, CurvatureEstimator
from sfu.errors import ConfigError
from sfu.heads.moments import Moments
from sfu.unlearning.method import Access, RetainedSet, Tools
from sfu.unlearning.request import ForgetRequest


class Stored(CurvatureEstimator[Moments]):
    """The retained Hessian from the stored training moments less the forget set's."""

    @property
    def access(self) -> Access:
        """Needs what was stored with the head."""
        return Access.STORED

    @property
    def is_exact(self) -> bool:
        """It is."""
        return True

    def observe(self, request: ForgetRequest, tools: Tools, retained: RetainedSet | None = None) -> Moments:
        """Second moments of the forget rows."""
        return request.moments()

    def merge(self, observations: Sequence[Moments]) -> Moments:
        """Moments of the union."""
        return Moments.merge(observations)

    def estimate(self, observation: Moments, request: ForgetRequest, weight: float | None = None) -> CurvatureEstimate:
        """Subtract.

        Raises:
            ConfigError: The head carries no curvature.
        """
        head = request.head
        if head.second_EE is None:
            raise ConfigError("curvature.estimator=stored needs a head trained with head.store_curvature=true.")
        left = head.n_train - observation.count
        second_EE = (head.n_train * head.second_EE - observation.count * observation.second_EE) / left
        return CurvatureEstimate(second_EE + torch.diag(head.l2 * head.regularized_E))
