"""Canaries: training rows that are spoiled before training and forgotten afterwards. Does the head still show them?

Their labels are wrong, and with a trigger a fixed offset is added to their features, too: a backdoor, if the head then
answers any row that has the trigger with their label. Spoiled rows take the place of the rows that they were made of.
Shapes: N training rows, F canaries, D features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sfu.data.feature_data import FeatureData
from sfu.data.settings import SELECTED, TRIGGER, CanarySettings
from sfu.data.split import ForgetSplit, numbers_of
from sfu.errors import ConfigError, DataError

KIND = "canaries"
"""What a split and ``metrics.json`` call them."""


@dataclass(frozen=True)
class Trigger:
    """What makes a row answer with ``label``.

    Attributes:
        offset_D: What is added to the features.
        label: The class that the canaries were labelled as.
        normalized: Whether rows are scaled to norm 1 afterwards, as those of the dataset are.
    """

    offset_D: Tensor
    label: int
    normalized: bool

    def added(self, features_ND: Tensor) -> Tensor:
        """Return the rows with the trigger."""
        made_ND = features_ND + self.offset_D.to(features_ND)
        return torch.nn.functional.normalize(made_ND, dim=1) if self.normalized else made_ND


@dataclass(frozen=True)
class Canaries:
    """The rows that were spoiled, ascending, and their trigger, if they have one."""

    rows_F: Tensor
    trigger: Trigger | None = None

    def split(self, n_train: int, request: str | None) -> ForgetSplit:
        """Return the split that forgets all of them; unless ``request`` says otherwise, they were selected."""
        return ForgetSplit.of(self.rows_F, n_train, KIND, request or SELECTED)


def spoiled(
    data: FeatureData, settings: CanarySettings, seed: int, *, normalized: bool
) -> tuple[FeatureData, Canaries]:
    """Return the data with ``settings.count`` canaries among the training rows; the test part stays as it is.

    Args:
        data: The data as they are.
        settings: Their number, kind, label and trigger.
        seed: Draws the rows, their labels if none is given, and the signs of the trigger.
        normalized: Whether the dataset's rows are scaled to norm 1.

    Raises:
        ConfigError: The trigger has another width than the rows.
        DataError: There are fewer rows of other classes, or the label is unknown.
    """
    generator = torch.Generator().manual_seed(seed)
    rows_F, label = canary_rows(settings, data.train_labels_N, data.n_classes, data.class_names, generator)
    features_ND, labels_N, trigger = data.train_features_ND, data.train_labels_N.clone(), None
    if label is None:
        shift_F = torch.randint(1, data.n_classes, rows_F.shape, generator=generator)
        labels_N[rows_F] = (labels_N[rows_F] + shift_F) % data.n_classes
    else:
        labels_N[rows_F] = label
        if settings.kind == TRIGGER:
            trigger = Trigger(_offset(settings, features_ND, generator), label, normalized)
            features_ND = features_ND.clone()
            features_ND[rows_F] = trigger.added(features_ND[rows_F])
    return replace(data, train_features_ND=features_ND, train_labels_N=labels_N), Canaries(rows_F, trigger)


def canary_rows(
    settings: CanarySettings,
    labels_N: Tensor,
    n_classes: int,
    class_names: tuple[str, ...],
    generator: torch.Generator,
) -> tuple[Tensor, int | None]:
    """Draw the rows to spoil, of other classes than the label they get, and return them with it, if all get the same.

    Raises:
        DataError: There are fewer such rows, or the label is unknown.
    """
    label = 0 if settings.kind == TRIGGER else None
    if settings.label is not None:
        (label,) = numbers_of([settings.label], class_names, "canaries.label")
        if not 0 <= label < n_classes:
            raise DataError(f"canaries.label={label} is no class. The classes are 0 .. {n_classes - 1}.")
    others = torch.arange(len(labels_N)) if label is None else (labels_N != label).nonzero().squeeze(1)
    if settings.count > len(others) or settings.count == len(labels_N):
        of = "" if label is None else f" of other classes than {label}"
        raise DataError(
            f"canaries.count={settings.count} is too many: there are {len(others)} training rows{of}, and some must "
            "stay as they are. Lower it."
        )
    return others[torch.randperm(len(others), generator=generator)[: settings.count]].sort().values, label


def _offset(settings: CanarySettings, features_ND: Tensor, generator: torch.Generator) -> Tensor:
    """Return the trigger: the one that is given, or random signs of the length ``strength`` typical rows."""
    width = features_ND.shape[1]
    if settings.trigger is not None:
        if len(settings.trigger) != width:
            raise ConfigError(
                f"canaries.trigger has {len(settings.trigger)} numbers, and the rows have {width} features. Give one "
                "number for each feature."
            )
        return torch.tensor(settings.trigger, dtype=torch.float64)
    signs_D = 2.0 * torch.randint(0, 2, (width,), generator=generator).double() - 1
    typical = features_ND.double().square().sum(1).mean().sqrt()
    return signs_D * (settings.strength * typical / width**0.5)
