"""Curvature as a linear operator on the parameters: explicit blocks or products with the rows, one interface."""

from sfu.operators.base import CurvatureOperator, DampedInverse, LinearSolution
from sfu.operators.build import build_operator
from sfu.operators.explicit import ExplicitOperator
from sfu.operators.plan import DENSE_LIMIT, Plan, plan_structure
from sfu.operators.products import ProductOperator

__all__ = [
    "DENSE_LIMIT",
    "CurvatureOperator",
    "DampedInverse",
    "ExplicitOperator",
    "LinearSolution",
    "Plan",
    "ProductOperator",
    "build_operator",
    "plan_structure",
]
