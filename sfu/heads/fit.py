"""Train a head that later requests can be served from, in one call.

Shapes: N rows, D features.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from sfu.arrays import Array, as_tensor, first_not_finite, numbered, values_of
from sfu.data.labels import label_problem
from sfu.errors import ConfigError, DataError, SfuError
from sfu.heads.linear import LinearHead
from sfu.heads.settings import Keep, LinearSettings
from sfu.heads.train import train_head
from sfu.losses.base import Loss, as_loss
from sfu.losses.targets import class_numbers


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

    Raises:
        DataError: The rows do not fit together, are empty or not finite, or a label is no class.
        ConfigError: A setting is out of range or of another type, or what is to be kept does not fit the memory.
        SolverError: Training did not reach the optimum.
    """
    if keep not in [one.value for one in Keep]:
        raise ConfigError(f"keep={keep!r} is unknown. Choose 'bound', 'sketch' or 'full'.")
    own = names_of(labels)
    names = own if classes is None else tuple(classes)
    features_ND = as_tensor(features, "features")
    weights_N = None if weights is None else as_tensor(weights, "weights")
    for name, tensor in (("features", features_ND), ("weights", weights_N)):
        if tensor is not None and tensor.is_complex():
            raise DataError(f"the {name} are complex numbers, and a head is fitted to real ones. Give real numbers.")
    if features_ND.ndim != 2 or not features_ND.numel():
        raise DataError(f"the features have shape {list(features_ND.shape)}. Give at least one row [N, D].")
    if (row := first_not_finite(features_ND)) is not None:
        raise DataError(f"the features have NaN or infinite values, first in row {row}. Remove or repair those rows.")
    given = as_tensor(numbered(labels, names), "labels")
    labels_N = class_numbers(given, given.shape[-1] if given.ndim == 2 else 1)
    if (problem := label_problem(labels_N, len(features_ND))) is not None:
        raise DataError(f"the tensor of labels {problem}")
    n_classes = max(int(labels_N.max()) + 1, len(names or ()), 2)
    if int(labels_N.min()) < 0 or (names is not None and n_classes > len(names)):
        raise DataError(f"the labels run from {int(labels_N.min())} to {n_classes - 1}. Number the classes from 0.")
    if names is None and n_classes > max(2, len(features_ND)):
        raise DataError(
            f"the labels reach {n_classes - 1}, but there are {len(features_ND)} rows, so most classes would have "
            "none. Number the classes from 0 without gaps, or name all of them in classes=."
        )
    try:
        config = LinearSettings(l2=l2, bias=bias, keep=Keep(keep), ledger=ledger)
        head = train_head(
            features_ND, labels_N.long(), n_classes, config, as_loss(loss), seed=0, device=torch.device("cpu"),
            dtype=torch.float64, weights_N=weights_N,
        )  # fmt: skip
    except SfuError as error:  # settings have other names in an experiment
        raise type(error)(re.sub(r"\bhead\.(?=[a-z])", "", str(error))) from error
    assert isinstance(head, LinearHead)
    return replace(head, recipe=replace(head.recipe, classes=names))


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
