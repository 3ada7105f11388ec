"""The configuration of a run: one dataclass of all groups, its Hydra schema, and the checks that span groups.

Composing and checking a configuration imports no PyTorch.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from enum import Enum
from functools import cache
from typing import Any, cast

from omegaconf import MISSING, DictConfig, OmegaConf

from sfu.config_files import group_options
from sfu.curvature.settings import CurvatureSettings, PsdFitSettings
from sfu.data.datasets.base import Dataset, FeatureDataset, ImageDataset
from sfu.data.datasets.digits import Digits
from sfu.data.settings import (
    AUTO_BACKBONE,
    DEFAULT_FRACTION,
    NO_BACKBONE,
    PAPER_BACKBONE,
    BackboneSettings,
    CanarySettings,
    ForgetSettings,
)
from sfu.errors import ConfigError
from sfu.evaluation.attacks.base import Attack
from sfu.heads.settings import HeadSettings, LinearSettings, Training
from sfu.losses.base import Layout, Loss
from sfu.losses.quadratic import Quadratic
from sfu.reporting.loggers.base import NullLogger, RunLogger
from sfu.reporting.loggers.content import UPLOADED_SETTINGS, picked
from sfu.reporting.published import published_table
from sfu.schema import Choice, Settings, hydra_schema, make, meta_of, setting, typed
from sfu.seeds import SeedSettings
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.settings import NewtonSettings, Tune

PAPER = "paper"
"""The attack of the paper, which every run carries out."""


class Reuse(Enum):
    """When to take cached results of earlier runs, and to cache those of this one."""

    sweeps = "sweeps"
    always = "always"
    never = "never"


@dataclass
class EvaluationSettings(Settings):
    """Settings of the evaluation."""

    prefix = "evaluation"

    membership_splits: int = setting(5, "Stratified splits of the membership attack.", at_least=2)
    trade_off: bool = setting(False, "Record test and forget accuracy after each step of iterative methods.")
    attacks: list[str] = setting([PAPER], "Membership attacks on every row: paper, loss_threshold, entropy, rmia, ...")
    shadows: int = setting(64, "Heads trained on other rows, for attacks that need them.", at_least=8)
    theory: bool = setting(False, "Check the paper's bounds on Newton steps against the retained data.")
    white_box: bool = setting(False, "Reconstruct the forgotten rows from the heads before and after.")
    klom: int = setting(0, "Heads of each ensemble that KLoM compares with retrained ones; 0: no KLoM.", at_least=0)

    def check_settings(self) -> None:
        """Refuse attacks that do not exist, or that are listed twice, and an ensemble without a spread."""
        for name in self.attacks:
            Attack.named(name, "evaluation.attacks")
        if len(set(self.attacks)) != len(self.attacks):
            raise ConfigError(f"evaluation.attacks={self.attacks} lists an attack twice. Name each once.")
        if self.klom == 1:
            raise ConfigError("evaluation.klom=1 is an ensemble without a spread. Give at least 2 heads, or 0.")

    @property
    def has_more_attacks(self) -> bool:
        """Whether there are attacks besides the paper's."""
        return any(name != PAPER for name in self.attacks)


@dataclass
class RunConfig(Settings):
    """The whole configuration of a run. ``dataset``, ``head``, ``loss``, ``curvature`` and ``logger`` are choices."""

    dataset: Dataset = setting(Digits)
    backbone: BackboneSettings = setting(BackboneSettings)
    head: HeadSettings = setting(LinearSettings)
    loss: Loss = setting(Quadratic)
    curvature: CurvatureSettings = setting(PsdFitSettings)
    logger: RunLogger = setting(NullLogger, affects_results=False)
    newton: NewtonSettings = setting(NewtonSettings)
    forget: ForgetSettings = setting(ForgetSettings)
    canaries: CanarySettings = setting(CanarySettings)
    evaluation: EvaluationSettings = setting(EvaluationSettings)
    methods: list[str] = setting([], "Rows of the table.", affects_results=False)
    plugin_methods: bool = setting(
        False, "Add a row for every method of installed plug-ins, as it is by default.", affects_results=False
    )
    variants: dict[str, Any] = setting({}, "Rows of your own, by name.")
    tune: Tune = setting(Tune.authors, "How settings of methods with a grid are chosen.")
    tune_budget: int = setting(9, "Settings tried for every method that has a grid.", at_least=1)
    seed: int = setting(0, "Seed from which all others are derived.", at_least=0, below=2**32)
    seeds: int = setting(
        1,
        "How many seeds to run, from seed on, in one process; one table shows all.",
        at_least=1,
        affects_results=False,
    )
    seed_for: SeedSettings = setting(SeedSettings)
    device: str = setting("auto", "auto, cpu, cuda or cuda:<index>.")
    dtype: str = setting(
        "float64", "Of heads; curvature and solves are always float64.", choices=("float64", "float32")
    )
    threads: int | None = setting(
        None, "CPU threads; null: as many as PyTorch takes by itself.", at_least=1, affects_results=False
    )
    isolate: bool = setting(
        True,
        "Run source-free rows in processes of their own, which can open no other data; false only to debug.",
        affects_results=False,
    )
    published: str | None = setting(
        None, "Table of the paper to set beside the result of a sweep: table_1, ..., table_s2.", affects_results=False
    )
    reuse: Reuse = setting(Reuse.sweeps, "When to take and to add to cached results.", affects_results=False)


