"""Check a composed configuration before any work starts."""

from __future__ import annotations

import torch

from sfu.data.backbones.backbone import check_backbone
from sfu.errors import ConfigError
from sfu.experiment.config import RunConfig, check_run
from sfu.heads.cores.network import check_layers
from sfu.heads.settings import LinearisedSettings

_DTYPES = {"float64": torch.float64, "float32": torch.float32}


def validate(config: RunConfig) -> None:
    """Refuse names and numbers that cannot work together, and networks that do not exist.

    Raises:
        ConfigError: The message names the key, the value and what is accepted.
    """
    check_run(config)
    resolve_device(config.device)
    check_backbone(config.backbone)
    if isinstance(config.head, LinearisedSettings):
        check_layers(config.backbone, config.head)


def resolve_device(name: str) -> torch.device:
    """Return the device; ``auto`` takes CUDA if present, else the CPU.

    Raises:
        ConfigError: The device is unknown or absent.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name} is unknown. Use auto, cpu, cuda or cuda:<index>.") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(f"device={name}, but {count} CUDA device(s) are present. Use device=auto or device=cpu.")
    elif device.type != "cpu":
        raise ConfigError(f"device={name} is not supported. Use auto, cpu, cuda or cuda:<index>.")
    return device


def resolve_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of ``dtype``."""
    return _DTYPES[name]
