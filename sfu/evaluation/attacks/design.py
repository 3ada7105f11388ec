"""Which rows each shadow is trained on, and which of them it forgets.

The *pool* is the training rows, then the test rows. The *targets* are rows that were forgotten (members) and, class by
class, as many test rows. Every shadow forgets a random half of the targets and never sees the other half. Shadows 2 k
and 2 k + 1 have the two halves, so each target is in the requests of half of the shadows. The retained rows of a
shadow are as many as the run's own, drawn from its retained rows and the test rows that are no targets. (A pair that
shared them would make the shadows of Retrained equal, and leave rounding to be compared.) A request has as many rows as
the run's: where there are fewer test rows of its classes, the rest of the forgotten rows is in all of them.

If forget and test set are random samples of one population, the run itself is one more such draw, and nothing about the
shadows tells which half of the targets it forgot. A head that depends on the retained rows alone, such as Retrained,
then has scores whose distribution is the same for members and others: an area of one half.

Shapes: P rows of the pool, T targets, S shadows, F rows to forget, R retained rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from sfu.data.split import ForgetSplit


@dataclass(frozen=True)
class Design:
    """The draws of all shadows, as row numbers of the pool.

    Attributes:
        targets_T: The rows that attacks score, members first.
        member_T: Which of them the run forgot.
        inside_ST: Which of them each shadow forgets.
        fill_G: Rows that every shadow forgets besides.
        others_O: What retained rows are drawn from.
        n_retain: R.
        seed: Seed of the draws.
    """

    targets_T: Tensor
    member_T: NDArray[Any]
    inside_ST: NDArray[Any]
    fill_G: Tensor
    others_O: Tensor
    n_retain: int
    seed: int

    @property
    def n_shadows(self) -> int:
        """Number of shadows S."""
        return len(self.inside_ST)

    def forgotten(self, shadow: int) -> tuple[Tensor, Tensor]:
        """Return the rows that a shadow forgets: its targets, and those that every shadow forgets."""
        return self.targets_T[torch.from_numpy(self.inside_ST[shadow])], self.fill_G

    def retained(self, shadow: int) -> Tensor:
        """Return the rows that it retains, ``[R]``."""
        drawn = np.random.default_rng([self.seed, shadow]).permutation(len(self.others_O))
        return self.others_O[torch.from_numpy(np.sort(drawn[: self.n_retain]))]


def make_design(
    train_labels_N: Tensor, test_labels_K: Tensor, split: ForgetSplit, *, n_shadows: int, seed: int
) -> Design:
    """Choose targets and draw shadows. There are no targets if no test row has a forgotten class."""
    rng = np.random.default_rng(seed)
    train, test = train_labels_N.numpy(), test_labels_K.numpy()
    forget, retain = split.forget_F.numpy(), split.retain_R.numpy()
    members: list[NDArray[Any]] = []
    others: list[NDArray[Any]] = []
    halves = []
    for label in np.unique(train[forget]):
        sides = forget[train[forget] == label], len(train) + np.flatnonzero(test == label)
        count = min(map(len, sides))
        for side, found in zip(sides, (members, others), strict=True):
            found.append(np.sort(rng.permutation(side)[:count]))
        halves.append(count)
    member_M, other_M = (np.concatenate(found) for found in (members, others))
    unused = np.setdiff1d(len(train) + np.arange(len(test)), other_M)
    unused = unused[np.isin(test[unused - len(train)], train[retain])]
    inside_ST = np.zeros((n_shadows, 2 * len(member_M)), dtype=bool)
    start = 0
    for count in halves:  # the members of a class, and its other targets
        places = start + np.arange(count)
        places = np.concatenate([places, len(member_M) + places])
        for first in range(0, n_shadows, 2):
            drawn = rng.permutation(places)
            for shadow, half in zip(range(first, min(first + 2, n_shadows)), np.array_split(drawn, 2), strict=False):
                inside_ST[shadow, half] = True
        start += count
    return Design(
        targets_T=torch.from_numpy(np.concatenate([member_M, other_M])).long(),
        member_T=np.arange(2 * len(member_M)) < len(member_M),
        inside_ST=inside_ST,
        fill_G=torch.from_numpy(np.setdiff1d(forget, member_M)).long(),
        others_O=torch.from_numpy(np.concatenate([retain, unused])).long(),
        n_retain=len(retain),
        seed=seed,
    )
