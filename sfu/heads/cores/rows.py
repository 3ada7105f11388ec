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

from sfu.heads.cores.core import Core
from sfu.losses.base import Loss
from sfu.losses.chunks import Chunk
from sfu.losses.rows import Rows

_PROBES = 16
_ROW_PROBES = 32
CHUNK_ROWS = 8192


@dataclass(frozen=True)
class TangentChunk(Chunk):
    """Activations that enter the linearised layers; products with the Jacobian are computed anew every time."""

    features_BD: Tensor
    core: Core

    def outputs(self, parameters: Tensor) -> Tensor:
        return self.core.push(self.features_BD, parameters, affine=True)

    def push(self, vectors: Tensor) -> Tensor:
        return self.core.push(self.features_BD, vectors)

    def pull(self, cotangent: Tensor) -> Tensor:
        return self.core.pull(self.features_BD, cotangent)

    def squares(self, cotangent_BC: Tensor) -> float:
        """Estimate it: the mean of ``|sum_i +- J_i^T b_i|^2`` over random signs, always the same ones."""
        generator, total = torch.Generator().manual_seed(0), 0.0
        for _ in range(_PROBES):
            signs_B = torch.randint(0, 2, (cotangent_BC.shape[0],), generator=generator).to(cotangent_BC) * 2 - 1
            total += float(self.pull(cotangent_BC * signs_B[:, None]).square().sum()) / _PROBES
        return total

    def squares_of_rows(self) -> Tensor:
        """Estimate it: the mean of ``|J_i v|^2`` over vectors v of random signs, always the same ones."""
        generator, total_B = torch.Generator().manual_seed(0), torch.zeros_like(self.share_B)
        for _ in range(_ROW_PROBES):
            signs_1P = torch.randint(0, 2, (1, self.core.n_parameters), generator=generator, dtype=torch.int8)
            pushed_BC = self.push((2 * signs_1P - 1).to(self.share_B))
            total_B += pushed_BC.square().sum(1) / _ROW_PROBES
        return total_B


class TangentRows(Rows):
    """A labelled set of activations; a chunk is a whole number of the core's batches."""

    def __init__(
        self,
        features_ND: Tensor,
        labels_N: Tensor,
        loss: Loss,
        core: Core,
        *,
        chunk_rows: int = CHUNK_ROWS,
        **options: Any,
    ) -> None:
        """Take the options of the base class; nothing is cached, and the only biases are the network's own."""
        whole_batches = core.batch_size * max(1, chunk_rows // core.batch_size)
        options |= {"bias": False, "cache": False, "chunk_rows": whole_batches}
        super().__init__(features_ND, labels_N, loss, **options)
        self.core, self.width, self.shared = core, core.n_parameters, True

    def joined(self, others: Sequence[Rows], coefficients: Sequence[float]) -> TangentRows:
        """Join several sets, so that vectors are converted once for all of them."""
        sets = [self, *others]
        shares = [coefficient * rows.shares_N for rows, coefficient in zip(sets, coefficients, strict=True)]
        twin = copy(self)
        twin.features_ND = torch.cat([rows.features_ND for rows in sets])
        twin.labels_N = torch.cat([rows.labels_N for rows in sets])
        twin.weights_N, twin.factors_N = torch.cat([share.to(twin.labels_N.device) for share in shares]), None
        twin.count, twin.weight, twin.progress = twin.labels_N.shape[0], 1.0, None
        return twin

    @property
    def precision(self) -> torch.dtype:
        """Dtype of the passes through the network, if it is the coarser one."""
        return self.core.dtype if torch.finfo(self.core.dtype).bits < torch.finfo(self.dtype).bits else self.dtype

    def _chunk(self, features_BD: Tensor, labels_B: Tensor, share_B: Tensor) -> Chunk:
        return TangentChunk(labels_B, share_B, features_BD.to(self.device), self.core)
