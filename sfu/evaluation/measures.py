"""Accuracy, agreement, divergence and distance.

Shapes: N rows, P points, C classes, E parameters of a class; ``[1, p]`` parameters if the classes share them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfu.losses.rows import Rows
from sfu.operators.base import CurvatureOperator


def accuracy(logits_NC: Tensor, labels_N: Tensor) -> float:
    """Return the share of rows whose largest logit is the label's, in per cent."""
    return 100.0 * float((logits_NC.argmax(1) == labels_N.to(logits_NC.device)).double().mean())


def accuracies(rows: Rows, parameters_PCE: Tensor) -> list[float]:
    """Return the accuracy on some rows at each of P points, in per cent, in one pass over the rows."""
    right_P = torch.zeros(parameters_PCE.shape[0], dtype=torch.int64, device=parameters_PCE.device)
    for chunk in rows.chunks():
        right_P += (chunk.outputs(parameters_PCE).argmax(2) == chunk.labels_B[:, None]).sum(0)
    return [100.0 * right / rows.count for right in right_P.tolist()]


def agreement(logits_NC: Tensor, reference_NC: Tensor) -> float:
    """Return the share of rows on which both predict the same class, in per cent."""
    return 100.0 * float((logits_NC.argmax(1) == reference_NC.argmax(1)).double().mean())


def mean_kl(reference_NC: Tensor, logits_NC: Tensor) -> float:
    """Return the mean over rows of ``KL(softmax(reference) || softmax(logits))`` in nats."""
    return float(
        torch.nn.functional.kl_div(
            logits_NC.log_softmax(1), reference_NC.log_softmax(1), log_target=True, reduction="batchmean"
        ).clamp(min=0)
    )


def squared_norm(difference_CE: Tensor, hessian: CurvatureOperator) -> float:
    """Return ``v^T H v``, the squared norm of a Hessian."""
    return max(0.0, float(hessian.quadratic(difference_CE)))
