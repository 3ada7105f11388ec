"""Estimate the time and memory of a run before its long work, and refuse a run that cannot fit.

The costs of the stages are formulas in the sizes (:mod:`sfu.experiment.costs`), and the rates of the machine are
measured (:mod:`sfu.experiment.work`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from sfu.curvature.observations import DEFAULT_LOSSES, enough_gradients
from sfu.curvature.settings import Measurement, PsdFitSettings
from sfu.data.datasets.base import ImageDataset
from sfu.data.feature_data import FeatureData
from sfu.data.raw_arrays import Shape
from sfu.data.settings import DEFAULT_FRACTION, NO_BACKBONE
from sfu.data.split import ForgetSplit
from sfu.errors import ConfigError
from sfu.experiment.config import RunConfig
from sfu.experiment.costs import (
    digests,
    evaluation,
    fit_to_losses,
    folds,
    loading,
    reduced_width,
    shadows,
    training,
    unlearned_plus,
)
from sfu.experiment.work import Held, Rates, Remedy, Sizes, Stage
from sfu.files import human_size
from sfu.heads.settings import LinearSettings, Training
from sfu.lazy import torch
from sfu.losses.base import Layout
from sfu.operators.plan import available_memory, plan_structure
from sfu.operators.structure import Structure
from sfu.request import Access
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.methods.baselines import Original
from sfu.unlearning.methods.newton import Newton
from sfu.unlearning.methods.retrained import Retrained

LONG = 10.0
"""Shorter runs are not announced, unless they need half of the memory."""
PROGRAM_BYTES = 512 * 2**20  # Python and PyTorch
_PROCESS = 0.25  # seconds for the process of a source-free row
_FORGET_HESSIANS = ("closed_form", "ledoit_wolf", "oas")


@dataclass(frozen=True)
class Estimate:
    """What a run takes.

    Attributes:
        seconds: Wall time.
        memory: Largest number of bytes in use at a time, Python and PyTorch included.
        uncounted: Parts whose cost is not known.
    """

    seconds: float
    memory: float
    uncounted: tuple[str, ...] = ()

    def __str__(self) -> str:
        more = f"; not counted: {', '.join(self.uncounted)}" if self.uncounted else ""
        return f"expects about {_shown(self.seconds)} and {human_size(self.memory)} of memory{more}"

    def as_json(self) -> dict[str, float]:
        """Return what ``metrics.json`` records."""
        return {"seconds": self.seconds, "memory_mb": self.memory / 2**20}

    @property
    def worth_telling(self) -> bool:
        """Whether it is long, or takes half of the memory."""
        return self.seconds >= LONG or self.memory > available_memory(torch.device("cpu")) / 2


@cache
def _rates_of(device: Any) -> Rates:
    """Measure a device once for all jobs of a process."""
    return Rates.measured(device)


def _shown(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def sizes_of(data: FeatureData, split: ForgetSplit, config: RunConfig) -> Sizes:
    """Return the sizes of loaded data."""
    return Sizes(
        data.n_train, split.forget_F.numel(), len(data.test_labels_T), data.n_features, data.n_classes,
        bias=config.head.bias, itemsize=data.train_features_ND.element_size(),
    )  # fmt: skip


def sizes_of_shape(shape: Shape, config: RunConfig) -> Sizes:
    """Return the sizes of data that are not loaded; whole classes are taken to be equally large."""
    forget, share = config.forget, config.forget.fraction or DEFAULT_FRACTION
    if forget.classes is not None:
        share = (forget.fraction or 1.0) * len(forget.classes) / shape.classes
    count = config.canaries.count or round(share * shape.rows)
    return Sizes(
        shape.rows, min(max(count, 1), shape.rows - 1), shape.test, shape.features, shape.classes,
        bias=config.head.bias, itemsize=shape.itemsize,
    )  # fmt: skip


def stages_of(
    config: RunConfig, sizes: Sizes, methods: Mapping[str, UnlearningMethod], device: Any, done: Collection[str] = ()
) -> tuple[list[Stage], tuple[str, ...]]:
    """Return what a run will do once its data are loaded, and what has no formula.

    Args:
        config: The configuration; its head must be linear.
        sizes: Of the data.
        methods: The methods by row name.
        device: Where it computes.
        done: Names of cached results: ``head`` and rows.

    Raises:
        ConfigError: A matrix that was asked for does not fit the memory; the message names a cheaper form.
    """
    layout, uncounted = config.loss.layout, []
    stages = [Stage("digests", (digests(sizes),)), loading(sizes)]  # the data are loaded again for the evaluation
    if "head" not in done:
        trained = _training(config, sizes, "training", sizes.rows, device)
        stages += [trained] if trained else []
        uncounted += [] if trained else ["training"]
    steps: dict[str, Stage] = {}
    for name, method in methods.items():
        if name in done or isinstance(method, Original):
            continue
        found = _row(config, sizes, name, method, layout, device)
        if found is None:
            uncounted.append(f"the row {name}")
            continue
        steps[name] = found
        stages.append(found)
    stages.append(evaluation(sizes, len(methods)))
    if config.evaluation.has_more_attacks:
        if layout is Layout.shared and config.head.training is Training.exact:
            own = tuple(one for name, one in steps.items() if not isinstance(methods[name], Retrained))
            own = own if "ulira" in config.evaluation.attacks else ()
            stages.append(shadows(sizes, config.evaluation.shadows, bool(own), own))
        else:
            uncounted.append("evaluation.attacks")
    uncounted += [f"evaluation.{key}" for key in ("klom", "theory", "white_box") if getattr(config.evaluation, key)]
    return stages, tuple(uncounted)


def _training(config: RunConfig, sizes: Sizes, name: str, count: int, device: Any) -> Stage | None:
    if config.head.training is not Training.exact or not isinstance(config.head, LinearSettings):
        return None
    plan = plan_structure(config.loss.layout, sizes.classes, sizes.width, count, device)
    return training(name, sizes, count, plan, config.loss.layout)


def _row(
    config: RunConfig, sizes: Sizes, name: str, method: UnlearningMethod, layout: Layout, device: Any
) -> Stage | None:
    """Return the cost of a row; ``None`` if it has no formula."""
    if isinstance(method, Retrained):
        return _training(config, sizes, name, sizes.retain, device)
    if not isinstance(method, Newton) or method.steps > 1 or method.batches > 1 or config.forget.parts > 1:
        return None
    settings = method.curvature
    if settings.augment or settings.unlabelled:
        return None
    classes, width = sizes.classes, sizes.width
    if method.access is Access.RETAINED and settings.estimator == "exact":
        return unlearned_plus(
            name, sizes, plan_structure(layout, classes, width, sizes.retain, device, settings.structure)
        )
    if isinstance(settings, PsdFitSettings) and settings.measurement is Measurement.loss:
        structure = Structure.shared
        if layout is Layout.dense or settings.per_class or settings.structure is not Structure.auto:
            structure = plan_structure(layout, classes, width, sizes.forget, device, settings.structure).structure
            structure = Structure.blocks if structure is Structure.products else structure
        return fit_to_losses(name, sizes, settings, settings.perturbations or DEFAULT_LOSSES, structure)
    if not isinstance(settings, PsdFitSettings) and settings.estimator not in _FORGET_HESSIANS:
        return None
    small = reduced_width(sizes) or width
    given = settings.structure
    plan = plan_structure(layout, classes, small, sizes.forget, device, given, copies=20, validated=True)
    if isinstance(settings, PsdFitSettings) and settings.perturbations is not None:
        own = plan_structure(layout, classes, width, sizes.forget, device, given, copies=20, validated=True)
        if settings.perturbations < enough_gradients(settings, classes, width, own.structure):
            return None  # a fit whose steps depend on the data
    return folds(name, sizes, plan, small)


def expect(
    config: RunConfig, sizes: Sizes, methods: Mapping[str, UnlearningMethod], device: Any, done: Collection[str] = ()
) -> Estimate:
    """Estimate what a run takes once its data are loaded; see :func:`stages_of`.

    Raises:
        ConfigError: It does not fit this machine's memory; the message names the option that would.
    """
    stages, uncounted = stages_of(config, sizes, methods, device, done)
    if device.type == "cpu":  # the data of a GPU are elsewhere, and plans of matrices know its memory
        refuse_what_cannot_fit(config, sizes, stages, available_memory(device))
    isolated = config.isolate and sum(
        method.access is not Access.RETAINED for name, method in methods.items() if name not in done
    )
    rates = _rates_of(device)
    seconds = sum(map(rates.seconds, stages)) + _PROCESS * isolated
    memory = PROGRAM_BYTES * (1 + bool(isolated)) + max(stage.size for stage in stages)
    return Estimate(seconds, memory, uncounted)


def refuse_what_cannot_fit(config: RunConfig, sizes: Sizes, stages: Iterable[Stage], memory: float) -> None:
    """Refuse a run one of whose stages needs more than ``memory`` bytes.

    Raises:
        ConfigError: The message names the stage, what there is, and the option that would fit.
    """
    worst = max(stages, key=lambda stage: max(stage.size, 2 * _of_fits(stage)))
    need = PROGRAM_BYTES + worst.size
    if need <= memory and 2 * _of_fits(worst) <= memory:  # a fit may take half, see sfu.curvature.observations
        return
    remedies = [
        text
        for held in sorted(worst.held, key=lambda one: -one.size)
        if (text := _remedy(config, sizes, worst, held, memory - PROGRAM_BYTES)) is not None
    ]
    largest = max(worst.held, key=lambda one: one.size)
    raise ConfigError(
        f"{_source(config, sizes)}: the stage '{worst.name}' needs about {human_size(need)}, of which {largest.what} "
        f"take {human_size(largest.size)}, but this machine has {human_size(memory)}. "
        + (remedies[0] if remedies else f"Use a machine with {human_size(need)}.")
    )


def _of_fits(stage: Stage) -> float:
    return sum(one.size for one in stage.held if one.remedy is Remedy.perturbations)


def _source(config: RunConfig, sizes: Sizes) -> str:
    return f"{config.dataset.source} ({sizes.rows + sizes.test:,} rows of {sizes.features:,} features)"


def _remedy(config: RunConfig, sizes: Sizes, stage: Stage, held: Held, memory: float) -> str | None:
    """Return the setting by which a stage would fit if this array, or all that grow with the rows, were smaller."""
    if held.remedy is Remedy.perturbations:
        left = min(memory - (stage.size - held.size), memory / 2)
        square, linear = (held.size - held.linear) / held.number**2, held.linear / held.number
        count = int((math.sqrt(linear**2 + 4 * square * max(0.0, left)) - linear) / (2 * square))
        return f"Set curvature.perturbations={_rounded(count)}, which fits." if count >= 1 else None
    if held.remedy is Remedy.rows:
        fixed = sum(one.size for one in stage.held if one.remedy is not Remedy.rows)
        rows = int((sizes.rows + sizes.test) * max(0.0, memory - fixed) / (stage.size - fixed))
        if rows < sizes.classes:
            return None
        if isinstance(config.dataset, ImageDataset) and config.backbone.name != NO_BACKBONE:
            return f"Set dataset.limit_per_class={max(1, _rounded(rows) // (2 * sizes.classes))}, which fits."
        narrower = ", or in float32," if sizes.itemsize == 8 else ""
        return f"Give a file of at most {_rounded(rows):,} rows{narrower} or use a machine with more memory."
    return None


def _rounded(count: int) -> int:
    """Round down to two digits."""
    unit = 10 ** max(0, len(str(count)) - 2)
    return count // unit * unit
