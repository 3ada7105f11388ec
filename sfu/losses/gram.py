r"""Sums over rows of outer products, :math:`\sum_i s_i a_i a_i^T`, at little more than the cost of one triangle.

On a CPU only panels of columns from the diagonal on are multiplied, and the other triangle is a copy: a third less work
than the whole product. A GPU multiplies the whole.

Shapes: B rows, E columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_PANEL = 128  # fewest columns of a panel: narrower products are slow
_PANELS = 8


def panels(width: int) -> list[tuple[int, int]]:
    """Return the first column of each panel and the one after its last."""
    panel = max(_PANEL, -(-width // _PANELS))
    return [(first, min(first + panel, width)) for first in range(0, width, panel)]


def add_gram(total_EE: Tensor, rows_BE: Tensor, scaled_BE: Tensor | None = None, *, alpha: float = 1.0) -> None:
    """Add ``alpha A^T diag(s) A`` to a symmetric matrix, in place; ``scaled_BE`` is ``diag(s) A``, by default A."""
    scaled_BE = rows_BE if scaled_BE is None else scaled_BE
    width = len(total_EE)
    for first, last in panels(width) if total_EE.device.type == "cpu" else [(0, width)]:
        total_EE[first:last, first:].addmm_(rows_BE[:, first:last].T, scaled_BE[:, first:], alpha=alpha)
        total_EE[last:, first:last] = total_EE[first:last, last:].T
