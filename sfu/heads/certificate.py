"""What certified removal needs to know of a head trained with objective perturbation.

Shapes: C classes, E = D features (no bias).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sfu.errors import ArtifactError, DataError
from sfu.files import SECRET
from sfu.lazy import torch
from sfu.readers import Above0, Record, Size

if TYPE_CHECKING:
    from torch import Tensor


class CertificateRecord(Record):
    """What a head's JSON file says of its certificate; before ``seeded`` was written, every b came from a seed."""

    noise_std: Above0
    residual_bound: Size | None
    seeded: bool = True


@dataclass(frozen=True)
class Certificate:
    """The noise of a head, and how much of the budget is spent (:mod:`sfu.unlearning.methods.certified_removal`).

    Attributes:
        noise_std: Standard deviation of the entries of b.
        secret_CE: The b of the term ``<b, W>`` that was added to the *sum* objective in training. The guarantee is for
            those who see the weights and not b. It is ``None`` if the head was read without its secret file.
        residual_bound: Upper bound on the gradient norm of the perturbed sum objective, accumulated over removals;
            ``None`` once another method has moved the head.
        seeded: Whether b was drawn from a seed. Nothing is certified to whoever knows the seed.
    """

    noise_std: float
    secret_CE: Tensor | None = field(repr=False)
    residual_bound: float | None
    seeded: bool = False

    def __post_init__(self) -> None:
        """Raise :class:`DataError` unless the deviation is above 0, and the bound at least 0 and finite."""
        if not (math.isfinite(self.noise_std) and self.noise_std > 0):
            raise DataError(f"noise_std={self.noise_std} certifies nothing. Give a finite number above 0.")
        bound = self.residual_bound
        if bound is not None and not (math.isfinite(bound) and bound >= 0):
            raise DataError(f"residual_bound={bound} bounds no norm. Give a finite number of at least 0, or None.")

    @property
    def noise_CE(self) -> Tensor:
        """The secret b.

        Raises:
            ArtifactError: The head was read without its secret file.
        """
        if self.secret_CE is None:
            raise ArtifactError(
                "the head was trained with head.objective_noise, and its noise is not here. Without it, the head can "
                f"classify but not be unlearned from. Put the file of its noise ({SECRET}) beside the head, where the "
                "run that trained it has left it."
            )
        return self.secret_CE

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Certificate:
        """Return it with its secret, if it is there, on another device or in another dtype."""
        return self if self.secret_CE is None else replace(self, secret_CE=self.secret_CE.to(device, dtype))

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
