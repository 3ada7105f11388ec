"""Separate seeds for separate purposes, all derived from ``seed`` unless given."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, ClassVar

from sfu.schema import Settings, setting

PURPOSES = {
    "split": "split",
    "training": "training",
    "perturbation": "method",
    "noise": "method",
    "evaluation": "evaluation",
}
"""What needs a seed, and the setting of ``seed_for`` that it follows."""
_RANGE: dict[str, Any] = {"at_least": 0, "below": 2**32}


@dataclass
class SeedSettings(Settings):
    """Seeds that replace ``seed`` for one purpose, so that the others vary alone."""

    prefix: ClassVar[str] = "seed_for"

    split: int | None = setting(None, "Test part, forget set and folds; null: as seed.", **_RANGE)
    training: int | None = setting(None, "Order of rows in training; null: as seed.", **_RANGE)
    method: int | None = setting(None, "Perturbed heads and noise of the methods; null: as seed.", **_RANGE)
    evaluation: int | None = setting(None, "Splits of the membership attack; null: as seed.", **_RANGE)
    objective: int | None = setting(
        None, "head.objective_noise; null: the system's entropy. A given seed certifies nothing.", **_RANGE
    )

    def resolve(self, seed: int) -> dict[str, int]:
        """Return the derived seed of every purpose, from the setting that it follows or from ``seed``.

        ``folds`` follows ``split``. ``objective`` is there only if it was given, and is used as it is: a seed that
        others can derive leaves no noise secret.
        """
        seeds = {}
        for purpose, follows in PURPOSES.items():
            given = getattr(self, follows)
            seeds[purpose] = derive_seed(seed if given is None else given, purpose)
        if self.objective is not None:
            seeds["objective"] = self.objective
        seeds["folds"] = derive_seed(seeds["split"], "folds")
        return seeds


def derive_seed(seed: int, purpose: str) -> int:
    """Return a 31-bit seed that depends on both, through NumPy's SeedSequence."""
    import numpy as np

    return int(np.random.SeedSequence([seed, zlib.crc32(purpose.encode())]).generate_state(1)[0] >> 1)
