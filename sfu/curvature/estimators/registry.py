"""Make the estimator that a configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sfu.curvature.estimators.base import CurvatureEstimator

if TYPE_CHECKING:
    from sfu.settings import CurvatureConfig


def make_estimator(config: CurvatureConfig) -> CurvatureEstimator[Any]:
    """Return the estimator ``config.estimator``, with its settings."""
    return CurvatureEstimator.named(config.estimator.value, "curvature.estimator")(config)
