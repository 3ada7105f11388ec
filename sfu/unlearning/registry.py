"""Turn the names in ``methods`` into methods: a yaml of ``configs/method`` or an entry of ``variants``."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sfu.discovery import module_names, only_subclass
from sfu.errors import ConfigError
from sfu.experiment.paths import config_dir, group_options
from sfu.experiment.schema import CurvatureConfig, MethodConfig, RunConfig
from sfu.experiment.validate import validate_curvature
from sfu.unlearning.method import UnlearningMethod

_PACKAGE = "sfu.unlearning.methods"


def make_methods(run: RunConfig) -> dict[str, UnlearningMethod]:
    """The methods of a run by row name, in order.

    Raises:
        ConfigError: A name is unknown, listed twice, or its settings do not fit.
    """
    if len(set(run.methods)) != len(run.methods):
        raise ConfigError(f"methods={list(run.methods)} lists a row twice; give a second one a name in `variants`.")
    return {name: _make(run, name) for name in run.methods}


def _make(run: RunConfig, name: str) -> UnlearningMethod:
    layers = _layers(run, name, seen=())
    method = next((layer.method for layer in reversed(layers) if layer.method), None)
    known = module_names(_PACKAGE)
    if method not in known:
        raise ConfigError(f"the row '{name}' names the method '{method}'; sfu has {', '.join(known)}.")
    try:
        parts = [_curvature_layer(layer.curvature, name) for layer in layers]
        merged = OmegaConf.merge(OmegaConf.structured(CurvatureConfig), OmegaConf.structured(run.curvature), *parts)
        curvature = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        accepted = ", ".join(CurvatureConfig.__dataclass_fields__)
        raise ConfigError(f"the row '{name}': {str(error).splitlines()[0]}. curvature takes {accepted}.") from error
    validate_curvature(curvature, f"the row '{name}': ")
    settings: dict[str, Any] = {}
    for layer in layers:
        settings.update(layer.settings)
    kind = only_subclass(f"{_PACKAGE}.{method}", UnlearningMethod)
    return kind.from_config(run, curvature, settings)


def _layers(run: RunConfig, name: str, seen: tuple[str, ...]) -> list[MethodConfig]:
    """The row's configuration, the one it is based on first."""
    if name in seen:
        raise ConfigError(f"variants: {' -> '.join((*seen, name))} is a circle of `base`.")
    files = group_options("method")
    if name in run.variants:
        spec = run.variants[name]
    elif name in files:
        spec = _read_method(name)
    else:
        known = ", ".join(sorted({*files, *run.variants}))
        raise ConfigError(f"methods: '{name}' is unknown; sfu has {known}.")
    below = _layers(run, spec.base, (*seen, name)) if spec.base else []
    return [*below, spec]


def _read_method(name: str) -> MethodConfig:
    path = config_dir() / "method" / f"{name}.yaml"
    try:
        spec = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(MethodConfig), OmegaConf.load(path)))
    except OmegaConfBaseException as error:
        accepted = ", ".join(MethodConfig.__dataclass_fields__)
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}. It may hold {accepted}.") from error
    assert isinstance(spec, MethodConfig)
    return spec


def _curvature_layer(layer: Any, name: str) -> DictConfig:
    if layer is None:
        return OmegaConf.create({})
    if isinstance(layer, str):
        options = group_options("curvature")
        if layer not in options:
            raise ConfigError(f"the row '{name}' names the curvature '{layer}'; configs/curvature has {options}.")
        loaded = OmegaConf.load(config_dir() / "curvature" / f"{layer}.yaml")
        assert isinstance(loaded, DictConfig)
        return loaded
    if isinstance(layer, dict):
        return OmegaConf.create(layer)
    raise ConfigError(f"the row '{name}': curvature must be a name or a mapping, not {layer!r}.")
