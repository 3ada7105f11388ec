"""Convex losses of a linear head and their derivatives: one file a loss, one interface for all."""

from sfu.losses.base import Constants, Layout, Loss, OutputHessian
from sfu.losses.huber_hinge import HuberHinge
from sfu.losses.logistic import Logistic
from sfu.losses.objective import Objective
from sfu.losses.quadratic import Quadratic
from sfu.losses.registry import check_class_weights, loss_from_config, loss_from_json, loss_names, make_loss
from sfu.losses.rows import Rows
from sfu.losses.softmax import Softmax

__all__ = [
    "Constants",
    "HuberHinge",
    "Layout",
    "Logistic",
    "Loss",
    "Objective",
    "OutputHessian",
    "Quadratic",
    "Rows",
    "Softmax",
    "check_class_weights",
    "loss_from_config",
    "loss_from_json",
    "loss_names",
    "make_loss",
]
