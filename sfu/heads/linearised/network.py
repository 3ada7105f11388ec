"""The whole network behind a core: a classifier of torchvision, cut in trunk and top, and its weights as one file.

A network is built again from the names and numbers of its :class:`Source`, never from code that a file names.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sfu.data.backbones.backbone import DTYPES, Backbone, build_backbone
from sfu.data.backbones.torchvision_models import TorchvisionModels, quiet
from sfu.data.backbones.transform import ImageTransform
from sfu.data.backbones.weights import load_weights, tensors_digest, weights_digest
from sfu.errors import ConfigError, DataError
from sfu.heads.linearised.core import Core
from sfu.heads.linearised.small_maps import use_small_maps
from sfu.heads.linearised.split_network import split_network

if TYPE_CHECKING:
    from sfu.settings import BackboneConfig, HeadConfig


@dataclass(frozen=True)
class Source:
    """How to build a network again.

    Attributes:
        architecture: Name of a classification model of torchvision.
        n_classes: C.
        layers: K.
        negative_slope: Of the rectifiers of the top.
        dtype: Of passes through the top.
    """

    architecture: str
    n_classes: int
    layers: int
    negative_slope: float
    dtype: str


@dataclass(frozen=True)
class Network:
    """Trunk and top with the weights w_c.

    Attributes:
        trunk: Images to activations.
        top: Activations to outputs.
        components: Of the top, the last first.
        transform: Of every image.
        source: How to build it again.
    """

    trunk: nn.Module
    top: nn.Module
    components: tuple[str, ...]
    transform: ImageTransform
    source: Source

    def state(self) -> dict[str, Tensor]:
        """All weights, by the names the architecture gives them."""
        return {**self.trunk.state_dict(), **self.top.state_dict()}

    def digest(self) -> str:
        """SHA-256 over the architecture, its rectifiers, and all weights; K plays a part in leaky ones alone."""
        source = self.source
        about = [source.architecture, source.negative_slope, source.layers if source.negative_slope else None]
        return hashlib.sha256(f"{about} {tensors_digest(self.state())}".encode()).hexdigest()

    def on(self, device: torch.device, pixels: Tensor) -> Network:
        """A copy to be trained on ``device``, with images like ``pixels``."""
        trunk, top = (copy.deepcopy(part).to(device).to(memory_format=torch.channels_last) for part in self._parts)
        if device.type == "cpu":
            images = self.transform.normalized([pixels, pixels], device, torch.float32)
            use_small_maps(trunk, images)
            with torch.no_grad():
                use_small_maps(top, trunk(images))
        return replace(self, trunk=trunk, top=top)

    @property
    def _parts(self) -> tuple[nn.Module, nn.Module]:
        return self.trunk, self.top

    def backbone(self, config: BackboneConfig) -> Backbone:
        """The trunk as a backbone, whose features are the activations at the cut."""
        module = nn.Sequential(self.trunk, nn.Flatten()).to(memory_format=torch.channels_last).eval()
        pooling = f"input of {self.components[-1]}"
        return Backbone(config.name, module, self.transform, pooling, DTYPES[config.dtype], weights_digest(module))

    def core(self, images: Tensor, device: torch.device) -> Core:
        """The tangent of the top, for images like these (``[B, 3, S, S]``, as the trunk takes them; B at least 2).

        Raises:
            ConfigError: Outputs of an example depend on others.
        """
        with torch.no_grad():
            example = self.trunk(images).to("cpu", torch.float32)
        core = Core.of(
            self.top, example, components=self.components,
            source={**asdict(self.source), "digest": self.digest(), "shape": list(example.shape[1:])},
            whole=self.state(),
        )  # fmt: skip
        return core.to(device, DTYPES[self.source.dtype])


def build_network(backbone: BackboneConfig, head: HeadConfig, n_classes: int) -> Network:
    """The backbone with a class layer of C outputs, drawn from ``head.pretrain.seed``, cut before K components.

    Raises:
        ConfigError: It is no model of torchvision, or cannot be cut so.
        DataError: Its weights cannot be had.
    """
    require_torchvision(backbone)
    made = build_backbone(backbone)
    source = Source(backbone.name, n_classes, head.layers, head.negative_slope, head.dtype)
    whole = _fresh(source, head.pretrain.seed)
    unknown = whole.load_state_dict(made.module.state_dict(), strict=False).unexpected_keys
    if unknown:
        raise DataError(f"backbone.name={backbone.name}: {unknown[0]} of its weights has no place in the classifier.")
    return _cut(whole, source, made.transform)


def rebuild_network(source: Source, weights: dict[str, Tensor], where: str) -> Network:
    """The network of a file.

    Raises:
        DataError: The weights are of another architecture.
    """
    whole = _fresh(source, 0)
    load_weights(whole, weights, (), where)
    return _cut(whole, source, ImageTransform())


def require_torchvision(backbone: BackboneConfig) -> None:
    """Refuse backbones that have no layers to linearise.

    Raises:
        ConfigError: Naming what goes.
    """
    if backbone.name in ("none", "pixels") or backbone.library != "torchvision":
        raise ConfigError(
            f"head=linearised needs a network of torchvision over images (backbone=resnet18, say), not backbone.name="
            f"{backbone.name} of backbone.library={backbone.library}."
        )


def check_layers(backbone: BackboneConfig, head: HeadConfig) -> None:
    """Refuse K components that the network does not have, before any data are read.

    Raises:
        ConfigError: Naming the components, from the end.
    """
    TorchvisionModels.check(backbone)
    with torch.device("meta"):
        split_network(_classifier(backbone.name, 2), head.layers, head.negative_slope)


def _fresh(source: Source, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _classifier(source.architecture, source.n_classes)


def _classifier(name: str, n_classes: int) -> nn.Module:
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise ConfigError(f"{name} is no classification model of torchvision.")
    options: dict[str, Any] = quiet(name)
    made: nn.Module = models.get_model(name, weights=None, num_classes=n_classes, **options)
    return made


def _cut(whole: nn.Module, source: Source, transform: ImageTransform) -> Network:
    cut = split_network(whole, source.layers, source.negative_slope)
    return Network(cut.trunk, cut.top, cut.components, transform, source)
