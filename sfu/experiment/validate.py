"""Check a composed configuration before any work starts."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from sfu.data.load import dataset_names, source_files
from sfu.errors import ConfigError
from sfu.experiment.schema import Estimator, Pairs, Regularization, RunConfig

_DTYPES = {"float64": torch.float64, "float32": torch.float32}


def validate(config: RunConfig) -> None:
    """Refuse names and numbers that cannot work.

    Raises:
        ConfigError: Naming the key, the value and what is accepted.
    """
    _one_of("dataset.name", config.dataset.name, dataset_names())
    _one_of("backbone.name", config.backbone.name, ["none"])
    _one_of("head.name", config.head.name, ["linear"])
    _one_of("loss.name", config.loss.name, ["quadratic"])
    _one_of("logger.name", config.logger.name, ["none", "wandb"])
    _one_of("dtype", config.dtype, list(_DTYPES))
    source_files(config.dataset)  # refuses a missing or meaningless path
    indices = config.forget.indices
    if indices is not None and not Path(indices).expanduser().is_file():
        raise ConfigError(f"forget.indices={indices} is not a file (looked from {Path.cwd()}).")
    if config.dataset.n_classes is not None:
        _at_least("dataset.n_classes", config.dataset.n_classes, 2)
    if not config.methods:
        raise ConfigError("methods=[] leaves nothing to do; name at least one.")
    _at_least("head.l2", config.head.l2, 0.0)
    _above("loss.target_scale", config.loss.target_scale, 0.0)
    _between("dataset.test_fraction", config.dataset.test_fraction, 0.0, 1.0)
    _at_least("evaluation.membership_splits", config.evaluation.membership_splits, 2)
    adam = config.head.adam
    _above("head.adam.lr", adam.lr, 0.0)
    for key in ("batch_size", "max_epochs", "patience"):
        _at_least(f"head.adam.{key}", getattr(adam, key), 1)
    if config.forget.fraction is not None and not 0.0 < config.forget.fraction <= 1.0:
        raise ConfigError(f"forget.fraction={config.forget.fraction}; give a number above 0 and at most 1.")
    for key in ("seed", *(f"seeds.{k}" for k in vars(config.seeds))):
        value = config.seed if key == "seed" else getattr(config.seeds, key.split(".")[1])
        if value is not None:
            _between(key, value, -1, 2**32)
    if config.threads is not None:
        _at_least("threads", config.threads, 1)
    _at_least("newton.noise_sigma", config.newton.noise_sigma, 0.0)


def validate_curvature(config: object, where: str) -> None:
    """Check the curvature settings of one row; ``where`` prefixes the messages.

    Raises:
        ConfigError: Naming the key, the value and what is accepted.
    """
    from sfu.experiment.schema import CurvatureConfig

    assert isinstance(config, CurvatureConfig)
    least = 2 if config.pairs is Pairs.antithetic else 1
    _at_least(f"{where}curvature.perturbations", config.perturbations, least)
    _above(f"{where}curvature.scale", config.scale, 0.0)
    _above(f"{where}curvature.prior_strength", config.prior_strength, 0.0)
    _above(f"{where}curvature.tolerance", config.tolerance, 0.0)
    _at_least(f"{where}curvature.max_iterations", config.max_iterations, 1)
    _at_least(f"{where}curvature.rho", config.rho, 0.0)
    if config.folds == 1 or config.folds < 0:
        raise ConfigError(f"{where}curvature.folds={config.folds}; give 0 (no cross-validation) or at least 2.")
    if config.regularization is Regularization.cross_validated and config.folds == 0:
        raise ConfigError(
            f"{where}curvature.regularization=cross_validated needs curvature.folds of at least 2, not 0."
        )
    if config.reference_weight is not None and not 0.0 <= config.reference_weight <= 1.0:
        raise ConfigError(f"{where}curvature.reference_weight={config.reference_weight}; it must be between 0 and 1.")
    if config.estimator is Estimator.reference and config.reference_weight is None and config.folds == 0:
        raise ConfigError(f"{where}curvature.estimator=reference needs curvature.reference_weight or curvature.folds.")
    exact = config.estimator in (Estimator.exact, Estimator.stored)
    if exact and config.regularization is Regularization.cross_validated:
        raise ConfigError(
            f"{where}curvature.estimator={config.estimator.value} is exact and needs no cross-validation: set "
            "curvature.regularization=none."
        )


def resolve_device(name: str) -> torch.device:
    """``auto`` takes CUDA if present, else the CPU.

    Raises:
        ConfigError: The device is unknown or absent.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name} is unknown; use auto, cpu, cuda or cuda:<index>.") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(f"device={name} but {count} CUDA device(s) are present; use device=auto or device=cpu.")
    elif device.type != "cpu":
        raise ConfigError(f"device={name} is not supported; use auto, cpu, cuda or cuda:<index>.")
    return device


def resolve_dtype(name: str) -> torch.dtype:
    """The torch dtype of ``dtype``."""
    return _DTYPES[name]


def _one_of(key: str, value: str, accepted: list[str]) -> None:
    if value not in accepted:
        raise ConfigError(f"{key}={value} is unknown; it can be {', '.join(accepted)}.")


def _finite(key: str, value: float) -> None:
    if not math.isfinite(value):
        raise ConfigError(f"{key}={value}; a finite number is needed.")


def _at_least(key: str, value: float, least: float) -> None:
    _finite(key, value)
    if value < least:
        raise ConfigError(f"{key}={value}; it must be at least {least:g}.")


def _above(key: str, value: float, bound: float) -> None:
    _finite(key, value)
    if value <= bound:
        raise ConfigError(f"{key}={value}; it must be above {bound:g}.")


def _between(key: str, value: float, low: float, high: float) -> None:
    _finite(key, value)
    if not low < value < high:
        raise ConfigError(f"{key}={value}; it must be above {low:g} and below {high:g}.")
