"""Any classification model of torchvision, cut before its last layer.

Source: He et al., Deep residual learning for image recognition, 2016, for the paper's ResNet-18; torchvision's weights.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sfu.data.backbones.library import BackboneLibrary, Network
from sfu.data.backbones.transform import ImageTransform
from sfu.data.backbones.weights import load_weights, read_state_dict
from sfu.data.settings import BackboneSettings
from sfu.errors import ConfigError, DataError

_RESCALED_INPUT = ("googlenet", "inception_v3")  # their weights expect it; the default without weights is not to


class TorchvisionModels(BackboneLibrary, name="torchvision"):
    """Any classification model of torchvision."""

    @classmethod
    def check(cls, settings: BackboneSettings) -> None:
        from torchvision import models

        known = models.list_models(module=models)
        if settings.name not in known:
            near = difflib.get_close_matches(settings.name, known, n=3) or ["resnet18", "resnet50", "vit_b_16"]
            raise ConfigError(
                f"backbone.name={settings.name} is not a classification model of torchvision. Near: {', '.join(near)}. "
                "There are also none, pixels, and backbone.library=timm."
            )

    @classmethod
    def to_download(cls, settings: BackboneSettings) -> dict[str, int | None]:
        from torchvision import models

        weights = models.get_model_weights(settings.name).DEFAULT
        if settings.weights != "default" or _place(weights).is_file():
            return {}
        return {weights.url: round(weights.meta["_file_size"] * 2**20)}  # torchvision counts in MiB

    @classmethod
    def build(cls, settings: BackboneSettings) -> Network:
        from torchvision import models

        name, file, default = settings.name, settings.weights_file, models.get_model_weights(settings.name).DEFAULT
        if settings.weights == "default":
            model = _pretrained(name, default)
        else:
            rescaled = {"transform_input": True} if file and name in _RESCALED_INPUT else {}
            model = models.get_model(name, weights=None, **rescaled, **quiet(name))
        last = remove_last_layer(model)
        if file:
            load_weights(
                model, _renamed(name, read_state_dict(file)), (f"{last}.", "aux", "AuxLogits"), settings.weights
            )
        return Network(
            model, _transform(default, resized=settings.weights != "none"), f"input of the last layer ({last})"
        )


def remove_last_layer(model: nn.Module) -> str:
    """Replace the last linear (or 1 x 1 convolutional) layer by the identity, and return its name."""
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1))
    ]
    if not layers:
        raise ConfigError(f"{type(model).__name__} has no last layer to cut. Choose another backbone.name.")
    parent, _, child = layers[-1].rpartition(".")
    setattr(model.get_submodule(parent), child, nn.Identity())
    return layers[-1]


def quiet(name: str) -> dict[str, Any]:
    """GoogLeNet and Inception: no auxiliary classifiers, and the initialisation torchvision asks to be named."""
    return {"aux_logits": False, "init_weights": True} if name in _RESCALED_INPUT else {}


def _renamed(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """DenseNet's published files number two layers of each block ``norm.1``, which the model calls ``norm1``."""
    if not name.startswith("densenet"):
        return tensors
    return {re.sub(r"(denselayer\d+\.(?:norm|conv))\.([12])\.", r"\1\2.", key): t for key, t in tensors.items()}


def _pretrained(name: str, weights: Any) -> nn.Module:
    """The model with torchvision's own weights, loaded by torchvision (it knows the names of older files)."""
    from torchvision import models

    try:
        model: nn.Module = models.get_model(name, weights=weights)
        return model
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(
            f"the weights {weights} cannot be fetched ({error}). Without a network: place {weights.url} at "
            f"{_place(weights)}, or set backbone.weights to a file of yours (backbone.weights=none: random ones)."
        ) from error


def _place(weights: Any) -> Path:
    """Where PyTorch keeps downloaded weights."""
    import torch

    return Path(torch.hub.get_dir(), "checkpoints", weights.url.rsplit("/", 1)[-1])


def _transform(weights: Any, *, resized: bool) -> ImageTransform:
    own = weights.transforms()
    return ImageTransform(
        own.resize_size[0] if resized else None,
        own.crop_size[0] if resized else None,
        own.interpolation.value,
        tuple(own.mean),
        tuple(own.std),
    )
