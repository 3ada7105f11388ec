"""The interface of an unlearning method, and what it returns.

A method is a frozen dataclass that gives its name and its settings::

    @dataclass(frozen=True)
    class Shrink(UnlearningMethod, name="shrink"):
        factor: float = setting(0.9, "All parameters are multiplied by it.", above=0)

        def unlearn(self, request, context, retained=None):
            return UnlearningResult(request.unlearned_head(self.factor * request.head.parameters_CE))
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from sfu.curvature.settings import CurvatureSettings
from sfu.errors import ConfigError
from sfu.heads.base import Head, lay_out
from sfu.registry import Registered, add_modules
from sfu.request import Access, ForgetRequest, MethodContext, Retained
from sfu.schema import check_fields, make, typed
from sfu.unlearning.settings import RunSettings

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class UnlearningResult:
    """What a method returns.

    Attributes:
        head: The head after unlearning.
        applied: Whether the method did everything it was asked to; ``False`` if it skipped a step or a batch.
        predicted_distance_gain: Predicted reduction of the squared distance to Retrained, in the retain-Hessian norm;
            if the head keeps a ledger, that of all requests so far.
        details: Scalars worth reporting (chosen damping, solver status, ...).
        note: One sentence for the reader of the table.
        path: Parameters after each step of an iterative method, the start first; evenly thinned if there are many.
        trials: The results of all settings tried, if the choice needs the retrained model.
        method: Name of the method, if :func:`sfu.unlearn` called it.
        predicted_share: Predicted share of the squared distance to Retrained that the step removes, or all requests so
            far have removed; ``None`` if it cannot be predicted.
        predicted_share_interval: The interval that this share lies in, 9 times in 10.
    """

    head: Head
    applied: bool = True
    predicted_distance_gain: float | None = None
    details: Mapping[str, float | int | str | bool | tuple[float, ...] | None] = field(default_factory=dict)
    note: str | None = None
    path: tuple[Tensor, ...] = ()
    trials: tuple[UnlearningResult, ...] = ()
    method: str | None = None
    predicted_share: float | None = None
    predicted_share_interval: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        """Lay out the tensors as those of a result from the cache are."""
        object.__setattr__(self, "head", self.head.laid_out())
        object.__setattr__(self, "path", tuple(map(lay_out, self.path)))

    @property
    def predicted_distance(self) -> float | None:
        """Predicted distance to Retrained, of which 1 is that of doing nothing; ``None`` if it is not known."""
        return None if self.predicted_share is None else math.sqrt(1 - self.predicted_share)

    def __repr__(self) -> str:
        """Say in a few lines what was done, without any tensor."""
        gain, share, interval = self.predicted_distance_gain, self.predicted_share, self.predicted_share_interval
        about = {
            "method": self.method, "applied": self.applied,
            "predicted_distance_gain": None if gain is None else f"{gain:.3g}",
            "predicted_share": None if share is None else f"{share:.2f}",
            "predicted_share_interval": None if interval is None else "{:.2f} to {:.2f}".format(*interval),
            "predicted_distance": None if share is None else f"{self.predicted_distance:.2f}",
            "note": self.note, "head": self.head,
        }  # fmt: skip
        lines = [f"  {name}: {value}" for name, value in about.items() if value is not None]
        return "\n".join(["UnlearningResult(", *lines, ")"])


class UnlearningMethod(Registered, ABC, kind="method"):
    """Turns a request into an unlearned head.

    Attributes:
        settings_used: Groups of the configuration that decide what the method does, besides data, head, loss, forget
            set and its own settings: ``curvature``, ``newton``. A short list lets a sweep over other groups reuse the
            row. ``None`` means none of them, or both if the method has a :meth:`from_config` of its own.
        tuning: The rule that chose its settings, if they are not as published (:mod:`sfu.unlearning.tuning`).
    """

    settings_used: ClassVar[tuple[str, ...] | None] = None
    tuning: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: The message names the key, the value and what is accepted.
        """
        check_fields(self, f"{self.registered_name}: ")

    @property
    def method_name(self) -> str:
        """The name that configurations give the method."""
        return self.registered_name

    @property
    def whole_classes(self) -> bool:
        """Whether the method can only forget whole classes."""
        return False

    @property
    def access(self) -> Access:
        """What the method may see; source-free unless overridden."""
        return Access.FORGET

    @property
    def augmentations(self) -> tuple[str, ...]:
        """Augmentations of the forget images whose features the method wants as ``request.views_VFD``."""
        return ()

    @property
    def files(self) -> tuple[str, ...]:
        """Files that :meth:`unlearn` reads. A source-free method can read no others, nor any of the dataset's."""
        return ()

    @classmethod
    def groups_used(cls) -> tuple[str, ...]:
        """Return :attr:`settings_used`, with its default resolved."""
        if cls.settings_used is not None:
            return cls.settings_used
        default = vars(UnlearningMethod)["from_config"].__func__
        return () if getattr(cls.from_config, "__func__", None) is default else ("curvature", "newton")

    @classmethod
    def from_config(cls, run: RunSettings, curvature: CurvatureSettings, settings: dict[str, Any]) -> Self:
        """Build from the run's configuration.

        Args:
            run: The whole configuration.
            curvature: The row's own curvature settings, already merged with the run's.
            settings: The ``settings`` of the method's yaml; by default the fields of the dataclass.

        Raises:
            ConfigError: The method does not have one of the settings, or is no dataclass.
        """
        if "__dataclass_fields__" not in vars(cls):
            raise ConfigError(
                f"the method '{cls.registered_name}' ({cls.__module__}.{cls.__qualname__}) is not a dataclass, so its "
                "settings are unknown. Write @dataclass(frozen=True) above the class."
            )
        return make(cls, typed(cls, settings), f"method={cls.registered_name}")

    def check(self, n_forget: int) -> None:
        """Refuse, before anything is trained, a forget set of a size the method cannot handle.

        Raises:
            ConfigError: The message names the setting to change.
        """

    @abstractmethod
    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        """Unlearn; ``retained`` is ``None`` unless :attr:`access` is :attr:`Access.RETAINED`.

        Raises:
            SourceFreeError: The method needs the retained data, and none were given.
            DataError: The retained data are not the training set without the forget set.
            ConfigError: The method cannot handle this request or head.
            DivergedError: A descent has left for infinity.
            SolverError: The method finds no result.
        """


add_modules(UnlearningMethod, "sfu.unlearning.methods")
add_modules(UnlearningMethod, "sfu.unlearning.experimental")
