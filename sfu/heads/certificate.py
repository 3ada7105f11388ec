"""What certified removal needs to know of a head trained with objective perturbation.

Shapes: C classes, E = D features (no bias).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Certificate:
    """The noise of a head, and how much of the budget is spent (:mod:`sfu.unlearning.methods.certified_removal`).

    Attributes:
        noise_std: Standard deviation of the entries of b.
        noise_CE: The b of the term ``<b, W>`` that was added to the *sum* objective in training. Secret: the guarantee
            is for those who see the weights and not b.
        residual_bound: Upper bound on the gradient norm of the perturbed sum objective, accumulated over removals;
            ``None`` once another method has moved the head.
        seeded: Whether b was drawn from a seed. Nothing is certified to whoever knows the seed.
    """

    noise_std: float
    noise_CE: Tensor
    residual_bound: float | None
    seeded: bool = False

    @classmethod
    def draw(cls, noise_std: float, shape: tuple[int, int], device: torch.device, seed: int | None) -> Certificate:
        """Draw a fresh b from 128 bits of the operating system's entropy, or a reproducible one from ``seed``.

        NumPy draws it, because PyTorch's CPU generator starts from 32 bits, which an attacker can try one by one.
        """
        drawn_CE = torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))
        return cls(noise_std, (noise_std * drawn_CE).to(device), 0.0, seed is not None)

    def as_json(self) -> dict[str, Any]:
        """Return everything but the noise b, for a JSON file."""
        return {"noise_std": self.noise_std, "residual_bound": self.residual_bound, "seeded": self.seeded}

    @classmethod
    def from_json(cls, about: Mapping[str, Any], noise_CE: Tensor) -> Certificate:
        """Read what :meth:`as_json` wrote; before ``seeded`` was written, every b came from a seed."""
        return cls(float(about["noise_std"]), noise_CE, about["residual_bound"], bool(about.get("seeded", True)))
