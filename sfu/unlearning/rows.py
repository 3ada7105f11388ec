"""Turn the names in ``methods`` into methods: a yaml of ``configs/method`` or an entry of ``variants``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sfu.checks import validate_curvature
from sfu.config_files import config_dir, group_options
from sfu.errors import ConfigError
from sfu.settings import CurvatureConfig, MethodConfig, RunConfig, Tune, curvature_settings
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.tuning import Oracle, SourceFree, settings_of

_PREFIX = "curvature."
INHERITED = (
    "structure", "perturbations", "folds", "force", "solver", "tolerance", "max_iterations", "augment",
    "reference_path", "reference_key", "reference_weight",
)  # fmt: skip
"""What a row with a curvature file of its own still takes from the run's ``curvature``: budgets and further data, not
definitions."""


@dataclass(frozen=True)
class RowSpec:
    """A row's settings, all layers laid over each other.

    Attributes:
        method: The file in ``sfu/unlearning/methods``.
        kind: The class in it.
        curvature: The row's own curvature.
        settings: Of the method itself.
        grid: Values to try for settings (``curvature.KEY`` for those of the curvature), by their names; ``None``: none.
    """

    method: str
    kind: type[UnlearningMethod]
    curvature: CurvatureConfig
    settings: dict[str, Any]
    grid: dict[str, Any] | None


def make_methods(run: RunConfig) -> dict[str, UnlearningMethod]:
    """The methods of a run by row name, in order.

    Raises:
        ConfigError: A name is unknown, listed twice, or its settings do not fit.
    """
    return {name: _method(run, name, spec) for name, spec in row_specs(run).items()}


def row_specs(run: RunConfig) -> dict[str, RowSpec]:
    """The settings of every row by its name, in order.

    Raises:
        ConfigError: A name is unknown, listed twice, or its curvature is not a valid one.
    """
    if len(set(run.methods)) != len(run.methods):
        raise ConfigError(f"methods={list(run.methods)} lists a row twice; give a second one a name in `variants`.")
    return {name: _spec(run, name) for name in run.methods}


def _spec(run: RunConfig, name: str) -> RowSpec:
    layers = _layers(run, name, seen=())
    method = next((layer.method for layer in reversed(layers) if layer.method), None)
    kind = UnlearningMethod.named(method or "", f"the row '{name}': method")
    curvature: DictConfig = OmegaConf.structured(run.curvature)
    for layer in layers:
        curvature = _lay_over(curvature, layer.curvature, name)
    built = _checked(curvature, name)
    settings: dict[str, Any] = {}
    for layer in layers:
        settings.update(layer.settings)
    grid = next((layer.grid for layer in reversed(layers) if layer.grid), None)
    return RowSpec(kind.registered_name, kind, built, settings, grid)


def _method(run: RunConfig, name: str, spec: RowSpec) -> UnlearningMethod:
    """The method of a row, or a choice among its grid."""
    published = spec.kind.from_config(run, spec.curvature, spec.settings)
    if spec.grid is None or run.tune is Tune.authors:
        return published
    candidates = []
    for given in settings_of(spec.grid, run.tune_budget, f"the row '{name}'"):
        of_curvature = {key.removeprefix(_PREFIX): given[key] for key in given if key.startswith(_PREFIX)}
        own = {key: value for key, value in given.items() if not key.startswith(_PREFIX)}
        tried = spec.curvature
        if of_curvature:
            tried = _checked(_lay_over(OmegaConf.structured(tried), of_curvature, name), name)
        candidates.append((given, spec.kind.from_config(run, tried, spec.settings | own)))
    return (SourceFree if run.tune is Tune.source_free else Oracle)(candidates, published)


def _checked(curvature: DictConfig, name: str) -> CurvatureConfig:
    """The row's curvature settings."""
    try:
        built = curvature_settings(cast(dict[str, Any], OmegaConf.to_container(curvature)))
    except ConfigError as error:
        raise ConfigError(f"the row '{name}': {error}") from error
    validate_curvature(built, f"the row '{name}': ")
    return built


def _layers(run: RunConfig, name: str, seen: tuple[str, ...]) -> list[MethodConfig]:
    """The row's configuration, the one it is based on first."""
    if name in seen:
        raise ConfigError(f"variants: {' -> '.join((*seen, name))} is a circle of `base`.")
    files = group_options("method")
    if name in run.variants:
        spec = _method_config(run.variants[name], f"variants.{name}")
    elif name in files:
        spec = _method_file(config_dir() / "method" / f"{name}.yaml")
    else:
        known = ", ".join(sorted({*files, *run.variants}))
        raise ConfigError(f"methods: '{name}' is unknown; sfu has {known}.")
    below = _layers(run, spec.base, (*seen, name)) if spec.base else []
    return [*below, spec]


@cache
def _method_file(path: Path) -> MethodConfig:
    """A file of ``configs/method``, read once: the jobs of a sweep share a process."""
    return _method_config(OmegaConf.load(path), str(path))


def _method_config(raw: Any, what: str) -> MethodConfig:
    try:
        spec = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(MethodConfig), raw))
    except (OmegaConfBaseException, ValueError) as error:
        accepted = ", ".join(MethodConfig.__dataclass_fields__)
        raise ConfigError(f"{what}: {str(error).splitlines()[0]}. It may hold {accepted}.") from error
    assert isinstance(spec, MethodConfig)
    return spec


def _lay_over(below: DictConfig, layer: Any, name: str) -> DictConfig:
    """A row's curvature: a named file replaces what is below it but for :data:`INHERITED`; a mapping adds to it."""
    if layer is None:
        return below
    if isinstance(layer, str):
        options = group_options("curvature")
        if layer not in options:
            raise ConfigError(f"the row '{name}' names the curvature '{layer}'; configs/curvature has {options}.")
        kept = OmegaConf.create({key: below[key] for key in INHERITED})
        added: Any = OmegaConf.load(config_dir() / "curvature" / f"{layer}.yaml")
        below = cast(DictConfig, OmegaConf.merge(OmegaConf.structured(CurvatureConfig), kept))
    elif isinstance(layer, dict):
        added = OmegaConf.create(layer)
    else:
        raise ConfigError(f"the row '{name}': curvature must be a name or a mapping, not {layer!r}.")
    merged = OmegaConf.merge(OmegaConf.to_container(below), added)
    assert isinstance(merged, DictConfig)
    return merged
