"""Turn the names in ``methods`` into methods: a yaml of ``configs/method``, a registered method, or an entry of
``variants``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from sfu.config_files import config_dir, group_options
from sfu.curvature.settings import CurvatureSettings, curvature_settings
from sfu.errors import ConfigError
from sfu.heads.settings import CORE_PREFIX
from sfu.names import check_row_name, visible
from sfu.registry import unknown
from sfu.schema import accepted_names, meta_of, not_a_setting, typed
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.settings import RowSettings, RunSettings, Tune
from sfu.unlearning.tuning import Oracle, SourceFree, settings_of

ORIGINAL = "original"
"""Name under which a run saves the head that is unlearned from."""
_PREFIX = "curvature."


@dataclass(frozen=True)
class RowSpec:
    """A row's settings, all layers laid over each other.

    Attributes:
        kind: The class of the method.
        curvature: The row's own curvature.
        settings: Of the method itself.
        grid: Values to try for settings (``curvature.KEY`` for those of the curvature), by their names; ``None``: none.
    """

    kind: type[UnlearningMethod]
    curvature: CurvatureSettings
    settings: dict[str, Any]
    grid: dict[str, Any] | None


def make_methods(run: RunSettings) -> dict[str, UnlearningMethod]:
    """Return the methods of a run by row name, in order.

    Raises:
        ConfigError: A name is unknown or listed twice, or its settings do not fit.
    """
    return {name: make_method(run, name, spec) for name, spec in row_specs(run).items()}


def row_specs(run: RunSettings) -> dict[str, RowSpec]:
    """Return the settings of every row by its name, in order; raise as :func:`make_methods` does."""
    if len(set(run.methods)) != len(run.methods):
        raise ConfigError(f"methods={list(run.methods)} lists a row twice. Give the second one a name in `variants`.")
    built_in = [*group_options("method"), *UnlearningMethod.names()]
    for name in map(str, run.variants):
        check_row_name(f"variants.{visible(name)}", name, built_in)
    check_row_names(run.methods)
    return {name: row_spec(run, name) for name in run.methods}


def check_row_names(names: Iterable[str]) -> None:
    """Refuse rows whose heads could not be saved beside each other and the original head, each under its row's name.

    Raises:
        ConfigError: The message names the row.
    """
    seen: list[str] = []
    for name in names:
        if name.lower().startswith(CORE_PREFIX):
            raise ConfigError(
                f"methods: a row cannot be called {visible(name)}, because files of networks begin with {CORE_PREFIX}. "
                "Choose another name."
            )
        check_row_name("methods", name, [*seen, *([] if name == ORIGINAL else [ORIGINAL])])
        seen.append(name)


def row_spec(run: RunSettings, name: str) -> RowSpec:
    """Return the settings of one row; raise as :func:`make_methods` does."""
    layers = _layers(run, name, seen=())
    method = next((layer.method for layer in reversed(layers) if layer.method), None)
    if method is None:
        raise ConfigError(f"variants.{name} has neither a base nor a method. Give one of them.")
    kind = UnlearningMethod.named(method, f"the row '{name}': method")
    curvature = run.curvature
    settings: dict[str, Any] = {}
    for layer in layers:
        curvature = _lay_over(curvature, layer.curvature, name)
        settings.update(layer.settings)
    grid = next((layer.grid for layer in reversed(layers) if layer.grid), None)
    return RowSpec(kind, curvature, settings, grid)


def make_method(run: RunSettings, name: str, spec: RowSpec) -> UnlearningMethod:
    """Return the method of a row, or a choice among its grid; raise as :func:`make_methods` does."""
    with _named(f"the row '{name}'") if name != spec.kind.registered_name else nullcontext():
        published = spec.kind.from_config(run, spec.curvature, spec.settings)
    if spec.grid is None or run.tune is Tune.authors:
        return published
    candidates = []
    for given in settings_of(spec.grid, run.tune_budget, f"the row '{name}'"):
        of_curvature = {key.removeprefix(_PREFIX): given[key] for key in given if key.startswith(_PREFIX)}
        own = {key: value for key, value in given.items() if not key.startswith(_PREFIX)}
        tried = _lay_over(spec.curvature, of_curvature or None, name)
        candidates.append((given, spec.kind.from_config(run, tried, spec.settings | own)))
    return (SourceFree if run.tune is Tune.source_free else Oracle)(candidates, published)


def _layers(run: RunSettings, name: str, seen: tuple[str, ...]) -> list[RowSettings]:
    """Return the row's configuration, the one it is based on first; ``seen`` are the rows based on it."""
    if name in seen:
        raise ConfigError(f"variants: {' -> '.join((*seen, name))} is a circle of `base`.")
    files = group_options("method")
    if name in run.variants:
        row = _row_settings(run.variants[name], f"variants.{name}")
    elif name in files:
        row = _row_file(config_dir() / "method" / f"{name}.yaml")
    elif name in UnlearningMethod.names():
        row = RowSettings(method=name)
    else:
        key = f"variants.{seen[-1]}.base" if seen else "methods"
        raise ConfigError(unknown(key, name, {*files, *run.variants, *UnlearningMethod.names()}))
    below = _layers(run, row.base, (*seen, name)) if row.base else []
    return [*below, row]


@cache
def _row_file(path: Path) -> RowSettings:
    """Read a file of ``configs/method``, once: the jobs of a sweep share a process."""
    return _row_settings(OmegaConf.load(path), str(path))


def _row_settings(raw: Any, what: str) -> RowSettings:
    plain: Any = OmegaConf.to_container(raw, resolve=True) if OmegaConf.is_config(raw) else raw
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{what}={plain!r} is not a row. It may hold {', '.join(accepted_names(RowSettings))}.")
    for key in plain:
        if key not in accepted_names(RowSettings):
            raise ConfigError(not_a_setting(f"{what}.{key}", "a row", accepted_names(RowSettings)))
    with _named(what):
        return RowSettings(**typed(RowSettings, plain))


def _lay_over(below: CurvatureSettings, layer: Any, name: str) -> CurvatureSettings:
    """Return a row's curvature.

    A mapping adds to what is below. A named file, or another estimator, replaces it, except for settings that are
    inherited: budgets and further data, not definitions.
    """
    if layer is None:
        return below
    if not isinstance(layer, str | Mapping):
        raise ConfigError(f"the row '{name}': curvature={layer!r} must be a name or a mapping.")
    values = _curvature_file(layer, name) if isinstance(layer, str) else dict(layer)
    with _named(f"the row '{name}'"):
        kind = CurvatureSettings.named(str(values.get("estimator", below.estimator)), "curvature.estimator")
        all_of_them = kind is type(below) and isinstance(layer, Mapping)
        kept = {
            one.name: getattr(below, one.name)
            for one in fields(kind)
            if one.init and (all_of_them or meta_of(one).inherited) and one.name in accepted_names(type(below))
        }
        return curvature_settings({**kept, "estimator": kind.registered_name, **values})


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Begin the message of a refused setting with where it stands."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error


def _curvature_file(layer: str, name: str) -> dict[str, Any]:
    files = group_options("curvature")
    if layer in files:
        values = OmegaConf.to_container(OmegaConf.load(config_dir() / "curvature" / f"{layer}.yaml"))
        assert isinstance(values, dict)
        return {str(key): value for key, value in values.items() if key != "defaults"}
    if layer in CurvatureSettings.names():
        return {"estimator": layer}
    raise ConfigError(f"the row '{name}': {unknown('curvature', layer, {*files, *CurvatureSettings.names()})}")
