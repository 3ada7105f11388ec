"""Settings of rows: the Newton step, a row's own configuration, and the tuning. It does not import PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Protocol

from sfu.curvature.settings import CurvatureSettings
from sfu.heads.recipe import Reference
from sfu.heads.settings import HeadSettings
from sfu.losses.base import Loss
from sfu.schema import Settings, setting


class Tune(Enum):
    """How the settings of methods with a grid of them are chosen; see :mod:`sfu.unlearning.tuning`."""

    authors = "authors"
    source_free = "source_free"
    oracle = "oracle"


@dataclass
class NewtonSettings(Settings):
    """Settings of every Newton step."""

    prefix: ClassVar[str] = "newton"

    noise_sigma: float = setting(0.0, "Standard deviation of Gaussian noise added to every parameter.", at_least=0)
    steps: int = setting(1, "Newton steps; the curvature is evaluated again before each.", at_least=1)
    batches: int = setting(1, "Forget in so many parts, one after another.", at_least=1)
    reference: Reference = setting(
        Reference.same_recipe, "Where steps from a head that was stopped early lead: same_recipe, or the optimum."
    )


@dataclass
class RowSettings:
    """A row of the table: a file of ``configs/method``, or an entry of ``variants``.

    Attributes:
        base: The row to start from; for ``variants`` only.
        method: Name of the method.
        curvature: A file of ``configs/curvature``, a mapping of keys, or ``None`` for the run's.
        settings: Of the method itself.
        grid: For ``tune``: lists of values to try, by setting (or ``curvature.KEY``).
    """

    base: str | None = None
    method: str | None = None
    curvature: Any = None
    settings: dict[str, Any] = field(default_factory=dict)
    grid: dict[str, Any] = field(default_factory=dict)


class RunSettings(Protocol):
    """What rows need of the configuration of a run."""

    head: HeadSettings
    loss: Loss
    dtype: str
    curvature: CurvatureSettings
    newton: NewtonSettings
    methods: list[str]
    variants: dict[str, Any]
    tune: Tune
    tune_budget: int
