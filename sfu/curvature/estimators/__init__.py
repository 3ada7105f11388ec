"""Estimators of the retained data's Hessian, registered under the names of ``curvature.estimator``."""
