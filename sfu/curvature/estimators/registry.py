"""Find an estimator by name: one file in this folder, one subclass of the base in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sfu.curvature.estimators.base import CurvatureEstimator
from sfu.discovery import only_subclass

if TYPE_CHECKING:
    from sfu.settings import CurvatureConfig


def make_estimator(config: CurvatureConfig) -> CurvatureEstimator[Any]:
    """The estimator ``config.estimator``, with its settings."""
    return only_subclass(f"sfu.curvature.estimators.{config.estimator}", CurvatureEstimator)(config)
