"""Curvature as something that multiplies and solves: dense, in blocks, or by products with the rows."""

from typing import Any

_HOMES = {
    "CurvatureOperator": "base", "DampedInverse": "base", "Solution": "base", "LinearSolution": "base",
    "build_operator": "build", "ExplicitOperator": "explicit", "DENSE_LIMIT": "plan", "Plan": "plan",
    "plan_structure": "plan", "ProductOperator": "products",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(f"sfu.operators.{_HOMES[name]}"), name)
    raise AttributeError(name)
