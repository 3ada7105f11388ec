"""Checks of settings that the type system cannot make, shared by the command line and the Python API."""

from __future__ import annotations

import math

from sfu.data.features.augment import check_augmentations
from sfu.errors import ConfigError
from sfu.settings import CurvatureConfig, Estimator, Pairs, Regularization


def validate_curvature(config: CurvatureConfig, where: str) -> None:
    """Check the curvature settings of one row; ``where`` prefixes the messages.

    Raises:
        ConfigError: Naming the key, the value and what is accepted.
    """
    least = 2 if config.pairs is Pairs.antithetic else 1
    if config.perturbations is not None:
        at_least(f"{where}curvature.perturbations", config.perturbations, least)
    if config.scale is not None:
        above(f"{where}curvature.scale", config.scale, 0.0)
    above(f"{where}curvature.prior_strength", config.prior_strength, 0.0)
    between(f"{where}curvature.tolerance", config.tolerance, 0.0, 1.0)
    if config.max_iterations is not None:
        at_least(f"{where}curvature.max_iterations", config.max_iterations, 1)
    at_least(f"{where}curvature.dimension", config.dimension, 1)
    at_least(f"{where}curvature.probes", config.probes, 1)
    at_least(f"{where}curvature.rho", config.rho, 0.0)
    if config.folds is not None and (config.folds == 1 or config.folds < 0):
        raise ConfigError(f"{where}curvature.folds={config.folds}; give 0 (no cross-validation) or at least 2.")
    if config.regularization is Regularization.cross_validated and config.folds == 0:
        raise ConfigError(
            f"{where}curvature.regularization=cross_validated needs curvature.folds of at least 2, not 0."
        )
    if config.reference_weight is not None and not 0.0 <= config.reference_weight <= 1.0:
        raise ConfigError(f"{where}curvature.reference_weight={config.reference_weight}; it must be between 0 and 1.")
    if config.estimator is Estimator.reference and config.reference_weight is None and config.folds == 0:
        raise ConfigError(f"{where}curvature.estimator=reference needs curvature.reference_weight or curvature.folds.")
    check_augmentations(config.augment, f"{where}curvature.augment")
    exact = config.estimator in (Estimator.exact, Estimator.stored, Estimator.hutchinson)
    if exact and config.regularization is Regularization.cross_validated:
        raise ConfigError(
            f"{where}curvature.estimator={config.estimator} needs no cross-validation: set "
            "curvature.regularization=none."
        )


def one_of(key: str, value: str, accepted: list[str]) -> None:
    """Refuse a value outside ``accepted``.

    Raises:
        ConfigError: Naming the key, the value and what is accepted.
    """
    if value not in accepted:
        raise ConfigError(f"{key}={value} is unknown; it can be {', '.join(accepted)}.")


def finite(key: str, value: float) -> None:
    """Refuse NaN, infinities and what is no number.

    Raises:
        ConfigError: Naming the key, the value and what is accepted.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{key}={value}; a finite number is needed.")


def whole(key: str, value: object, least: int) -> None:
    """Refuse what is no whole number of at least ``least``.

    Raises:
        ConfigError: Naming the key, the value and what is accepted.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{key}={value}; a whole number of at least {least} is needed.")


def at_least(key: str, value: float, least: float) -> None:
    """Refuse a value below ``least``.

    Raises:
        ConfigError: Naming the key, the value and what is accepted.
    """
    finite(key, value)
    if value < least:
        raise ConfigError(f"{key}={value}; it must be at least {least:g}.")


def above(key: str, value: float, bound: float) -> None:
    """Refuse a value at or below ``bound``.

    Raises:
        ConfigError: Naming the key, the value and what is accepted.
    """
    finite(key, value)
    if value <= bound:
        raise ConfigError(f"{key}={value}; it must be above {bound:g}.")


def between(key: str, value: float, low: float, high: float) -> None:
    """Refuse a value outside the open interval.

    Raises:
        ConfigError: Naming the key, the value and what is accepted.
    """
    finite(key, value)
    if not low < value < high:
        raise ConfigError(f"{key}={value}; it must be above {low:g} and below {high:g}.")
