"""Curvature as a linear operator on the parameters: explicit blocks or products with the rows, one interface."""

from sfu.curvature.operators.base import CurvatureOperator, DampedInverse, Solution
from sfu.curvature.operators.build import build_operator
from sfu.curvature.operators.explicit import ExplicitOperator
from sfu.curvature.operators.plan import DENSE_LIMIT, Plan, plan_structure
from sfu.curvature.operators.products import ProductOperator

__all__ = [
    "DENSE_LIMIT",
    "CurvatureOperator",
    "DampedInverse",
    "ExplicitOperator",
    "Plan",
    "ProductOperator",
    "Solution",
    "build_operator",
    "plan_structure",
]
