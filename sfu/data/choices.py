"""Forget sets that are not random samples: the hardest rows, near-duplicates of retained rows, and rows that are alike.

They stand for requests as people make them, and are known before a head is trained: from features and labels alone.
Shapes: N training rows, P rows of the pool they are chosen from, D features, C classes, B rows of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfu.data.settings import DUPLICATES, HARDEST
from sfu.errors import ConfigError, DataError

_RIDGE = 1e-3  # l2 of the head that tells hard rows, over the mean squared norm of a row
_WIDEST = 8192  # features of which that head is solved for
_BLOCK_ROWS = 2048


def chosen_first(choose: str, pool_P: Tensor, count: int, features_ND: Tensor, labels_N: Tensor, seed: int) -> Tensor:
    """Return ``count`` rows of the pool, those that are chosen first.

    ``hardest`` takes the rows of largest squared error under a ridge head of all training rows, ``duplicates`` those
    that are nearest to a retained row of their class, and ``similar`` those that are nearest to one row, which the seed
    draws.

    Raises:
        ConfigError: There are too many features to tell hard rows.
        DataError: So many rows do not have a retained neighbour.
    """
    if choose == HARDEST:
        order_P = ridge_errors(features_ND, labels_N)[pool_P].argsort(descending=True, stable=True)
        return pool_P[order_P[:count]]
    if choose == DUPLICATES:
        return near_duplicates(pool_P, count, features_ND, labels_N)
    start = pool_P[torch.randint(len(pool_P), (), generator=torch.Generator().manual_seed(seed))]
    centre_D = features_ND[start].double()
    blocks = [features_ND[block].double() for block in pool_P.split(_BLOCK_ROWS)]
    squares_P = torch.cat([(rows_BD - centre_D).square().sum(1) for rows_BD in blocks])
    return pool_P[squares_P.argsort(stable=True)[:count]]


def ridge_errors(features_ND: Tensor, labels_N: Tensor) -> Tensor:
    """Return the squared error of every row under a ridge head of all rows, ``[N]``, float64.

    Its l2 is 0.001 times the mean squared norm of a row, and it has no bias.

    Raises:
        ConfigError: There are too many features.
    """
    width = features_ND.shape[1]
    if width > _WIDEST:
        raise ConfigError(
            f"forget.choose={HARDEST} solves for a head of {width:,} features, and does so for at most {_WIDEST:,}. "
            "Choose a backbone with fewer features, or list the rows (forget.indices)."
        )
    one_hot_NC = torch.nn.functional.one_hot(labels_N).double()
    gram_DD = torch.zeros(width, width, dtype=torch.float64)
    moment_DC = torch.zeros(width, one_hot_NC.shape[1], dtype=torch.float64)
    pieces = list(zip(features_ND.split(_BLOCK_ROWS), one_hot_NC.split(_BLOCK_ROWS), strict=True))
    for rows_BD, targets_BC in pieces:
        gram_DD.addmm_(rows_BD.double().T, rows_BD.double())
        moment_DC.addmm_(rows_BD.double().T, targets_BC)
    gram_DD.diagonal().add_(_RIDGE * gram_DD.trace().clamp_min(torch.finfo(torch.float64).tiny))
    weight_DC = torch.linalg.solve(gram_DD, moment_DC)
    return torch.cat([(rows_BD.double() @ weight_DC - targets_BC).square().sum(1) for rows_BD, targets_BC in pieces])


def near_duplicates(pool_P: Tensor, count: int, features_ND: Tensor, labels_N: Tensor) -> Tensor:
    """Return the rows of the pool whose nearest neighbour of the same class is nearest to them, and is retained.

    Of two rows that are each other's neighbours one is taken: pairs are served in the order of their distance.

    Raises:
        DataError: There are fewer such rows.
    """
    nearest_N, squares_N = nearest_of_class(features_ND, labels_N)
    neighbours = nearest_N.tolist()
    chosen, retained = dict[int, None](), set[int]()
    for row in pool_P[squares_N[pool_P].argsort(stable=True)].tolist():
        neighbour = neighbours[row]
        if neighbour >= 0 and row not in retained and neighbour not in chosen:
            chosen[row] = None
            retained.add(neighbour)
            if len(chosen) == count:
                return torch.tensor(list(chosen))
    raise DataError(
        f"forget.choose={DUPLICATES}: only {len(chosen)} of {len(pool_P)} rows can be forgotten while their nearest "
        f"neighbour is retained, and {count} were asked for. Lower forget.fraction."
    )


def nearest_of_class(features_ND: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest other row of the same class, and the squared distance to it, ``[N]`` each.

    The only row of a class has neighbour -1 at an infinite distance.
    """
    nearest_N = torch.full_like(labels_N, -1)
    squares_N = torch.full(labels_N.shape, torch.inf, dtype=torch.float64)
    for label in labels_N.unique():
        members = (labels_N == label).nonzero().squeeze(1)
        if len(members) < 2:
            continue
        rows_MD = features_ND[members].double()
        norms_M = rows_MD.square().sum(1)
        for start in range(0, len(members), _BLOCK_ROWS):
            block_BD = rows_MD[start : start + _BLOCK_ROWS]
            gaps_BM = torch.addmm(norms_M, block_BD, rows_MD.T, alpha=-2)
            gaps_BM += norms_M[start : start + len(block_BD), None]
            gaps_BM[torch.arange(len(block_BD)), start + torch.arange(len(block_BD))] = torch.inf
            found = gaps_BM.clamp_min(0).min(1)
            nearest_N[members[start : start + len(block_BD)]] = members[found.indices]
            squares_N[members[start : start + len(block_BD)]] = found.values
    return nearest_N, squares_N
