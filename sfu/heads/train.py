"""Train a head as configured: the one entry that both Original and Retrained go through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfu.heads.adam import train_adam
from sfu.heads.exact import train_exact
from sfu.heads.linear import LinearHead
from sfu.heads.moments import compute_moments
from sfu.settings import Training

if TYPE_CHECKING:
    from sfu.settings import HeadConfig, LossConfig


def train_head(
    features_ND: Tensor,
    labels_N: Tensor,
    n_classes: int,
    head: HeadConfig,
    loss: LossConfig,
    *,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    progress: Callable[[int, int], None] | None = None,
) -> LinearHead:
    """Train on all rows given, by ``head.training`` (``exact`` or ``adam``).

    Raises:
        SingularHessianError: Exact training with a singular Gram matrix and no regularisation.
    """
    exact = head.training is Training.exact
    moments = None
    if exact or head.store_curvature:
        moments = compute_moments(
            features_ND, labels_N, n_classes, bias=head.bias, device=device, dtype=dtype, progress=progress
        )
    if exact and moments is not None:
        trained = train_exact(moments, l2=head.l2, bias=head.bias, target_scale=loss.target_scale)
    else:
        trained = train_adam(
            features_ND, labels_N, n_classes, head.adam,
            l2=head.l2, bias=head.bias, target_scale=loss.target_scale, seed=seed,
            device=device, dtype=dtype, progress=progress,
        )  # fmt: skip
    if head.store_curvature and moments is not None:
        trained = replace(trained, second_EE=moments.second_EE)
    return trained
