"""Any model of timm (an optional extra), without its classifier.

Source: Wightman, PyTorch Image Models, 2019.
"""

from __future__ import annotations

import difflib
from typing import Any

from sfu.data.backbones.library import BackboneLibrary, Network
from sfu.data.backbones.transform import ImageTransform
from sfu.data.backbones.weights import load_weights, read_state_dict
from sfu.data.settings import BackboneSettings
from sfu.errors import ConfigError, DataError


class TimmModels(BackboneLibrary, name="timm"):
    """Any model of timm, an optional extra."""

    @classmethod
    def check(cls, settings: BackboneSettings) -> None:
        timm = _timm()
        if not timm.is_model(settings.name):
            near = difflib.get_close_matches(settings.name.split(".")[0], timm.list_models(), n=3)
            hint = f" Near: {', '.join(near)}." if near else ""
            raise ConfigError(f"backbone.name={settings.name} is not a model of timm.{hint}")

    @classmethod
    def to_download(cls, settings: BackboneSettings) -> dict[str, int | None]:
        if settings.weights != "default":
            return {}
        return {f"timm's weights of {settings.name}, unless its cache has them": None}

    @classmethod
    def build(cls, settings: BackboneSettings) -> Network:
        timm = _timm()
        file = settings.weights_file
        tensors = read_state_dict(file) if file else {}
        try:
            model = timm.create_model(settings.name, pretrained=settings.weights == "default", num_classes=0)
        except Exception as error:  # the hub's client raises many kinds
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(
                f"timm cannot make backbone.name={settings.name} with backbone.weights={settings.weights} ({first}). "
                "Without a network, set backbone.weights to a file of weights."
            ) from error
        if file:
            classifier = model.pretrained_cfg.get("classifier") or ()
            names = (classifier,) if isinstance(classifier, str) else tuple(classifier)
            load_weights(model, tensors, tuple(f"{name}." for name in names), settings.weights)
        resized = settings.weights != "none" and settings.size is None
        return Network(model, _transform(timm, model, settings.name, resized=resized), "timm's pooled features")


def _transform(timm: Any, model: Any, name: str, *, resized: bool) -> ImageTransform:
    own = timm.data.resolve_model_data_config(model)
    if resized and own.get("crop_mode", "center") != "center":
        raise ConfigError(
            f"the weights of {name} were made with crop_mode={own['crop_mode']}, which sfu does not do. Set "
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