_RETRAINED, _AGAIN = "retrained", "retrained_again"

GROUPS: dict[str, type[Choice]] = {
    "dataset": Dataset, "head": HeadSettings, "loss": Loss, "curvature": CurvatureSettings, "logger": RunLogger,
}  # fmt: skip
"""Groups whose members are choices with settings of their own, by the base class."""


def register() -> None:
    """Tell Hydra the schema: ``sfu_schema`` for the run, ``GROUP/schema/NAME`` for each choice.

    A choice without a file in ``configs`` (that of a plug-in, say) is an option of its group, too.
    """
    from hydra.core.config_store import ConfigStore

    OmegaConf.register_new_resolver(
        "multirun_if_several", lambda seeds: "MULTIRUN" if seeds > 1 else None, replace=True
    )
    store = ConfigStore.instance()
    store.store(name="sfu_schema", node=_run_schema())
    store.store(group="backbone/schema", name="backbone", node=hydra_schema(BackboneSettings))
    for group, base in GROUPS.items():
        for name in base.names():
            _register_choice(group, name)


@cache
def _register_choice(group: str, name: str) -> None:
    """Tell Hydra one choice, once in a process: OmegaConf takes its time over each."""
    from hydra.core.config_store import ConfigStore

    store, node = ConfigStore.instance(), hydra_schema(GROUPS[group].named(name))
    store.store(group=f"{group}/schema", name=name, node=node)
    if name not in group_options(group):
        store.store(group=group, name=name, node=node)


def _run_schema() -> type[Any]:
    """Return the schema of :class:`RunConfig`, with groups that any of their members can fill."""
    schema = hydra_schema(RunConfig)
    described = [
        (one.name, Any, MISSING) if one.name in (*GROUPS, "backbone") else (one.name, one.type, one)
        for one in fields(schema)
    ]
    return make_dataclass("RunConfig", described)


def typed_config(config: DictConfig) -> RunConfig:
    """Return a composed configuration as settings, checked, with ``backbone=auto`` and the default fraction resolved.

    Of several seeds of a training that is not exact, the rows also show how far apart two Retrained heads are.

    Raises:
        ConfigError: A key that the chosen dataset, head, loss, estimator or logger does not have, a wrong type, or a
            value out of range.
    """
    run: RunConfig = _from_node(RunConfig, config, "sfu")
    run.backbone.name = choose_backbone(run)
    if not run.canaries.count and not run.forget.is_given():
        run.forget.fraction = DEFAULT_FRACTION
    if run.plugin_methods:
        run.methods += [name for name in UnlearningMethod.names_of_plugins() if name not in run.methods]
    drawn = run.seeds > 1 and run.head.training is not Training.exact
    if drawn and _RETRAINED in run.methods and _AGAIN not in run.methods:
        run.methods.insert(run.methods.index(_RETRAINED) + 1, _AGAIN)
    return run


def _from_node(kind: type[Any], node: DictConfig, what: str) -> Any:
    """Return ``kind`` with the values of a node, and of the nodes in it."""
    values: dict[str, Any] = {}
    hints: Mapping[str, Any] = typing.get_type_hints(kind)
    for key in map(str, node):
        value = node[key]
        hint = hints.get(key)
        if kind is RunConfig and key in GROUPS:
            values[key] = _choice(key, value)
        elif isinstance(value, DictConfig) and isinstance(hint, type) and is_dataclass(hint):
            values[key] = _from_node(hint, value, f"{kind.prefix}.{key}".lstrip("."))
        else:
            values[key] = OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
    return make(kind, typed(kind, values), what)


def _choice(group: str, node: Any) -> Any:
    """Return the member of a group that a node names."""
    if not isinstance(node, DictConfig):
        raise ConfigError(f"{group}={node} is not a choice. Name one of {', '.join(GROUPS[group].names())}.")
    key = GROUPS[group].chosen_by
    if key not in node or OmegaConf.is_missing(node, key):
        raise ConfigError(f"{group}.{key} is missing. Name one of {', '.join(GROUPS[group].names())}.")
    name = str(node[key])
    return _from_node(GROUPS[group].named(name, f"{group}.{key}"), node, f"{group}={name}")


def choose_backbone(run: RunConfig) -> str:
    """Return ``backbone.name``; ``auto`` is none for a dataset of features, the paper's for one of images.

    A head that needs a network prefers images to features.
    """
    if run.backbone.name != AUTO_BACKBONE:
        return run.backbone.name
    images = isinstance(run.dataset, ImageDataset)
    features = isinstance(run.dataset, FeatureDataset)
    return PAPER_BACKBONE if images and (run.head.needs_network or not features) else NO_BACKBONE


