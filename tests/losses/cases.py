"""Every loss, and its plain definition."""

from __future__ import annotations

import pytest
import torch

from sfu.losses.base import Loss
from sfu.losses.huber_hinge import HuberHinge
from sfu.losses.logistic import Logistic
from sfu.losses.quadratic import Quadratic
from sfu.losses.softmax import Softmax
from sfu.losses.squared_hinge import SquaredHinge

LOSSES = [
    Quadratic(), Quadratic(target_scale=2.5), Logistic(), Softmax(), HuberHinge(), HuberHinge(smoothing=0.1),
    Quadratic(target_scale=2.0, other_target=-1.0), Softmax(label_smoothing=0.1), SquaredHinge(),
    Softmax(label_smoothing=0.2, temperature=0.4), Softmax(temperature=3.0),
]  # fmt: skip
IDS = [f"{loss.name}-{i}" for i, loss in enumerate(LOSSES)]
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=IDS)


def defined(loss: Loss, outputs: torch.Tensor, label: int | torch.Tensor) -> torch.Tensor:
    """The loss of one row as its formula says; the label is a class number or a target for each output."""
    if isinstance(loss, Softmax):
        return torch.nn.functional.cross_entropy(
            outputs[None] / loss.temperature, torch.as_tensor(label)[None], label_smoothing=loss.label_smoothing
        )
    hot = torch.eye(len(outputs), dtype=outputs.dtype)[label] if isinstance(label, int) else label
    margin = (2 * hot - 1) * outputs
    if isinstance(loss, Quadratic):
        target = loss.target_scale * hot + loss.other_target * (1 - hot)
        return 0.5 * (outputs - target).square().sum()
    if isinstance(loss, Logistic):
        softplus = torch.nn.functional.softplus
        return (hot * softplus(-outputs, threshold=40) + (1 - hot) * softplus(outputs, threshold=40)).sum()
    if isinstance(loss, SquaredHinge):
        return 0.5 * (1 - margin).clamp(min=0).square().sum()
    assert isinstance(loss, HuberHinge)
    h = loss.smoothing
    parabola = (1 + h - margin) ** 2 / (4 * h)
    return torch.where(margin > 1 + h, 0 * margin, torch.where(margin < 1 - h, 1 - margin, parabola)).sum()
