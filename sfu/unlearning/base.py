"""The interface of an unlearning method.

A method is a frozen dataclass that gives its name and its settings::

    @dataclass(frozen=True)
    class Shrink(UnlearningMethod, name="shrink"):
        factor: float = setting(0.9, "All parameters are multiplied by it.", above=0)

        def unlearn(self, request, context, retained=None):
            return UnlearningResult(request.unlearned_head(self.factor * request.head.parameters_CE))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Self

from sfu.curvature.settings import CurvatureSettings
from sfu.errors import ConfigError
from sfu.registry import Registered, add_modules
from sfu.request import Access, ForgetRequest, MethodContext, Retained
from sfu.schema import check_fields, make, typed
from sfu.unlearning.result import UnlearningResult
from sfu.unlearning.settings import RunSettings

if TYPE_CHECKING:
    pass


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
