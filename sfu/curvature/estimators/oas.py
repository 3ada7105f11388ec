"""The forget set's Hessian shrunk towards the identity by a formula for the weight.

Source: Chen, Wiesel, Eldar and Hero, Shrinkage algorithms for MMSE covariance estimation, 2010;
scikit-learn's implementation.
"""

from __future__ import annotations

import numpy as np

from sfu.curvature.estimators.shrinkage import Shrinkage


class Oas(Shrinkage):
    """``sklearn.covariance.oas`` of the scaled forget rows, plus ``l2 R``."""

    def _shrink(self, rows: np.ndarray) -> tuple[np.ndarray, float]:
        from sklearn.covariance import oas

        return oas(rows, assume_centered=True)
