"""Any model of timm (an optional extra), without its classifier.

Source: Wightman, PyTorch Image Models, 2019.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from sfu.data.backbones.network import Network
from sfu.data.backbones.transform import ImageTransform
from sfu.data.backbones.weights import load_weights, read_state_dict
from sfu.errors import ConfigError, DataError

if TYPE_CHECKING:
    from sfu.settings import BackboneConfig


def check(config: BackboneConfig) -> None:
    """Refuse a name timm does not have.

    Raises:
        ConfigError: timm is not installed, or does not know the model.
    """
    timm = _timm()
    if not timm.is_model(config.name):
        near = difflib.get_close_matches(config.name.split(".")[0], timm.list_models(), n=3)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise ConfigError(f"backbone.name={config.name} is no model of timm{hint}.")


def build(config: BackboneConfig) -> Network:
    """The pooled network without classifier, and the transform its pretrained weights were made with.

    Raises:
        ConfigError: timm is not installed, or there is no such model or file.
        DataError: The weights cannot be downloaded or do not fit.
    """
    check(config)
    timm = _timm()
    local = config.weights not in ("default", "none")
    tensors = read_state_dict(config.weights) if local else {}
    try:
        model = timm.create_model(config.name, pretrained=config.weights == "default", num_classes=0)
    except Exception as error:  # the hub's client raises many kinds
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"timm cannot make backbone.name={config.name} with backbone.weights={config.weights} ({first}). Without a "
            "network, set backbone.weights to a file of weights."
        ) from error
    if local:
        classifier = model.pretrained_cfg.get("classifier") or ()
        names = (classifier,) if isinstance(classifier, str) else tuple(classifier)
        load_weights(model, tensors, tuple(f"{name}." for name in names), config.weights)
    resized = config.weights != "none" and config.size is None
    return Network(model, _transform(timm, model, config.name, resized=resized), "timm's pooled features")


def _transform(timm: Any, model: Any, name: str, *, resized: bool) -> ImageTransform:
    own = timm.data.resolve_model_data_config(model)
    if resized and own.get("crop_mode", "center") != "center":
        raise ConfigError(
            f"the weights of {name} were made with crop_mode={own['crop_mode']}, which sfu does not do; set "
            "backbone.size to resize and crop the centre all the same."
        )
    side = own["input_size"][-1]
    return ImageTransform(
        int(side / own["crop_pct"]) if resized else None,
        side if resized else None,
        own["interpolation"] if own["interpolation"] in ("bilinear", "bicubic", "nearest") else "bicubic",
        tuple(own["mean"]),
        tuple(own["std"]),
    )


def _timm() -> Any:
    try:
        import timm
        import timm.data
    except ImportError as error:
        raise ConfigError(
            "backbone.library=timm needs timm, an optional extra: python -m pip install 'sfu[timm]'."
        ) from error
    return timm
