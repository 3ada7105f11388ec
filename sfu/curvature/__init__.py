"""Estimates of the Hessian of data that is gone: observations, the PSD fit, estimators and cross-validation."""
