"""Split a forget set into folds of about equal weight, at random.

Near-duplicates stay together, since a row whose copy lies in another fold is not held out.

Shapes: F forget rows, G groups of near-duplicates, D features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfu.curvature.near_duplicates import near_groups
from sfu.lazy import torch
from sfu.request import ForgetRequest

if TYPE_CHECKING:
    from torch import Tensor


def fold_indices(n_rows: int, n_folds: int, generator: torch.Generator) -> list[Tensor]:
    """Return a random partition of ``range(n_rows)`` into ``n_folds`` parts of almost equal size."""
    return list(torch.randperm(n_rows, generator=generator).tensor_split(n_folds))


def random_folds(
    request: ForgetRequest, n_folds: int, generator: torch.Generator, groups_F: Tensor | None = None
) -> list[Tensor]:
    """Split the rows at random into folds of about equal weight, with near-duplicates in one fold.

    Rows of equal weight without near-duplicates are split by :func:`fold_indices`. Otherwise heavy groups come
    first, and each goes to the lightest fold. There are fewer folds if there are fewer groups. ``groups_F``
    are those of :func:`~sfu.curvature.near_duplicates.near_groups`, if they are known.
    """
    weights_F, count = row_weights(request), request.n_forget
    groups_F = near_groups(request.features_FD) if groups_F is None else groups_F
    if bool((weights_F == weights_F[0]).all()) and torch.equal(groups_F, torch.arange(count)):
        return fold_indices(count, n_folds, generator)
    leaders_G, group_F = groups_F.unique(return_inverse=True)
    weights_G = torch.zeros(len(leaders_G), dtype=torch.float64).index_add(0, group_F, weights_F)
    shuffled_G = torch.randperm(len(leaders_G), generator=generator)
    magnitudes_G = weights_G[shuffled_G].log2().floor()  # in random order within a factor of two
    heaviest_G = shuffled_G[magnitudes_G.argsort(descending=True, stable=True)]
    totals, fold_G = [0.0] * n_folds, torch.zeros(len(leaders_G), dtype=torch.int64)
    for group in heaviest_G.tolist():
        lightest = min(range(n_folds), key=totals.__getitem__)
        totals[lightest] += float(weights_G[group])
        fold_G[group] = lightest
    return _parts(fold_G[group_F], n_folds)


def row_weights(request: ForgetRequest) -> Tensor:
    """Return each row's sample weight times its class weight, 1 without either, float64 on the CPU."""
    weights_F = request.data().weights_N
    return torch.ones(request.n_forget, dtype=torch.float64) if weights_F is None else weights_F.cpu()


def _parts(fold_F: Tensor, n_folds: int) -> list[Tensor]:
    parts = [(fold_F == fold).nonzero()[:, 0] for fold in range(n_folds)]
    return [part for part in parts if len(part)]
