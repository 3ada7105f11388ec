"""The forget set's own Hessian: what every perturbation fit tends to with more and more perturbations."""

from __future__ import annotations

from sfu.curvature.estimators.base import HessianEstimator


class ClosedForm(HessianEstimator):
    """``H_f``, as it is."""
