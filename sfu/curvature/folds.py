"""Split a forget set into folds: at random, or so that each fold is a part of its own (neighbours, classes, norms).

Folds have about equal weight. Near-duplicates stay together, since a row whose copy lies in another fold is not held
out. Random folds tell how well a random set's curvature serves another one; the others, how well the curvature of one
part of the set serves another part.

Shapes: F forget rows, G groups of near-duplicates, D features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfu.curvature.near_duplicates import effective_rows, near_groups
from sfu.lazy import torch
from sfu.request import ForgetRequest

if TYPE_CHECKING:
    from torch import Tensor

_ROWS_OF_A_FOLD = 4
_POWER_STEPS = 50


def possible_folds(request: ForgetRequest, wanted: int, mean_D: Tensor | None = None) -> int:
    """Return how many folds the effective rows allow: one for each four, at most ``wanted``, and none below two.

    Twenty distinct rows of equal weight allow five folds.
    """
    weights_F = row_weights(request)
    effective = effective_rows(weights_F, near_groups(request.features_FD, mean_D))
    folds = min(wanted, int((effective + 1e-9) // _ROWS_OF_A_FOLD))
    return folds if folds >= 2 else 0


def fold_indices(n_rows: int, n_folds: int, generator: torch.Generator) -> list[Tensor]:
    """Return a random partition of ``range(n_rows)`` into ``n_folds`` parts of almost equal size."""
    return list(torch.randperm(n_rows, generator=generator).tensor_split(n_folds))


def random_folds(
    request: ForgetRequest, n_folds: int, generator: torch.Generator, mean_D: Tensor | None = None
) -> list[Tensor]:
    """Split the rows at random into folds of about equal weight, with near-duplicates in one fold.

    Rows of equal weight without near-duplicates are split by :func:`fold_indices`. Otherwise heavy groups come
    first, and each goes to the lightest fold. There are fewer folds if there are fewer groups.
    """
    weights_F, groups_F = row_weights(request), near_groups(request.features_FD, mean_D)
    count = request.n_forget
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


def cluster_folds(request: ForgetRequest, n_folds: int, mean_D: Tensor | None = None) -> dict[str, list[Tensor]]:
    """Split the rows into folds that differ from each other, in each of these ways that gives at least two folds.

    - ``neighbours``: by the first principal component of the features;
    - ``classes``: by label, where there are several;
    - ``norms``: by the norm of the features, where they differ.
    """
    weights_F, groups_F = row_weights(request), near_groups(request.features_FD, mean_D)
    rows_FD = request.features_FD.double()
    norms_F = rows_FD.square().sum(1).sqrt().cpu()
    scores = {"neighbours": _first_component(rows_FD).cpu()}
    if len(request.labels_F.unique()) > 1:
        scores["classes"] = request.labels_F.double().cpu()
    if float(norms_F.max() - norms_F.min()) > 1e-3 * float(norms_F.max()):
        scores["norms"] = norms_F
    folds = {}
    for name, score_F in scores.items():
        order_F = groups_F.argsort(stable=True)
        order_F = order_F[score_F[groups_F[order_F]].argsort(stable=True)]  # near-duplicates by the first of them
        leaders_F, sizes_F = groups_F[order_F], weights_F[order_F]
        _, group_F = leaders_F.unique_consecutive(return_inverse=True)
        weights_G = torch.zeros(int(group_F[-1]) + 1, dtype=torch.float64).index_add(0, group_F, sizes_F)
        middle_G = (weights_G.cumsum(0) - weights_G / 2) / weights_G.sum()
        fold_F = torch.empty_like(order_F)
        fold_F[order_F] = (middle_G * n_folds).long().clamp(max=n_folds - 1)[group_F]
        parts = _parts(fold_F, n_folds)
        if len(parts) > 1:
            folds[name] = parts
    return folds


def row_weights(request: ForgetRequest) -> Tensor:
    """Return each row's sample weight times its class weight, 1 without either, float64 on the CPU."""
    weights_F = request.data().weights_N
    return torch.ones(request.n_forget, dtype=torch.float64) if weights_F is None else weights_F.cpu()


def _parts(fold_F: Tensor, n_folds: int) -> list[Tensor]:
    parts = [(fold_F == fold).nonzero()[:, 0] for fold in range(n_folds)]
    return [part for part in parts if len(part)]


def _first_component(rows_FD: Tensor) -> Tensor:
    """Return the coordinate of each row along the first principal component, by power iteration from a fixed start."""
    centred_FD = rows_FD - rows_FD.mean(0)
    generator = torch.Generator().manual_seed(0)
    axis_D = torch.randn(rows_FD.shape[1], generator=generator, dtype=torch.float64).to(rows_FD.device)
    for _ in range(_POWER_STEPS):
        axis_D = torch.nn.functional.normalize(centred_FD.T @ (centred_FD @ axis_D), dim=0)
    return centred_FD @ axis_D
