"""What a head trained with objective perturbation must remember for certified removal.

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
    """What certified removal must know of a head; see :mod:`sfu.unlearning.methods.certified_removal`.

    Attributes:
        noise_std: Standard deviation of the entries of b.
        noise_CE: The b of the term ``<b, W>`` that was added to the *sum* objective in training. Secret: the guarantee
            is for those who see the weights and not b.
        residual_bound: Bound on the gradient norm of the perturbed sum objective, accumulated over removals;
            ``None`` once another method has moved the head.
        seeded: Whether b was drawn from a seed: then nothing is certified to whoever knows the seed.
    """

    noise_std: float
    noise_CE: Tensor
    residual_bound: float | None
    seeded: bool = False

    @classmethod
    def draw(cls, noise_std: float, shape: tuple[int, int], device: torch.device, seed: int | None) -> Certificate:
        """With a fresh b from 128 bits of the operating system's entropy, or a reproducible one from ``seed``.

        NumPy draws it: PyTorch's CPU generator is started from 32 bits, which can be tried out.
        """
        drawn_CE = torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))
        return cls(noise_std, (noise_std * drawn_CE).to(device), 0.0, seed is not None)

    def as_json(self) -> dict[str, Any]:
        """All but b."""
        return {"noise_std": self.noise_std, "residual_bound": self.residual_bound, "seeded": self.seeded}

    @classmethod
    def from_json(cls, about: Mapping[str, Any], noise_CE: Tensor) -> Certificate:
        """What :meth:`as_json` wrote; before it said ``seeded``, every b was."""
        return cls(float(about["noise_std"]), noise_CE, about["residual_bound"], bool(about.get("seeded", True)))
