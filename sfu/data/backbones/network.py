"""What a library of backbones hands over: a network that ends in features, and how its input is to be prepared."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from sfu.data.backbones.transform import ImageTransform


@dataclass(frozen=True)
class Network:
    """A network without its classifier.

    Attributes:
        module: Maps ``[B, K, S, S]`` to ``[B, D]``.
        transform: The one its weights were made with.
        pooling: What the features are, for the record.
    """

    module: nn.Module
    transform: ImageTransform
    pooling: str
