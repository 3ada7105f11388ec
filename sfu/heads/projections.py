r"""Moments of rows along a few random directions: what shows that other rows are of another kind.

The means of :math:`x^T p` and :math:`(x^T p)^2` over the training rows are kept with a head, for
:data:`DIRECTIONS` directions p that depend on the number of features alone. Rows of the same kind have these moments,
up to sampling; rows that are turned, shifted or of other sizes do not.

Shapes: N rows, D features, K directions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from sfu.lazy import torch
from sfu.losses.chunks import outputs_of

if TYPE_CHECKING:
    from torch import Tensor

DIRECTIONS = 16
_CHUNK_ROWS = 4096


def projected(features_ND: Tensor) -> Tensor:
    """Return the rows along all directions, ``[N, K]`` in float64."""
    return outputs_of(features_ND.double(), _directions(features_ND.shape[1]).T.to(features_ND.device))


def projected_moments(features_ND: Tensor) -> Tensor:
    """Return the means over rows of their projections and of the squares of these, ``[2, K]``."""
    return projected_sums(features_ND) / len(features_ND)


def projected_sums(features_ND: Tensor) -> Tensor:
    """Return the sums over rows of their projections and of the squares of these, ``[2, K]``."""
    sums_2K = torch.zeros(2, DIRECTIONS, dtype=torch.float64, device=features_ND.device)
    for rows_BD in features_ND.split(_CHUNK_ROWS):
        along_BK = projected(rows_BD)
        sums_2K += torch.stack([along_BK.sum(0), along_BK.square().sum(0)])
    return sums_2K


@lru_cache(maxsize=8)
def _directions(n_features: int) -> Tensor:
    import numpy as np

    drawn = np.random.RandomState(0)  # saved heads outlive versions of NumPy: its numbers are the same in all of them
    return torch.from_numpy(drawn.standard_normal((n_features, DIRECTIONS)))
