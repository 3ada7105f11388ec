r"""Losses that autograd can differentiate by the parameters, for methods that descend on them.

They are the head's own: :math:`\sum_i v_i\, l(f(x_i; w), y_i) / \sum_i v_i` with the row weights v of its loss, and its
regulariser. Since f is ``head.outputs``, nothing here depends on the shape of the parameters.

Shapes: B rows, D features, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sfu.errors import SourceFreeError
from sfu.heads.base import Head
from sfu.lazy import torch
from sfu.request import ForgetRequest, Retained

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 256
"""Rows that are checked at a time."""


@dataclass(frozen=True)
class Labelled:
    """Rows with labels and, where the head was trained with them, sample weights."""

    features_ND: Tensor
    labels_N: Tensor
    weights_N: Tensor | None

    @property
    def count(self) -> int:
        return self.labels_N.shape[0]

    def at(self, index: Tensor) -> Labelled:
        """Return some of the rows."""
        index = index.to(self.labels_N.device)  # index_select: several times as fast as brackets
        return Labelled(
            self.features_ND.index_select(0, index),
            self.labels_N.index_select(0, index),
            None if self.weights_N is None else self.weights_N.index_select(0, index),
        )


def forgotten(request: ForgetRequest) -> Labelled:
    """Return the rows to forget, in the dtype of the head."""
    return Labelled(request.features_FD.to(request.head.parameters_CE), request.labels_F, request.weights_F)


def remaining(retained: Retained, request: ForgetRequest, method: str) -> Labelled:
    """Return the retained rows, on the head's device.

    Raises:
        SourceFreeError: No retained data were given.
    """
    if retained is None:
        raise SourceFreeError(f"{method} needs the retained data.")
    device, weights_R = request.features_FD.device, retained.weights_R
    return Labelled(
        retained.features_RD.to(device),
        retained.labels_R.to(device),
        None if weights_R is None else weights_R.to(device),
    )


def together(first: Labelled, second: Labelled) -> Labelled:
    """Return the rows of both, without their sample weights."""
    return Labelled(
        torch.cat([first.features_ND.to(second.features_ND), second.features_ND]),
        torch.cat([first.labels_N, second.labels_N]),
        None,
    )


def mean_loss(head: Head, parameters_CE: Tensor, rows: Labelled) -> Tensor:
    """Return the weighted mean of the head's loss over rows, without the regulariser."""
    outputs_BC = head.outputs(rows.features_ND, parameters_CE)
    values_B = head.loss.values(outputs_BC, rows.labels_N).sum(-1)
    weight_B = head.loss.row_weights(rows.labels_N, rows.weights_N, values_B.dtype)
    return values_B.mean() if weight_B is None else (weight_B @ values_B) / weight_B.sum()


def regularizer(head: Head, parameters_CE: Tensor) -> Tensor:
    """Return ``l2/2 |w|^2`` over the regularised parameters."""
    return 0.5 * head.l2 * (parameters_CE.square() * head.regularized_E).sum()


def all_wrong(head: Head, parameters_CE: Tensor, features_FD: Tensor, labels_F: Tensor) -> bool:
    """Whether the head errs on every row; stops at the first rows where it does not."""
    with torch.no_grad():
        return not any(
            bool((head.outputs(part_BD, parameters_CE).argmax(1) == labels_B).any())
            for part_BD, labels_B in zip(features_FD.split(_ROWS), labels_F.split(_ROWS), strict=True)
        )


def wrong_labels(labels_N: Tensor, n_classes: int, generator: torch.Generator) -> Tensor:
    """Draw for each row one of the ``n_classes - 1`` other classes, uniformly."""
    shift_N = torch.randint(1, n_classes, labels_N.shape, generator=generator).to(labels_N.device)
    return (labels_N + shift_N) % n_classes
