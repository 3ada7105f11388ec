"""Train a head that later requests can be served from, in one call.

Shapes: N rows, D features.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from sfu.arrays import Array, as_tensor, first_not_finite, numbered, values_of
from sfu.data.labels import label_problem
from sfu.distributed import Ranks
from sfu.errors import ConfigError, DataError, SfuError
from sfu.heads.linear import LinearHead
from sfu.heads.settings import Keep, LinearSettings
from sfu.heads.train import train_head
from sfu.losses.base import Loss, as_loss
from sfu.losses.targets import class_numbers

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    Names = tuple[str, ...] | None


def fit(
    features: Array,
    labels: Array,
    *,
    l2: float,
    loss: Loss | str,
    bias: bool = True,
    keep: str = "bound",
    weights: Array | None = None,
    classes: Sequence[str] | None = None,
    ledger: bool = False,
    tolerance: float = 1e-8,
    group: ProcessGroup | Literal["world"] | None = None,
) -> LinearHead:
    """Train a linear head to the optimum of ``mean loss + l2/2 |W|^2``, in float64.

    Args:
        features: Feature rows ``[N, D]``, as for :func:`sfu.unlearn`.
        labels: Class numbers ``[N]``, one-hot rows, or names.
        l2: Weight of the regulariser, above 0 for losses that fall forever (logistic, softmax).
        loss: The loss or its name.
        bias: Whether there is a bias, which is not regularised.
        keep: What the head keeps of its training rows: ``bound``, ``sketch`` or ``full`` (docs/keep.md). With the full
            Hessian, later requests need no other row, but two such sums give away the row that only one of them holds.
        weights: Sample weights ``[N]``.
        classes: Names of the classes in their order; by default, those of the labels that are names, sorted.
        ledger: Whether it keeps sums over forgotten rows (:mod:`sfu.heads.ledger`; quadratic loss).
        tolerance: Gradient norm of the mean objective to reach.
        group: The processes that share the rows out among them: a group of ``torch.distributed``, or ``"world"`` for
            all processes. Each gives its own rows and gets the head of all rows (docs/distributed.md).

    Raises:
        DataError: The rows do not fit together, are empty or not finite, or a label is no class.
        ConfigError: A setting is out of range, of another type or not the same in all processes of the group, or what
            is to be kept does not fit the memory.
        SolverError: Training did not reach the optimum.
        RankError: Another process of the group has failed or died, or does something else.
    """
    ranks = None if group is None else Ranks(group)
    with nullcontext() if ranks is None else ranks.together():
        if keep not in [one.value for one in Keep]:
            raise ConfigError(f"keep={keep!r} is unknown. Choose 'bound', 'sketch' or 'full'.")
        own = names_of(labels)
        names = own if classes is None else tuple(classes)
        features_ND, weights_N = _read(features, weights, ranks)
        if ranks is not None:
            settings = {
                "loss": as_loss(loss).as_json(), "l2": l2, "bias": bias, "keep": keep, "classes": classes,
                "ledger": ledger, "tolerance": tolerance, "weights": weights is not None,
                "features": features_ND.shape[1],
                "labels": ("numbers" if own is None else "names") if len(features_ND) else None,
            }  # fmt: skip
            names = _agreed(settings, names, ranks)
        labels_N, n_classes = _read_labels(labels, names, len(features_ND), ranks)
        try:
            config = LinearSettings(l2=l2, bias=bias, keep=Keep(keep), ledger=ledger, tolerance=tolerance)
            head = train_head(
                features_ND, labels_N, n_classes, config, as_loss(loss), seed=0, dtype=torch.float64,
                device=torch.device("cpu") if ranks is None else ranks.device, weights_N=weights_N, ranks=ranks,
            )  # fmt: skip
        except SfuError as error:  # settings have other names in an experiment
            raise type(error)(re.sub(r"\bhead\.(?=[a-z])", "", str(error))) from error
    assert isinstance(head, LinearHead)
    return replace(head, recipe=replace(head.recipe, classes=names)).to(torch.device("cpu"))


def _read(features: Array, weights: Array | None, ranks: Ranks | None) -> tuple[Tensor, Tensor | None]:
    """Return features ``[N, D]`` and weights as tensors; a process of several may have no rows."""
    features_ND = as_tensor(features, "features")
    weights_N = None if weights is None else as_tensor(weights, "weights")
    for name, tensor in (("features", features_ND), ("weights", weights_N)):
        if tensor is not None and tensor.is_complex():
            raise DataError(f"the {name} are complex numbers, and a head is fitted to real ones. Give real numbers.")
    shape = list(features_ND.shape)
    if features_ND.ndim != 2 or shape[1] == 0 or (shape[0] == 0 and ranks is None):
        raise DataError(f"the features have shape {shape}. Give at least one row [N, D].")
    if (row := first_not_finite(features_ND)) is not None:
        raise DataError(f"the features have NaN or infinite values, first in row {row}. Remove or repair those rows.")
    return features_ND, weights_N


def _read_labels(labels: Array, names: Names, n_rows: int, ranks: Ranks | None) -> tuple[Tensor, int]:
    """Return class numbers ``[N]``, and the number of classes, those of the rows of other processes included."""
    labels_N = torch.zeros(0, dtype=torch.int64)
    if n_rows or values_of(labels):  # an empty list has no dtype of class numbers
        given = as_tensor(numbered(labels, names), "labels")
        labels_N = class_numbers(given, given.shape[-1] if given.ndim == 2 else 1)
    if (problem := label_problem(labels_N, n_rows)) is not None:
        raise DataError(f"the tensor of labels {problem}")
    lowest, highest = (int(labels_N.min()), int(labels_N.max())) if n_rows else (0, -1)
    if ranks is not None:
        told = ranks.exchange({"rows": n_rows, "lowest": lowest, "highest": highest})
        n_rows = sum(one["rows"] for one in told)
        lowest, highest = min(one["lowest"] for one in told), max(one["highest"] for one in told)
        if not n_rows:
            raise DataError("no process of the group has a row. Give at least one of them rows to train on.")
    n_classes = max(highest + 1, len(names or ()), 2)
    if lowest < 0 or (names is not None and n_classes > len(names)):
        raise DataError(f"the labels run from {lowest} to {n_classes - 1}. Number the classes from 0.")
    if names is None and n_classes > max(2, n_rows):
        raise DataError(
            f"the labels reach {n_classes - 1}, but there are {n_rows} rows, so most classes would have none. Number "
            "the classes from 0 without gaps, or name all of them in classes=."
        )
    return labels_N.long(), n_classes


def _agreed(settings: Mapping[str, Any], names: Names, ranks: Ranks) -> Names:
    """Return the class names of all processes, sorted unless they were given in an order.

    Raises:
        ConfigError: A setting is not the same in all of them; a process without rows may have any labels.
    """
    told = ranks.exchange({**settings, "names": names})
    for name in settings:
        values = {rank: one[name] for rank, one in enumerate(told) if name != "labels" or one[name] is not None}
        first = next(iter(values), 0)
        for rank, value in values.items():
            if value != values[first]:
                raise ConfigError(
                    f"the processes of the group differ in {name}: rank {first} has {values[first]} and rank {rank} "
                    f"has {value}. Give all of them the same."
                )
    found = {name for one in told for name in one["names"] or ()}
    return names if settings["classes"] is not None else tuple(sorted(found)) or None


def names_of(labels: Any) -> tuple[str, ...] | None:
    """Return the names that labels hold, sorted; ``None`` if they are numbers.

    Raises:
        DataError: Some labels are names, and others are not.
    """
    values = values_of(labels)
    found = {one for one in values if isinstance(one, str)}
    if found and not all(isinstance(one, str) for one in values):
        row = next(row for row, one in enumerate(values) if not isinstance(one, str))
        raise DataError(f"label {row} is {values[row]!r}, where others are names. Give the name of its class.")
    return tuple(sorted(found)) or None
