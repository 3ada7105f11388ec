"""The forget set's Hessian shrunk towards the identity by a formula for the weight.

Source: Ledoit and Wolf, A well-conditioned estimator for large-dimensional covariance matrices, 2004;
scikit-learn's implementation.
"""

from __future__ import annotations

import numpy as np

from sfu.curvature.estimators.shrinkage import Shrinkage


class LedoitWolf(Shrinkage):
    """``sklearn.covariance.ledoit_wolf`` of the scaled forget rows, plus ``l2 R``."""

    def _shrink(self, rows: np.ndarray) -> tuple[np.ndarray, float]:
        from sklearn.covariance import ledoit_wolf

        return ledoit_wolf(rows, assume_centered=True)
