"""Rows of a linearised network, as losses, training and curvature see them.

Shapes: N rows, B rows of a chunk, D numbers of an activation, C classes, p parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sfu.heads.linearised.core import Core
from sfu.losses.base import Loss
from sfu.losses.chunks import Chunk
from sfu.losses.rows import Rows

_PROBES = 16
CHUNK = 8192


@dataclass(frozen=True)
class TangentChunk(Chunk):
    """Activations of some rows; products are made anew every time.

    Attributes:
        features_BD: Activations at the cut.
        core: The tangent.
    """

    features_BD: Tensor
    core: Core

    def outputs(self, parameters: Tensor) -> Tensor:
        """``f_c + J w``."""
        return self.core.push(self.features_BD, parameters, affine=True)

    def push(self, vectors: Tensor) -> Tensor:
        """``J v``."""
        return self.core.push(self.features_BD, vectors)

    def pull(self, bent: Tensor) -> Tensor:
        """``J^T b``."""
        return self.core.pull(self.features_BD, bent)

    def squares(self, bent_BC: Tensor) -> float:
        """An estimate: the mean of ``|sum_i +- J_i^T b_i|^2`` over random signs, always the same ones."""
        drawn, total = torch.Generator().manual_seed(0), 0.0
        for _ in range(_PROBES):
            signs_B = torch.randint(0, 2, (bent_BC.shape[0],), generator=drawn).to(bent_BC) * 2 - 1
            total += float(self.pull(bent_BC * signs_B[:, None]).square().sum()) / _PROBES
        return total


class TangentRows(Rows):
    """A labelled set of activations; a chunk is some batches of the core."""

    def __init__(self, features_ND: Tensor, labels_N: Tensor, loss: Loss, core: Core, **options: Any) -> None:
        """See the base; there is no bias apart from the network's own."""
        super().__init__(features_ND, labels_N, loss, bias=False, **options | {"keep": False})
        self.core, self.width, self.shared = core, core.n_parameters, True

    def joined(self, others: Sequence[Rows], coefficients: Sequence[float]) -> TangentRows:
        """One set for several, each row's share times its set's coefficient: vectors are converted once for all."""
        sets = [self, *others]
        shares = [
            coefficient / rows.weight * (torch.ones(rows.count) if rows.weights_N is None else rows.weights_N).double()
            for rows, coefficient in zip(sets, coefficients, strict=True)
        ]
        twin = copy(self)
        twin.features_ND = torch.cat([rows.features_ND for rows in sets])
        twin.labels_N = torch.cat([rows.labels_N for rows in sets])
        twin.weights_N = torch.cat([share.to(twin.labels_N.device) for share in shares])
        twin.count, twin.weight, twin.progress = twin.labels_N.shape[0], 1.0, None
        return twin

    def parameters(self, n_classes: int) -> Tensor:
        """Zeros ``[1, p]``: the core's own outputs."""
        return torch.zeros(1, self.width, device=self.device, dtype=self.dtype)

    @property
    def precision(self) -> torch.dtype:
        """That of the passes, if it is the coarser one."""
        return self.core.dtype if torch.finfo(self.core.dtype).bits < torch.finfo(self.dtype).bits else self.dtype

    @property
    def step(self) -> int:
        """A whole number of batches, so that vectors are converted once for many of them."""
        return self.core.batch_size * max(1, CHUNK // self.core.batch_size)

    def _chunk(self, features_BD: Tensor, labels_B: Tensor, share_B: Tensor) -> Chunk:
        return TangentChunk(labels_B, share_B, features_BD.to(self.device), self.core)
