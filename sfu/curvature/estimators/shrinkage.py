"""Shrinkage of the forget set's second moments towards a multiple of the identity: the base of two estimators.

With a bias it is the covariance that is shrunk (the mean is exact), so translating the features changes nothing;
without one, the uncentred second moments.

Shapes: F forget rows, D features, E = D (+ 1 with bias).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sfu.curvature.estimators.base import CurvatureEstimate, CurvatureEstimator
from sfu.errors import DataError
from sfu.unlearning.method import RetainedSet, Tools
from sfu.unlearning.request import ForgetRequest


class Shrinkage(CurvatureEstimator[Tensor]):
    """scikit-learn's shrunk covariance of the forget rows, plus ``l2 R``. An observation is the design rows."""

    def observe(self, request: ForgetRequest, tools: Tools, retained: RetainedSet | None = None) -> Tensor:
        """The forget rows themselves, ``[F, E]``."""
        return request.design_FE

    def merge(self, observations: Sequence[Tensor]) -> Tensor:
        """All rows."""
        return torch.cat(list(observations))

    def estimate(self, observation: Tensor, request: ForgetRequest, weight: float | None = None) -> CurvatureEstimate:
        """Shrink, and put the mean and the bias's row back.

        Raises:
            DataError: There is one row only.
        """
        head = request.head
        if observation.shape[0] < 2:
            raise DataError("shrinkage needs at least two rows; use curvature.estimator=closed_form for one.")
        features = observation[:, : head.n_features]
        covariance, shrinkage = self._shrink(features.cpu().numpy().astype(np.float64), centered=not head.bias)
        block = torch.from_numpy(covariance).to(observation)
        if head.bias:
            mean = features.mean(0)
            top = torch.cat([block + torch.outer(mean, mean), mean[:, None]], dim=1)
            block = torch.cat([top, torch.cat([mean, mean.new_ones(1)])[None]])
        return CurvatureEstimate(block + torch.diag(head.l2 * head.regularized_E), {"shrinkage": float(shrinkage)})

    @abstractmethod
    def _shrink(self, rows: np.ndarray, *, centered: bool) -> tuple[np.ndarray, float]:
        """The shrunk ``[D, D]`` covariance (second moments if ``centered``), and the weight of the identity."""
