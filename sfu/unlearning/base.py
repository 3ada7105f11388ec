"""The interface of a method, and what it declares it may see.

A new method is one file in ``sfu/unlearning/methods`` holding one subclass of :class:`UnlearningMethod`, and one yaml
in ``configs/method``. Nothing else is edited.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor

from sfu.errors import ConfigError
from sfu.heads.base import Head
from sfu.request import Access, ForgetRequest, MethodContext, RetainedSet

if TYPE_CHECKING:
    from sfu.settings import RunConfig


@dataclass(frozen=True)
class UnlearningResult:
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
    trials: tuple[UnlearningResult, ...] = ()


class UnlearningMethod(ABC):
    """Turns a request into an unlearned head.

    Attributes:
        settings_used: Groups of the configuration that decide what the method does, beside data, head, loss, forget set
            and its own settings. A narrow list lets a sweep over other groups keep the row.
    """

    settings_used: ClassVar[tuple[str, ...]] = ("curvature", "newton")

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
    def unlearn(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None = None
    ) -> UnlearningResult:
        """Unlearn; ``retained`` is ``None`` unless :attr:`access` is :attr:`Access.RETAINED`."""
