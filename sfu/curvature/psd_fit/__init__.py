"""The positive-semidefinite fit of a curvature matrix to losses or gradients observed at perturbed weights.

``min over X >= L of 1/P |A(X) - t|^2 + mu/2 |X - X0|_F^2`` has one minimiser, found by semismooth Newton methods and
certified by its duality gap.
"""

from sfu.curvature.psd_fit.problem import GradientMeasurements, LossMeasurements, Measurements
from sfu.curvature.psd_fit.solve import PsdFitResult, Status, fit_psd

__all__ = ["GradientMeasurements", "LossMeasurements", "Measurements", "PsdFitResult", "Status", "fit_psd"]
