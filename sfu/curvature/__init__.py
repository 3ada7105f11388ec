"""Curvature of the data that is gone: measurements, the PSD fit, estimators, and the regularised inverse."""
