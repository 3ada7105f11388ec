"""What a library of backbones hands over: a network that ends in features, and how its input is to be prepared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import nn

from sfu.data.backbones.transform import ImageTransform
from sfu.data.settings import PIXELS, BackboneSettings
from sfu.registry import Registered, add_modules


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


class BackboneLibrary(Registered, ABC, kind="backbone.library"):
    """A source of networks, chosen by ``backbone.library``."""

    @classmethod
    @abstractmethod
    def check(cls, settings: BackboneSettings) -> None:
        """Raise :class:`ConfigError`, with the nearest names, for a model that the library does not have; cheap."""

    @classmethod
    def to_download(cls, settings: BackboneSettings) -> dict[str, int | None]:
        """Return the addresses of the weights that :meth:`build` would download, with their sizes in bytes."""
        return {}

    @classmethod
    @abstractmethod
    def build(cls, settings: BackboneSettings) -> Network:
        """Return the network without its classifier, and the transform its weights were made with.

        Raises:
            ConfigError: There is no such model or file.
            DataError: The weights cannot be downloaded or do not fit.
        """


add_modules(BackboneLibrary, "sfu.data.backbones.torchvision_models")
add_modules(BackboneLibrary, "sfu.data.backbones.timm_models")


class Pixels(BackboneLibrary):
    """No network: the pixels themselves, in 0..1, as rows of ``K S S`` numbers, channel by channel."""

    @classmethod
    def check(cls, settings: BackboneSettings) -> None:
        pass

    @classmethod
    def build(cls, settings: BackboneSettings) -> Network:
        return Network(nn.Flatten(), ImageTransform(), "flatten")


def library_of(settings: BackboneSettings) -> type[BackboneLibrary]:
    """Return the library of a backbone, or raise :class:`ConfigError` if there is none of its name."""
    return Pixels if settings.name == PIXELS else BackboneLibrary.named(settings.library)
