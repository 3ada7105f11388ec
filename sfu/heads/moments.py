r"""Second moments of a labelled set: all that the quadratic loss of a linear head ever asks of it.

Shapes: N rows, D features, E = D (+ 1 with bias), C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_ROWS = 8192


@dataclass(frozen=True)
class Moments:
    """Means over ``count`` rows.

    Attributes:
        count: Number of rows.
        second_EE: Mean of ``a a^T`` over design rows a.
        cross_CE: Mean of ``onehot(label) a^T`` (targets of scale 1).
    """

    count: int
    second_EE: Tensor
    cross_CE: Tensor

    def hessian(self, l2: float, regularized_E: Tensor) -> Tensor:
        """Hessian block of the mean objective, ``second + l2 R``, ``[E, E]``."""
        return self.second_EE + torch.diag(l2 * regularized_E)

    def gradient(self, parameters_CE: Tensor, l2: float, regularized_E: Tensor, target_scale: float) -> Tensor:
        """Gradient of the mean objective, ``[C, E]``."""
        data_CE = parameters_CE @ self.second_EE - target_scale * self.cross_CE
        return data_CE + l2 * regularized_E * parameters_CE

    @staticmethod
    def merge(parts: Sequence[Moments]) -> Moments:
        """Moments of the union of disjoint sets."""
        count = sum(part.count for part in parts)
        return Moments(
            count,
            torch.stack([part.second_EE * (part.count / count) for part in parts]).sum(0),
            torch.stack([part.cross_CE * (part.count / count) for part in parts]).sum(0),
        )


def design_matrix(features_ND: Tensor, bias: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Feature rows on ``device`` in ``dtype``, with a trailing column of ones if ``bias``."""
    design = features_ND.to(device=device, dtype=dtype)
    if bias:
        design = torch.cat([design, design.new_ones(design.shape[0], 1)], dim=1)
    return design


def compute_moments(
    features_ND: Tensor,
    labels_N: Tensor,
    n_classes: int,
    *,
    bias: bool,
    device: torch.device,
    dtype: torch.dtype = torch.float64,
    rows: Tensor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Moments:
    """Stream rows in chunks, so that memory is bounded by E x E and one chunk, not by N.

    Args:
        features_ND: Features, any float dtype, on any device.
        labels_N: Class indices.
        n_classes: C.
        bias: Append a column of ones.
        device: Where to compute.
        dtype: Accumulation dtype.
        rows: Only these row numbers, ``None`` for all.
        progress: Called with (rows done, rows in all).
    """
    total = features_ND.shape[0] if rows is None else rows.shape[0]
    width = features_ND.shape[1] + int(bias)
    second = torch.zeros(width, width, device=device, dtype=dtype)
    cross = torch.zeros(n_classes, width, device=device, dtype=dtype)
    for start in range(0, total, CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, total)
        index = slice(start, stop) if rows is None else rows[start:stop]
        design = design_matrix(features_ND[index], bias, device, dtype)
        second.addmm_(design.T, design)
        cross.index_add_(0, labels_N[index].to(device), design)
        if progress is not None:
            progress(stop, total)
    return Moments(total, second / total, cross / total)
