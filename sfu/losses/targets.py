"""Read the labels of a head: class numbers, or targets where no class number describes a row.

Rows have targets if several classes or none may be right (multi-label), if the head has a single output (a binary
classifier), or if the numbers themselves are what was fitted (regression). Which it is follows from the head and from
the shape of the labels, never from their number type.

Shapes: N rows, C outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfu.data.labels import is_one_hot, label_problem
from sfu.errors import DataError
from sfu.lazy import torch
from sfu.losses.base import Loss, Targets

if TYPE_CHECKING:
    from torch import Tensor

_SUM = 1e-4
"""How far shares may be from a sum of 1, which those in float32 are not exactly."""


def class_numbers(labels: Tensor, n_outputs: int) -> Tensor:
    """Return class numbers for one-hot rows ``[N, C]`` of at least two classes, and other labels as they are."""
    if labels.ndim == 2 and 1 < n_outputs == labels.shape[1] and not labels.is_complex() and is_one_hot(labels):
        return labels.long().argmax(1)
    return labels


def read_labels(labels: Tensor, n_rows: int, n_outputs: int, loss: Loss, whose: str = "forget") -> Tensor:
    """Return class numbers, int64 ``[N]``, or targets, float64 ``[N, C]``, of a head's rows.

    A head of one output has targets ``[N, 1]``, which may be given as ``[N]``. Where a loss knows two targets for each
    output, -1 stands for the 0 of the other rows, if only -1 and 1 are given.

    Args:
        labels: The labels, of any dtype.
        n_rows: N.
        n_outputs: C.
        loss: The head's loss.
        whose: Which rows they belong to, for messages.

    Raises:
        DataError: They are neither, or targets that the loss cannot have; the message says what to give.
    """
    has_width = labels.ndim == 2 and labels.shape[1] == n_outputs
    if labels.shape[:1] == (n_rows,) and (has_width or (n_outputs == 1 and labels.ndim == 1)):
        return _targets(labels.reshape(n_rows, n_outputs), loss, f"the {whose} targets")
    if n_outputs == 1:
        raise DataError(
            f"the {whose} labels have shape {list(labels.shape)}, but the head has one output. Give [{n_rows}] or "
            f"[{n_rows}, 1], one target for each row of features."
        )
    targets = f"targets [{n_rows}, {n_outputs}], one for each output"
    if labels.ndim == 2 and labels.shape[1] > 1:
        raise DataError(
            f"the {whose} labels have shape {list(labels.shape)}, but the head has {n_outputs} outputs. Give "
            f"[{n_rows}], one class index for each row of features, or {targets}."
        )
    if (problem := label_problem(labels, n_rows)) is not None:
        real = f" If they are targets of a regression, give {targets}." if loss.targets is Targets.real else ""
        raise DataError(f"the tensor of {whose} labels {problem}{real}")
    if int(labels.min()) < 0 or int(labels.max()) >= n_outputs:
        raise DataError(
            f"the {whose} labels run from {int(labels.min())} to {int(labels.max())}, but the head has classes "
            f"0 .. {n_outputs - 1}."
        )
    return labels.to(torch.int64)


def _targets(given_NC: Tensor, loss: Loss, what: str) -> Tensor:
    if given_NC.is_complex():
        raise DataError(f"{what} are {given_NC.dtype}. Give real numbers.")
    targets_NC = given_NC.double()
    finite_N = torch.isfinite(targets_NC).all(1)
    if not finite_N.all():
        raise DataError(
            f"{what} have NaN or infinite values in {int((~finite_N).sum())} of {len(finite_N)} rows (first: row "
            f"{int(finite_N.int().argmin())}). Remove or repair those rows."
        )
    kind = loss.targets
    if kind is Targets.real:
        return targets_NC
    if kind is not Targets.distribution and bool((targets_NC.abs() == 1).all()):
        targets_NC = (targets_NC + 1) / 2  # -1 and 1
    wrong_NC = targets_NC < 0
    if kind is Targets.binary:
        wrong_NC = (targets_NC != 0) & (targets_NC != 1)
    elif kind is Targets.shares:
        wrong_NC |= targets_NC > 1
    if bool(wrong_NC.any()):
        row, output = wrong_NC.nonzero()[0].tolist()
        raise DataError(
            f"{what} hold {float(targets_NC[row, output]):.6g} (row {row}, output {output}), which loss={loss.name} "
            f"cannot have. Give {kind.value}{_OTHERWISE[kind]}."
        )
    sums_N = targets_NC.sum(1)
    if kind is Targets.distribution and bool(((sums_N - 1).abs() > _SUM).any()):
        row = int((sums_N - 1).abs().argmax())
        raise DataError(
            f"{what} of row {row} sum to {float(sums_N[row]):.6g}, but loss={loss.name} needs shares that sum to 1. "
            "Give such shares, or make the head with loss='logistic' if it was trained with binary cross-entropy."
        )
    return targets_NC


_REAL = ", or make the head with loss='quadratic', without settings, if its targets were real numbers"
_OTHERWISE = {Targets.binary: _REAL, Targets.shares: _REAL, Targets.distribution: ""}
