"""Separate seeds for separate purposes, all derived from ``seed`` unless given."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sfu.settings import RunConfig

PURPOSES = ("split", "training", "perturbation", "noise", "evaluation")


def derive_seed(seed: int, purpose: str) -> int:
    """A 31-bit seed that depends on both, through numpy's SeedSequence."""
    return int(np.random.SeedSequence([seed, zlib.crc32(purpose.encode())]).generate_state(1)[0] >> 1)


def resolve_seeds(config: RunConfig) -> dict[str, int]:
    """``seeds.<purpose>`` where given, else derived; also ``folds``, which follows ``split``.

    ``objective`` is there only if it was given: a seed that others can derive keeps no noise secret.
    """
    seeds = {}
    for purpose in PURPOSES:
        given = getattr(config.seeds, purpose)
        seeds[purpose] = derive_seed(config.seed, purpose) if given is None else given
    if config.seeds.objective is not None:
        seeds["objective"] = config.seeds.objective
    seeds["folds"] = derive_seed(seeds["split"], "folds")
    return seeds
