"""No network: the pixels themselves, in 0..1, as features."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from sfu.data.backbones.network import Network
from sfu.data.backbones.transform import ImageTransform
from sfu.errors import ConfigError

if TYPE_CHECKING:
    from sfu.settings import BackboneConfig


def check(config: BackboneConfig) -> None:
    """Refuse weights.

    Raises:
        ConfigError: Weights were given, which pixels do not have.
    """
    if config.weights not in ("default", "none"):
        raise ConfigError(f"backbone.weights={config.weights} means nothing to backbone=pixels; leave it out.")


def build(config: BackboneConfig) -> Network:
    """Rows of ``K S S`` numbers, channel by channel."""
    check(config)
    return Network(nn.Flatten(), ImageTransform(), "flatten")
