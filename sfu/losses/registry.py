"""Make a loss from its name and parameters: from the configuration, from a saved head, or from Python.

A new loss is one file in this folder with one subclass of :class:`~sfu.losses.base.Loss`, an entry here, and one yaml
in ``configs/loss``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sfu.errors import ConfigError
from sfu.losses.base import Loss
from sfu.losses.huber_hinge import HuberHinge
from sfu.losses.logistic import Logistic
from sfu.losses.quadratic import Quadratic
from sfu.losses.softmax import Softmax

if TYPE_CHECKING:
    from sfu.settings import LossConfig

_LOSSES: dict[str, type[Loss]] = {kind.name: kind for kind in (Quadratic, Logistic, Softmax, HuberHinge)}


def loss_names() -> list[str]:
    """Names of the losses sfu has."""
    return sorted(_LOSSES)


def make_loss(name: str, **parameters: Any) -> Loss:
    """The loss ``name`` with its own parameters.

    Raises:
        ConfigError: The name is unknown, or the loss has no such parameter.
    """
    if name not in _LOSSES:
        raise ConfigError(f"loss.name={name} is unknown; it can be {', '.join(loss_names())}.")
    kind = _LOSSES[name]
    accepted = [field.name for field in fields(kind)]
    unknown = sorted(set(parameters) - set(accepted))
    if unknown:
        raise ConfigError(f"loss.{unknown[0]} is no setting of the {name} loss; it takes {', '.join(accepted)}.")
    if parameters.get("class_weights") is not None:
        parameters["class_weights"] = tuple(float(weight) for weight in parameters["class_weights"])
    return kind(**parameters)


def loss_from_config(config: LossConfig, labels_N: Tensor, n_classes: int) -> Loss:
    """The configured loss for these training labels; ``balanced`` class weights are counted from them.

    Raises:
        ConfigError: An unknown name, or class weights that do not fit.
    """
    kind = _LOSSES.get(config.name)
    own = {} if kind is None else {field.name for field in fields(kind)} - {"class_weights"}
    weights = class_weights(config.class_weights, labels_N, n_classes)
    return make_loss(config.name, class_weights=weights, **{key: getattr(config, key) for key in own})


def class_weights(given: Any, labels_N: Tensor, n_classes: int) -> tuple[float, ...] | None:
    """``null``, a list of C numbers, or ``balanced``: ``N / (C n_c)``, so that every class weighs the same.

    Raises:
        ConfigError: Another value, or a list of another length.
    """
    if given is None:
        return None
    if given == "balanced":
        counts = torch.bincount(labels_N, minlength=n_classes).clamp(min=1).tolist()
        return tuple(labels_N.numel() / (n_classes * count) for count in counts)
    weights = _numbers(given)
    if len(weights) != n_classes:
        raise ConfigError(f"loss.class_weights={list(weights)} has {len(weights)} entries for {n_classes} classes.")
    return weights


def check_class_weights(given: Any) -> None:
    """Refuse what cannot be class weights for any number of classes.

    Raises:
        ConfigError: Neither ``null`` nor ``balanced`` nor a list of finite numbers above 0.
    """
    if given is not None and given != "balanced":
        make_loss(Quadratic.name, class_weights=_numbers(given))


def _numbers(given: Any) -> tuple[float, ...]:
    wanted = "null, balanced or a list of numbers, one for every class, is needed"
    if isinstance(given, str | Mapping) or not hasattr(given, "__iter__"):
        raise ConfigError(f"loss.class_weights={given}; {wanted}.")
    try:
        return tuple(float(weight) for weight in given)
    except (TypeError, ValueError):
        raise ConfigError(f"loss.class_weights={list(given)}; {wanted}.") from None


def loss_from_json(about: Mapping[str, Any]) -> Loss:
    """The loss that :meth:`~sfu.losses.base.Loss.as_json` described.

    Raises:
        ConfigError: It describes none that this sfu has.
    """
    parameters = {str(key): value for key, value in about.items() if key != "name"}
    return make_loss(str(about.get("name")), **parameters)
