"""Check a composed configuration before any work starts."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from sfu.checks import above, at_least, between, finite, one_of, whole
from sfu.data.backbones.backbone import check_backbone
from sfu.data.load import check_dataset, dataset_names
from sfu.errors import ConfigError
from sfu.heads.linearised.network import check_layers, require_torchvision
from sfu.losses import check_class_weights, loss_names
from sfu.reporting.loggers import LOGGERS
from sfu.settings import CoreWeights, HeadConfig, RunConfig, Training

_DTYPES = {"float64": torch.float64, "float32": torch.float32}


def validate(config: RunConfig) -> None:
    """Refuse names and numbers that cannot work.

    Raises:
        ConfigError: Naming the key, the value and what is accepted.
    """
    one_of("dataset.name", config.dataset.name, dataset_names())
    check_backbone(config.backbone)
    check_dataset(config.dataset, config.backbone)
    one_of("head.name", config.head.name, ["linear", "linearised"])
    check_head(config)
    one_of("loss.name", config.loss.name, loss_names())
    one_of("logger.name", config.logger.name, list(LOGGERS))
    one_of("dtype", config.dtype, list(_DTYPES))
    if config.published is not None:
        from sfu.reporting.published import published_table

        published_table(config.published)
    for key in ("indices", "files"):
        given = getattr(config.forget, key)
        if given is not None and not Path(given).expanduser().is_file():
            raise ConfigError(f"forget.{key}={given} is not a file (looked from {Path.cwd()}).")
    if config.dataset.n_classes is not None:
        at_least("dataset.n_classes", config.dataset.n_classes, 2)
    if not config.methods:
        raise ConfigError("methods=[] leaves nothing to do; name at least one.")
    at_least("head.l2", config.head.l2, 0.0)
    above("loss.target_scale", config.loss.target_scale, 0.0)
    check_class_weights(config.loss.class_weights)
    if not 0.0 < config.loss.smoothing <= 1.0:
        raise ConfigError(f"loss.smoothing={config.loss.smoothing}; give a number above 0 and at most 1.")
    above("head.tolerance", config.head.tolerance, 0.0)
    at_least("head.max_iterations", config.head.max_iterations, 1)
    at_least("head.objective_noise", config.head.objective_noise, 0.0)
    if config.head.objective_noise > 0 and config.head.training is not Training.exact:
        raise ConfigError("head.objective_noise is for head.training=exact: certified removal starts at the optimum.")
    between("dataset.test_fraction", config.dataset.test_fraction, 0.0, 1.0)
    at_least("evaluation.membership_splits", config.evaluation.membership_splits, 2)
    adam = config.head.adam
    above("head.adam.lr", adam.lr, 0.0)
    for key in ("batch_size", "max_epochs", "patience"):
        at_least(f"head.adam.{key}", getattr(adam, key), 1)
    if config.forget.fraction is not None and not 0.0 < config.forget.fraction <= 1.0:
        raise ConfigError(f"forget.fraction={config.forget.fraction}; give a number above 0 and at most 1.")
    for key in ("seed", *(f"seeds.{k}" for k in vars(config.seeds))):
        value = config.seed if key == "seed" else getattr(config.seeds, key.split(".")[1])
        if value is not None:
            between(key, value, -1, 2**32)
    if config.threads is not None:
        between("threads", config.threads, 0, 4 * (os.cpu_count() or 1) + 1)
    whole("tune_budget", config.tune_budget, 1)
    at_least("newton.noise_sigma", config.newton.noise_sigma, 0.0)
    at_least("newton.steps", config.newton.steps, 1)
    at_least("newton.batches", config.newton.batches, 1)


def check_head(config: RunConfig) -> None:
    """Refuse settings of a head that go with the other kind alone, and a linearised head that cannot be had."""
    head, dataset = config.head, config.dataset
    for key in ("epochs", "batch_size"):
        at_least(f"head.sgd.{key}", getattr(head.sgd, key), 1)
        at_least(f"head.pretrain.{key}", getattr(head.pretrain, key), 1)
    above("head.sgd.lr", head.sgd.lr, 0.0)
    above("head.pretrain.lr", head.pretrain.lr, 0.0)
    if not 0.0 <= dataset.core_fraction < 1.0:
        raise ConfigError(
            f"dataset.core_fraction={dataset.core_fraction:g}; give at least 0 and less than 1: what is public is no "
            "user's, and some images must be."
        )
    if head.name == "linear":
        if dataset.core_fraction > 0:
            raise ConfigError(f"dataset.core_fraction={dataset.core_fraction:g} is for head=linearised.")
        for key in ("layers", "core", "negative_slope"):
            value = getattr(head, key)
            if value != getattr(HeadConfig, key):
                raise ConfigError(f"head.{key}={getattr(value, 'value', value)} is for head=linearised; set that, too.")
        return
    require_torchvision(config.backbone)
    one_of("head.dtype", head.dtype, list(_DTYPES))
    at_least("head.layers", head.layers, 1)
    finite("head.negative_slope", head.negative_slope)
    if not 0 <= head.negative_slope < 1:
        raise ConfigError(f"head.negative_slope={head.negative_slope:g}; it must be at least 0 and below 1.")
    if head.batch_size != "auto":
        whole("head.batch_size", head.batch_size, 1)
    for key, value, none in (("bias", head.bias, False), ("store_curvature", head.store_curvature, False)):
        if value is not none:
            raise ConfigError(f"head.{key}={value} is for head=linear; a linearised head has no such thing.")
    if head.objective_noise > 0:
        raise ConfigError("head.objective_noise is for head=linear: certified removal has no linearised form here.")
    if head.core is CoreWeights.pretrain and not dataset.core_fraction > 0:
        raise ConfigError("head.core=pretrain needs public images to train on: set dataset.core_fraction above 0.")
    check_layers(config.backbone, head)


def resolve_device(name: str) -> torch.device:
    """``auto`` takes CUDA if present, else the CPU.

    Raises:
        ConfigError: The device is unknown or absent.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name} is unknown; use auto, cpu, cuda or cuda:<index>.") from None
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
