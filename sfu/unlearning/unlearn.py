"""Unlearn in one call, for those who hold a head and a deletion request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfu.curvature.settings import CurvatureSettings, curvature_settings
from sfu.errors import ConfigError
from sfu.heads.base import Head
from sfu.request import Access, ForgetRequest, MethodContext
from sfu.schema import plain_value
from sfu.seeds import PURPOSES, derive_seed
from sfu.unlearning.base import UnlearningResult
from sfu.unlearning.methods.newton import Newton


def unlearn(
    head: Head,
    features: Tensor | np.ndarray,
    labels: Tensor | np.ndarray,
    *,
    views: Tensor | np.ndarray | None = None,
    weights: Tensor | np.ndarray | None = None,
    curvature: CurvatureSettings | Mapping[str, Any] | None = None,
    noise_sigma: float = 0.0,
    steps: int = 1,
    batches: int = 1,
    seed: int = 0,
) -> UnlearningResult:
    """Take source-free Newton steps (one by default): ``unlearned_minus`` outside the experiment framework.

    Args:
        head: The trained head, with its l2, its number of training rows and (if it was stopped early) its gradient.
        features: Features of the examples to forget, ``[F, D]``, from the backbone the head was trained on.
        labels: Their labels, ``[F]`` integers.
        views: Features of V augmented copies (flipped, cropped, ...) of the same examples, ``[V, F, D]``, whose
            Hessians are averaged in; no label or other image is needed for them.
        weights: Their sample weights, if the head was trained with sample weights.
        curvature: Estimator and regularisation, as a ``CurvatureSettings`` or a mapping of its keys; the default is the
            cross-validated PSD fit.
        noise_sigma: Standard deviation of Gaussian noise on the parameters.
        steps: Newton steps, the curvature moved along the path before each.
        batches: Number of parts, forgotten one after another.
        seed: Seed of the perturbations, folds and noise.

    Returns:
        The unlearned head, whether the step was applied, its predicted gain, and notes.

    Raises:
        DataError: The examples do not fit the head.
        ConfigError: The settings cannot work, or need the retained data.
        SingularHessianError: The curvature estimate cannot be inverted.
        SolverError: The fit failed.
    """
    seed = plain_value(seed)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"seed={seed}. Give a whole number of at least 0.")
    config = curvature_settings(curvature)
    method = Newton(config, noise_sigma, steps, batches)
    if method.access is Access.RETAINED:
        raise ConfigError(f"curvature.estimator={config.estimator} needs the retained data, and unlearn has none.")
    if config.augment:
        raise ConfigError(
            f"curvature.augment={list(config.augment)} needs the images, which only experiments have. Here, give the "
            "augmented features as views."
        )
    seeds = {purpose: derive_seed(seed, purpose) for purpose in (*PURPOSES, "folds")}
    request = ForgetRequest(
        head,
        torch.as_tensor(features),
        torch.as_tensor(labels),
        views_VFD=None if views is None else torch.as_tensor(views),
        weights_F=None if weights is None else torch.as_tensor(weights),
    )
    return method.unlearn(request.private(), MethodContext(seeds))
