"""Convex losses of a linear head and their derivatives: one file a loss, one interface for all."""

from typing import Any

from sfu.losses.base import Constants, Layout, Loss, OutputHessian, loss_from_json, make_loss
from sfu.losses.huber_hinge import HuberHinge
from sfu.losses.logistic import Logistic
from sfu.losses.quadratic import Quadratic
from sfu.losses.softmax import Softmax


def __getattr__(name: str) -> Any:
    import importlib

    homes = {"Objective": "sfu.losses.objective", "Rows": "sfu.losses.rows"}
    if name in homes:
        return getattr(importlib.import_module(homes[name]), name)
    raise AttributeError(name)


def loss_names() -> list[str]:
    return Loss.names()


def loss_from_config(loss: Loss, labels_N: Any, n_classes: int) -> Loss:
    return loss.for_labels(labels_N, n_classes)


__all__ = [
    "Constants",
    "HuberHinge",
    "Layout",
    "Logistic",
    "Loss",
    "OutputHessian",
    "Quadratic",
    "Softmax",
    "loss_from_json",
    "make_loss",
]
