"""Ranks of methods by their distance to Retrained, with what the seeds say of them.

Seeds are drawn again with replacement, the same ones for all methods, whose distances are therefore compared in pairs.
In every draw a method's rank is 1 plus the number of methods whose mean distance is smaller by more than the margin, so
that methods which are equal share a rank.

Source: B. Efron, "Bootstrap methods: another look at the jackknife", The Annals of Statistics 7 (1979).
Shapes: G settings, M methods, S runs of a setting, B draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sfu.results.statistic import CONFIDENCE, MARGINS

DRAWS = 10_000


@dataclass(frozen=True)
class Rank:
    """A method's rank, averaged over settings; 1 is nearest to Retrained.

    Attributes:
        mean: The rank by the mean distances.
        low: Lower end of its 95 % interval over the draws.
        high: Upper end.
        best: Share of the draws in which no method ranks before it.
    """

    mean: float
    low: float
    high: float
    best: float


def rank_methods(
    distances: Mapping[str, Sequence[Sequence[float]]], margin: float = MARGINS["distance"], draws: int = DRAWS
) -> dict[str, Rank]:
    """Rank methods by ``distances[method][setting][run]``; runs of a setting are paired by their place.

    Settings with equally many runs have the same seeds, which are drawn together. With one run there is no spread, and
    with none there are no ranks.

    Returns:
        The ranks by method, the first one first.
    """
    import numpy as np

    names, generator = list(distances), np.random.default_rng(0)
    if not names or not all(len(runs) for of_method in distances.values() for runs in of_method):
        return {}
    settings_GMS = [np.array([distances[name][index] for name in names]) for index in range(len(distances[names[0]]))]
    sizes = {found.shape[1] for found in settings_GMS}
    weights = {size: generator.multinomial(size, [1 / size] * size, size=draws) / size for size in sorted(sizes)}

    def ranks_of(means_BM: np.ndarray) -> np.ndarray:
        nearer_BMM = means_BM[:, None, :] < means_BM[:, :, None] - margin
        return 1 + nearer_BMM.sum(2)

    own_M = np.mean([ranks_of(found.mean(1)[None])[0] for found in settings_GMS], axis=0)
    drawn_BM = np.mean([ranks_of(weights[found.shape[1]] @ found.T) for found in settings_GMS], axis=0)
    ends = 100 * (1 - CONFIDENCE) / 2
    low_M, high_M = np.percentile(drawn_BM, [ends, 100 - ends], axis=0)
    best_M = (drawn_BM == drawn_BM.min(1, keepdims=True)).mean(0)
    found = zip(names, own_M, low_M, high_M, best_M, strict=True)
    ranks = {name: Rank(*map(float, values)) for name, *values in found}
    return dict(sorted(ranks.items(), key=lambda item: item[1].mean))
