"""Find rows that are copies of others, or nearly so, and count how many rows there are without them.

Shapes: N rows, G groups, B rows of a block, O rows beside it, D features, K projections.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sfu.lazy import torch
from sfu.losses.chunks import outputs_of

if TYPE_CHECKING:
    from torch import Tensor

_NEAR = 0.01  # of the typical distance between rows
_PROJECTIONS = 16
_SLACK = 4.0  # a squared distance is rarely larger in the projections by more than this factor
_FARTHEST = 6.0  # nor a distance along one of them by more than this factor
_BLOCK_ROWS = 256


def near_groups(features_ND: Tensor, mean_D: Tensor | None = None) -> Tensor:
    """Return for each row the number of the first row that it is near to, itself if there is none before it, ``[N]``.

    Rows are near if their distance is at most 1 % of the typical one, the root mean square distance between rows that
    scatter about the mean as these do. ``mean_D`` is the mean of the training rows, if it is known: without it, copies
    of one row that differ a little are each typical.
    """
    count, width = features_ND.shape
    rows_ND = features_ND.double() - (features_ND.mean(0, dtype=torch.float64) if mean_D is None else mean_D)
    limit = _NEAR**2 * 2 * float(rows_ND.square().sum(1).mean())
    generator = torch.Generator().manual_seed(0)
    axes_DK = torch.randn(width, _PROJECTIONS, generator=generator, dtype=torch.float64) / math.sqrt(_PROJECTIONS)
    projected_NK = outputs_of(rows_ND, axes_DK.T.to(rows_ND.device)).contiguous()
    order_N = projected_NK[:, 0].argsort()
    place_N, squares_N = projected_NK[order_N, 0].contiguous(), projected_NK.square().sum(1)
    first_N = torch.arange(count, device=rows_ND.device)
    rounding = 1e-14 * float(squares_N.max())
    reach = _FARTHEST * math.sqrt(limit / _PROJECTIONS) + math.sqrt(rounding)  # along one projection
    for block in order_N.split(_BLOCK_ROWS):
        low, high = projected_NK[block[0], 0] - reach, projected_NK[block[-1], 0] + reach
        start, stop = torch.searchsorted(place_N, low), torch.searchsorted(place_N, high, right=True)
        others = order_N[start:stop]
        part_BO = torch.addmm(squares_N[others], projected_NK[block], projected_NK[others].T, alpha=-2)
        near_BO = part_BO <= (_SLACK * limit + rounding - squares_N[block])[:, None]
        several_B = near_BO.count_nonzero(dim=1) > 1  # each is near to itself
        block, near_BO = block[several_B], near_BO[several_B]
        too_far_B = torch.ones(len(block), dtype=torch.bool)
        while bool(too_far_B.any()):  # candidates are tried in turn
            first_B, column_B = torch.where(near_BO, others, block[:, None]).min(1)
            too_far_B = (rows_ND[block] - rows_ND[first_B]).square().sum(1) > limit
            near_BO[too_far_B, column_B[too_far_B]] = False
            first_N[block] = first_B
    while not torch.equal(first_N[first_N], first_N):  # near to a row that is near to another
        first_N = first_N[first_N]
    return first_N.cpu()


def effective_rows(weights_N: Tensor, groups_N: Tensor | None = None) -> float:
    """Return how many rows of equal weight have a mean that scatters as much; the rows of a group count as one row."""
    if groups_N is not None:
        weights_N = torch.zeros_like(weights_N).index_add(0, groups_N, weights_N)
    return float(weights_N.sum()) ** 2 / float(weights_N.square().sum())
