"""Separate seeds for separate purposes, all derived from ``seed`` unless given."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, ClassVar

from sfu.schema import Settings, setting

PURPOSES = ("split", "training", "perturbation", "noise", "evaluation")
_RANGE: dict[str, Any] = {"at_least": 0, "below": 2**32}


@dataclass
class SeedSettings(Settings):
    """Seeds of single purposes; those that are null are derived from ``seed``, except ``objective``."""

    prefix: ClassVar[str] = "seeds"

    split: int | None = setting(None, "Of the test part and the forget set.", **_RANGE)
    training: int | None = setting(None, "Of the order of rows in training.", **_RANGE)
    perturbation: int | None = setting(None, "Of perturbed heads.", **_RANGE)
    noise: int | None = setting(None, "Of noise on the parameters.", **_RANGE)
    evaluation: int | None = setting(None, "Of the evaluation.", **_RANGE)
    objective: int | None = setting(
        None, "Of head.objective_noise; null: the system's entropy. A given seed certifies nothing.", **_RANGE
    )

    def resolve(self, seed: int) -> dict[str, int]:
        """Return the seed of every purpose: as given, or derived from ``seed``; ``folds`` follows ``split``.

        ``objective`` is there only if it was given: a seed that others can derive leaves no noise secret.
        """
        seeds = {}
        for purpose in PURPOSES:
            given = getattr(self, purpose)
            seeds[purpose] = derive_seed(seed, purpose) if given is None else given
        if self.objective is not None:
            seeds["objective"] = self.objective
        seeds["folds"] = derive_seed(seeds["split"], "folds")
        return seeds


def derive_seed(seed: int, purpose: str) -> int:
    """Return a 31-bit seed that depends on both, through NumPy's SeedSequence."""
    import numpy as np

    return int(np.random.SeedSequence([seed, zlib.crc32(purpose.encode())]).generate_state(1)[0] >> 1)
