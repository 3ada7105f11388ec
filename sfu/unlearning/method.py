"""The interface of a method, and what it declares it may see.

A new method is one file in ``sfu/unlearning/methods`` holding one subclass of :class:`UnlearningMethod`, and one yaml
in ``configs/method``. Nothing else is edited.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

import torch
from torch import Tensor

from sfu.errors import ConfigError
from sfu.heads.base import Head
from sfu.unlearning.request import ForgetRequest

if TYPE_CHECKING:
    from sfu.settings import RunConfig

Kept = TypeVar("Kept")


class Access(Enum):
    """What a method may see. The runner enforces it."""

    NONE = "none"  # looks at nothing, changes nothing
    FORGET = "forget"  # the request alone: source-free
    STORED = "stored"  # the request and what was stored with the head at training time (no examples)
    RETAINED = "retained"  # the request and the retained data


@dataclass(frozen=True)
class RetainedSet:
    """The retained rows, handed only to methods of :attr:`Access.RETAINED`."""

    features_RD: Tensor
    labels_R: Tensor
    weights_R: Tensor | None = None


@dataclass(frozen=True)
class Tools:
    """What the runner lends to every method.

    Attributes:
        seeds: Derived seeds by name: ``training``, ``perturbation``, ``noise``.
        normalize_rows: Whether features were normalised row by row; further feature files must be too.
        keep_path: Whether iterative methods shall keep where they were after each step, as ``Unlearned.path``.
        memory: What one setting of a method may leave to the others that are tried on the same request.
        progress: Called with (done, total) by long work.
    """

    seeds: dict[str, int] = field(default_factory=dict)
    progress: Callable[[int, int], None] | None = None
    normalize_rows: bool = False
    keep_path: bool = False
    memory: dict[str, Any] | None = None

    def remember(self, key: str, make: Callable[[], Kept]) -> Kept:
        """``make()``, made once for all settings that share :attr:`memory`; ``key`` must name all it depends on."""
        if self.memory is None:
            return make()
        if key not in self.memory:
            self.memory[key] = make()
        return cast(Kept, self.memory[key])

    def generator(self, name: str) -> torch.Generator:
        """A fresh CPU generator for ``name``; the same numbers on every device."""
        return torch.Generator().manual_seed(self.seeds.get(name, 0))


@dataclass(frozen=True)
class Unlearned:
    """What a method returns.

    Attributes:
        head: The head after unlearning.
        applied: Whether all that was asked for was done; ``False`` if the method withheld a step or a batch.
        predicted_gain: Predicted reduction of the squared distance to Retrained, in the retain-Hessian norm.
        details: Scalars worth keeping (chosen damping, solver status, ...).
        note: One sentence for the reader of the table.
        path: Parameters after each step of an iterative method, the start first; evenly thinned where there are many.
        trials: The outcomes of all settings tried, where the choice is left to who may see Retrained.
    """

    head: Head
    applied: bool = True
    predicted_gain: float | None = None
    details: Mapping[str, float | int | str | bool | None] = field(default_factory=dict)
    note: str | None = None
    path: tuple[Tensor, ...] = ()
    trials: tuple[Unlearned, ...] = ()


class UnlearningMethod(ABC):
    """Turns a request into an unlearned head.

    Attributes:
        settings_used: Groups of the configuration that decide what the method does, beside data, head, loss, forget set
            and its own settings; ``None`` for all. A narrow list lets a sweep over other groups keep the row.
    """

    settings_used: ClassVar[tuple[str, ...] | None] = None

    tuning: ClassVar[str | None] = None
    """The rule by which its settings were chosen, if not as published (:mod:`sfu.unlearning.tuning`)."""

    @property
    def whole_classes(self) -> bool:
        """Whether the method can forget whole classes only."""
        return False

    @property
    def access(self) -> Access:
        """What the method may see; source-free unless overridden."""
        return Access.FORGET

    @property
    def augmentations(self) -> tuple[str, ...]:
        """Augmentations of the forget images whose features the method wants as ``request.views_VFD``; none here."""
        return ()

    @classmethod
    def from_config(cls, run: RunConfig, curvature: Any, settings: dict[str, Any]) -> Self:
        """Build from the run's configuration.

        Args:
            run: The whole configuration.
            curvature: The row's own curvature settings, already laid over the run's (a ``CurvatureConfig``).
            settings: The ``settings`` of the method's yaml; by default the constructor's arguments.

        Raises:
            ConfigError: A setting the method does not have.
        """
        import inspect

        accepted = sorted(set(inspect.signature(cls).parameters))
        unknown = sorted(set(settings) - set(accepted))
        if unknown:
            known = f"it takes {', '.join(accepted)}" if accepted else "it takes none"
            raise ConfigError(f"{cls.__name__} has no setting {', '.join(unknown)}; {known}.")
        return cls(**settings)

    def check(self, n_forget: int) -> None:  # noqa: B027
        """Refuse, before anything is trained, a forget set of a size the method cannot handle.

        Raises:
            ConfigError: Naming the setting to change.
        """

    @abstractmethod
    def unlearn(self, request: ForgetRequest, tools: Tools, retained: RetainedSet | None = None) -> Unlearned:
        """Unlearn; ``retained`` is ``None`` unless :attr:`access` is :attr:`Access.RETAINED`."""
