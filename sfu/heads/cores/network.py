"""The whole network behind a core: a classifier of torchvision, split into trunk and top, and its weights as one file.

A file's network is built again from the names and numbers of its :class:`Source`: the architecture is looked up by name
in torchvision, so a file cannot name code to run.
"""

from __future__ import annotations

import copy
import hashlib
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn

from sfu.data.backbones.backbone import DTYPES, Backbone, build_backbone
from sfu.data.backbones.torchvision_models import TorchvisionModels, quiet
from sfu.data.backbones.transform import ImageTransform
from sfu.data.backbones.weights import check_fit, load_weights, tensors_digest, weights_digest
from sfu.data.settings import BackboneSettings
from sfu.errors import ArtifactError, ConfigError, DataError, SfuError
from sfu.files import write_tensors
from sfu.heads.cores.core import Core
from sfu.heads.cores.small_maps import use_small_maps
from sfu.heads.cores.split_network import split_network
from sfu.heads.settings import CORE_PREFIX, LinearisedSettings
from sfu.readers import Count, Record, read_tensors, refusing

_LARGEST = 1 << 24  # numbers of an activation; those of torchvision's models have at most 2 million
_REMEDY = "Save the head again, or take another copy of its files."


@dataclass(frozen=True)
class Source:
    """How to build a network again: a classification model of torchvision, and what ``head`` says of its top."""

    architecture: str
    n_classes: int
    layers: int
    negative_slope: float
    dtype: str


class SourceRecord(Record):
    """A :class:`Source` in a head's JSON file, the digest of all weights, and the shape of an activation."""

    model_config = ConfigDict(extra="ignore")

    architecture: str
    n_classes: Annotated[Count, Field(gt=1)]
    layers: Annotated[Count, Field(gt=0)]
    negative_slope: Annotated[float, Field(ge=0, lt=1)]
    dtype: Literal["float32", "float64"]
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    shape: Annotated[list[Annotated[Count, Field(gt=0)]], Field(min_length=1, max_length=3)]


@dataclass(frozen=True)
class Network:
    """Trunk and top with the weights w_c, split as in :mod:`sfu.heads.cores.split_network`."""

    trunk: nn.Module
    top: nn.Module
    components: tuple[str, ...]
    transform: ImageTransform
    source: Source

    def state(self) -> dict[str, Tensor]:
        """Return all weights, by the names the architecture gives them."""
        return {**self.trunk.state_dict(), **self.top.state_dict()}

    def digest(self) -> str:
        """Return the SHA-256 of the architecture, its rectifiers and all weights; K only matters for leaky ones."""
        source = self.source
        about = [source.architecture, source.negative_slope, source.layers if source.negative_slope else None]
        return hashlib.sha256(f"{about} {tensors_digest(self.state())}".encode()).hexdigest()

    def on(self, device: torch.device, pixels: Tensor) -> Network:
        """Return a copy to be trained on ``device``, with images like ``pixels``."""
        parts = (self.trunk, self.top)
        trunk, top = (copy.deepcopy(part).to(device).to(memory_format=torch.channels_last) for part in parts)
        if device.type == "cpu":
            images = self.transform.normalized([pixels, pixels], device, torch.float32)
            use_small_maps(trunk, images)
            with torch.no_grad():
                use_small_maps(top, trunk(images))
        return replace(self, trunk=trunk, top=top)

    def backbone(self, config: BackboneSettings) -> Backbone:
        """Return the trunk as a backbone, whose features are the activations that enter the top."""
        module = nn.Sequential(self.trunk, nn.Flatten()).to(memory_format=torch.channels_last).eval()
        pooling = f"input of {self.components[-1]}"
        return Backbone(config.name, module, self.transform, pooling, DTYPES[config.dtype], weights_digest(module))

    def core(self, images: Tensor, device: torch.device) -> Core:
        """Return the tangent of the top, for images ``[B, 3, S, S]`` as the trunk takes them, B at least 2.

        Raises:
            ConfigError: An example's outputs depend on the others in its batch.
        """
        with torch.no_grad():
            example = self.trunk(images).to("cpu", torch.float32)
        core = Core.of(
            self.top, example, components=self.components,
            source={**asdict(self.source), "digest": self.digest(), "shape": list(example.shape[1:])},
            whole=self.state(),
        )  # fmt: skip
        return core.to(device, DTYPES[self.source.dtype])


