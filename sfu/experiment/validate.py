"""Check a composed configuration before any work starts, without PyTorch where no network or GPU is asked for."""

from __future__ import annotations

import re

from sfu.data.settings import NO_BACKBONE
from sfu.errors import ConfigError
from sfu.experiment.config import RunConfig, check_run
from sfu.heads.settings import LinearisedSettings
from sfu.lazy import torch


def validate(config: RunConfig) -> None:
    """Refuse names and numbers that cannot work together, and networks that do not exist.

    Raises:
        ConfigError: The message names the key, the value and what is accepted.
    """
    check_run(config)
    check_device(config.device)
    if config.backbone.name != NO_BACKBONE:
        from sfu.data.backbones.backbone import check_backbone

        check_backbone(config.backbone)
    if isinstance(config.head, LinearisedSettings):
        from sfu.heads.cores.network import check_layers

        check_layers(config.backbone, config.head)


def check_device(name: str) -> None:
    """Refuse a device that is unknown or absent.

    Raises:
        ConfigError: The message names the device and what is accepted.
    """
    given = re.fullmatch(r"auto|(cpu|cuda)(?::(\d+))?", name)
    if given is None:
        raise ConfigError(f"device={name} is unknown. Use auto, cpu, cuda or cuda:<index>.")
    if given[1] == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(given[2] or 0) >= count:
            raise ConfigError(f"device={name}, but {count} CUDA device(s) are present. Use device=auto or device=cpu.")


def resolve_device(name: str) -> torch.device:
    """Return the device; ``auto`` takes CUDA if present, else the CPU.

    Raises:
        ConfigError: The device is unknown or absent.
    """
    check_device(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def resolve_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of ``dtype``, ``float64`` or ``float32``."""
    return torch.float64 if name == "float64" else torch.float32
