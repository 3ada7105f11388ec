"""The forget set's second moments shrunk towards the identity by a formula for the weight.

Source: Chen, Wiesel, Eldar and Hero, Shrinkage algorithms for MMSE covariance estimation, 2010;
scikit-learn's implementation.
"""

from __future__ import annotations

import numpy as np

from sfu.curvature.estimators.shrinkage import Shrinkage


class Oas(Shrinkage):
    """``sklearn.covariance.oas`` of the forget rows, plus ``l2 R``."""

    def _shrink(self, rows: np.ndarray, *, centered: bool) -> tuple[np.ndarray, float]:
        from sklearn.covariance import oas

        covariance, shrinkage = oas(rows, assume_centered=centered)
        return covariance, shrinkage