def build_network(backbone: BackboneSettings, head: LinearisedSettings, n_classes: int) -> Network:
    """Build the backbone with a class layer of C outputs drawn from ``head.pretrain.seed``, split before K components.

    Raises:
        ConfigError: The backbone cannot be split there.
        DataError: Its weights are not available, or do not fit.
    """
    made = build_backbone(backbone)
    source = Source(backbone.name, n_classes, head.layers, head.negative_slope, head.dtype)
    whole = _fresh(source, head.pretrain.seed)
    unknown = whole.load_state_dict(made.module.state_dict(), strict=False).unexpected_keys
    if unknown:
        raise DataError(f"backbone.name={backbone.name}: its weight {unknown[0]} has no place in the classifier.")
    return _split(whole, source, made.transform)


def check_layers(backbone: BackboneSettings, head: LinearisedSettings) -> None:
    """Refuse K components that the network does not have, before any data are read.

    Raises:
        ConfigError: The message names the components, from the end.
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
        raise ConfigError(f"{name} is not a classification model of torchvision.")
    options: dict[str, Any] = quiet(name)
    made: nn.Module = models.get_model(name, weights=None, num_classes=n_classes, **options)
    return made


def _split(whole: nn.Module, source: Source, transform: ImageTransform) -> Network:
    split = split_network(whole, source.layers, source.negative_slope)
    return Network(split.trunk, split.top, split.components, transform, source)


def save_core(core: Core, folder: Path) -> list[Path]:
    """Write the whole network of a core, unless the folder has it; a core without one is your own and not written.

    Raises:
        ArtifactError: The file cannot be written.
    """
    if not core.whole:
        return []
    path = folder / _core_name(core.source["digest"])
    if not path.is_file():
        write_tensors(path, core.whole)
    return [path]


def load_core(about: dict[str, Any], stem: Path) -> Core:
    """Read the core of the head at ``stem``, which ``about`` describes, from the file beside it.

    Raises:
        ArtifactError: The file is missing or damaged, or does not fit its description.
    """
    if "digest" not in about:
        raise ArtifactError(f"the head at {stem} has a core of your own, which is not saved. Give it as `core`.")
    with refusing(f"the core of the head at {stem}", _REMEDY):
        known = SourceRecord.model_validate(about)
    path = stem.with_name(_core_name(known.digest))
    if not path.is_file():
        raise ArtifactError(f"the core of the head at {stem} is missing: {path} belongs beside it.")
    weights = read_tensors(path, _REMEDY)
    source = Source(known.architecture, known.n_classes, known.layers, known.negative_slope, known.dtype)
    try:
        with torch.device("meta"):  # a large network is built only for a file that holds its weights
            check_fit(_classifier(source.architecture, source.n_classes), weights, str(path))
        whole = _fresh(source, 0)
        load_weights(whole, weights, (), str(path))
        network = _split(whole, source, ImageTransform())
    except SfuError as error:
        raise ArtifactError(f"{path}: {error}") from error
    if network.digest() != known.digest:
        raise ArtifactError(f"{path} does not hold the core that its name says: its weights were changed or damaged.")
    with refusing(f"the core of the head at {stem}", _REMEDY):
        if math.prod(known.shape) > _LARGEST:
            raise ValueError(f"shape={known.shape} is larger than any activation")
        example = torch.zeros(2, *known.shape)
        core = Core.of(network.top, example, components=network.components, source=about, whole=network.state())
    return core.to(torch.device("cpu"), DTYPES[source.dtype])


def _core_name(digest: str) -> str:
    return f"{CORE_PREFIX}{digest[:16]}.safetensors"