def check_run(run: RunConfig) -> None:
    """Check what no single group can tell, before any work starts and without PyTorch.

    Raises:
        ConfigError: Settings of different groups contradict each other.
        DataError: The dataset is missing.
    """
    _check_again(run)
    if not run.methods:
        raise ConfigError("methods=[] leaves nothing to do. Name at least one row.")
    most = 4 * (os.cpu_count() or 1)
    if run.threads is not None and run.threads > most:
        raise ConfigError(f"threads={run.threads} is more than this machine can use. Give at most {most}.")
    if run.published is not None:
        published_table(run.published)
    run.forget.require_files()
    if run.canaries.count and run.forget.is_given():
        raise ConfigError(
            f"canaries.count={run.canaries.count} makes the canaries the forget set, so the settings of forget cannot "
            "name another one. Leave either out."
        )
    if run.forget.parts > 1 and run.tune is Tune.oracle:
        raise ConfigError(
            f"forget.parts={run.forget.parts} does not go with tune=oracle, which chooses by the distance after one "
            "request. Choose tune=authors or tune=source_free."
        )
    check_dataset(run.dataset, run.backbone)
    run.head.check_with(run.dataset, run.backbone)
    if run.head.ledger and run.loss.layout is not Layout.shared:
        raise ConfigError(
            f"head.ledger=true needs loss=quadratic, not {run.loss.name}: sums over forgotten rows do not tell how a "
            "curvature changes that depends on the parameters. Leave head.ledger out, or choose loss=quadratic."
        )


def _check_again(settings: Any) -> None:
    """Check settings that may have been changed since they were made."""
    for one in fields(settings):
        if isinstance(value := getattr(settings, one.name), Settings):
            _check_again(value)
    settings.__post_init__()


def check_dataset(dataset: Dataset, backbone: BackboneSettings) -> None:
    """Refuse a dataset that is missing or does not go with the backbone.

    Raises:
        ConfigError: Features with a backbone, or images without.
        DataError: What must be there is missing.
    """
    if backbone.name == NO_BACKBONE:
        if not isinstance(dataset, FeatureDataset):
            raise ConfigError(
                f"dataset={dataset.name} holds images, and backbone=none takes features as they are. Choose a backbone "
                "(backbone=resnet18, or pixels)."
            )
        if isinstance(dataset, ImageDataset) and dataset.limit_per_class is not None:
            raise ConfigError(
                f"dataset.limit_per_class={dataset.limit_per_class} only applies to images, and backbone=none takes "
                "features as they are. Choose a backbone, or leave it out."
            )
    elif not isinstance(dataset, ImageDataset):
        raise ConfigError(
            f"dataset={dataset.name} holds features, which backbone={backbone.name} cannot read. Use backbone=none."
        )
    dataset.source_files()


def plain(settings: Any, *, effective: bool = False) -> Any:
    """Return settings as JSON values.

    Args:
        settings: Settings, or containers of them.
        effective: Leave out locations and settings that cannot change a result.
    """
    if is_dataclass(settings) and not isinstance(settings, type):
        return {
            one.name: plain(getattr(settings, one.name), effective=effective)
            for one in fields(settings)
            if one.init and not (effective and (meta_of(one).location or not meta_of(one).affects_results))
        }
    if isinstance(settings, Enum):
        return settings.value
    if isinstance(settings, Mapping):
        return {str(key): plain(value, effective=effective) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [plain(value, effective=effective) for value in settings]
    return settings


def public_settings(run: RunConfig) -> dict[str, Any]:
    """Return the settings that loggers are given (:data:`~sfu.reporting.loggers.content.UPLOADED_SETTINGS`).

    Numbers and names of choices are public. Other text may be a path, or come from an environment variable.
    """
    found = picked(_public(run), UPLOADED_SETTINGS)
    found.setdefault("backbone", {})["name"] = run.backbone.name  # a known model, or the run is refused
    return {**found, "methods": list(run.methods)}


def _public(settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in fields(settings):
        value, meta = getattr(settings, one.name), meta_of(one)
        if is_dataclass(value):
            found[one.name] = _public(value)
        elif one.init and not meta.location and _is_public(value, meta.choices):
            found[one.name] = plain(value)
    return found


def _is_public(value: Any, choices: tuple[Any, ...]) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_public(item, choices) for item in value)
    return value in choices if isinstance(value, str) else isinstance(value, bool | int | float | Enum | None)


def neutral_keys() -> list[str]:
    """Return the keys, such as ``threads`` or ``backbone.workers``, whose values cannot change a result."""
    return sorted(set(_neutral(RunConfig, "")))


def _neutral(kind: type[Any], prefix: str) -> Iterator[str]:
    hints = typing.get_type_hints(kind)
    for one in fields(kind):
        hint, key = hints[one.name], f"{prefix}{one.name}"
        if one.init and not meta_of(one).affects_results:
            yield key
        elif kind is RunConfig and one.name in GROUPS:
            for name in GROUPS[one.name].names():
                yield from _neutral(GROUPS[one.name].named(name), f"{key}.")
        elif is_dataclass(hint):
            yield from _neutral(cast(type[Any], hint), f"{key}.")
