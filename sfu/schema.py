"""Settings: dataclasses whose fields check themselves and say what they mean.

A setting is declared once, as a field of the class it configures::

    @dataclass(frozen=True)
    class NegGrad(UnlearningMethod, name="neg_grad"):
        lr: float = setting(1e-4, "Learning rate.", above=0)

Its metadata hold the meaning, the accepted range, whether its value can change a result (``affects_results``) and
whether a row that names a curvature of its own still takes it from the run (``inherited``).
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import re
import typing
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from numbers import Integral, Real
from types import UnionType
from typing import Any, ClassVar, Self, TypeVar, cast

from sfu.errors import ConfigError
from sfu.registry import Registered, did_you_mean, unknown

T = TypeVar("T")
_META = "sfu"
_ELEMENTS = {int: "whole numbers", float: "numbers", str: "texts"}


@dataclass(frozen=True)
class Meta:
    """What is known of a setting besides its type and default.

    Attributes:
        help: One sentence, with the unit.
        at_least: Smallest accepted number.
        above: Numbers must be greater.
        at_most: Largest accepted number.
        below: Numbers must be smaller.
        choices: Accepted values.
        affects_results: Whether another value can lead to another result.
        inherited: Whether rows with a curvature of their own take it from the run.
        location: Whether it names a file or folder, whose content and not its name decides results.
    """

    help: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] = ()
    affects_results: bool = True
    inherited: bool = False
    location: bool = False


def setting(default: Any = dataclasses.MISSING, help: str = "", **meta: Any) -> Any:
    """Return a dataclass field with metadata; see :class:`Meta` for the keywords.

    Args:
        default: The default. Lists, dictionaries and settings are copied for every instance.
        help: What the setting means, in one sentence.
        meta: Further attributes of :class:`Meta`.
    """
    metadata = {_META: Meta(help, **meta)}
    if default is dataclasses.MISSING or isinstance(default, str | int | float | bool | tuple | Enum | None):
        return field(default=default, metadata=metadata)
    make: Callable[[], Any] = default if isinstance(default, type) else (lambda: copy.deepcopy(default))
    return field(default_factory=make, metadata=metadata)


def meta_of(one: dataclasses.Field[Any]) -> Meta:
    """Return the metadata of a field; defaults for one that was not made by :func:`setting`."""
    found = one.metadata.get(_META)
    return found if isinstance(found, Meta) else Meta()


class Settings:
    """Base of dataclasses whose fields are settings.

    Attributes:
        prefix: How messages name the fields: ``head`` gives ``head.l2``; empty for the bare name.
    """

    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Check every field against its metadata, then call :meth:`check_settings`.

        Raises:
            ConfigError: The message names the key, the value and what is accepted.
        """
        check_fields(self, self.prefix)
        self.check_settings()

    def check_settings(self) -> None:
        """Check what no single field can tell. Override this where settings depend on each other.

        Raises:
            ConfigError: Settings contradict each other.
        """


class Choice(Settings, Registered):
    """Base of settings of which a group has several kinds: datasets, heads, losses, estimators, loggers.

    Attributes:
        chosen_by: The key that names the member; its value is fixed in each of them.
    """

    chosen_by: ClassVar[str] = "name"

    def __init_subclass__(cls, *, name: str | None = None, **options: Any) -> None:
        """Register a member, and fix the field that names it."""
        super().__init_subclass__(name=name, **options)
        if name is not None:
            setattr(cls, cls.chosen_by, setting(name, "The choice itself.", choices=(name,)))
            cls.__annotations__ = {**inspect.get_annotations(cls), cls.chosen_by: "str"}

    @classmethod
    def make(cls, name: str, **given: Any) -> Self:
        """Return the member ``name`` with the settings ``given``; names of choices and whole numbers are converted.

        Raises:
            ConfigError: An unknown name or key, a wrong type, or a value out of range.
        """
        kind = cls.named(name, cls.prefix)
        return make(kind, typed(kind, given), f"{cls.prefix}={name}")


def full_key(prefix: str, name: str) -> str:
    """``head`` and ``l2`` give ``head.l2``; a prefix that ends in ``: `` (a method's) is kept as it is."""
    return f"{prefix}{'' if not prefix or prefix.endswith(' ') else '.'}{name}"


def plain_value(value: Any) -> Any:
    """Return the Python number in a NumPy scalar or a tensor without axes, and the list in a longer array or tensor.

    Anything else is returned as it is.
    """
    axes = getattr(value, "ndim", None)
    if axes is None or not (hasattr(value, "item") and hasattr(value, "tolist")):
        return value
    return value.item() if axes == 0 else value.tolist()


def check_fields(settings: Any, prefix: str) -> None:
    """Check the fields of a dataclass against their metadata; ``None`` is accepted where the type allows it.

    Numbers of NumPy and PyTorch are replaced by those of Python.

    Raises:
        ConfigError: The message names the key, the value and what is accepted.
    """
    hints = _hints(type(settings))
    for one in fields(settings):
        value = getattr(settings, one.name)
        accepted = _types(hints[one.name])
        if accepted <= {int, float, bool, type(None)} and (number := plain_value(value)) is not value:
            object.__setattr__(settings, one.name, value := number)  # settings may be frozen
        if value is None and type(None) in accepted:
            continue
        key, meta = full_key(prefix, one.name), meta_of(one)
        if accepted <= {int, float, type(None)} and accepted & {int, float}:
            check_number(key, value, meta, whole=float not in accepted)
        elif bool in accepted and len(accepted) == 1 and not isinstance(value, bool):
            raise ConfigError(f"{key}={value}. Choose true or false.")
        if meta.choices and value not in meta.choices:
            raise ConfigError(unknown(key, _text(value), map(_text, meta.choices)))


_known_hints: dict[type[Any], dict[str, Any]] = {}


def _hints(kind: type[Any]) -> dict[str, Any]:
    """Return the types of the fields of a dataclass; a run checks the same few classes hundreds of times."""
    if kind not in _known_hints:
        _known_hints[kind] = typing.get_type_hints(kind)
    return _known_hints[kind]


def _text(value: Any) -> str:
    return str(value.value if isinstance(value, Enum) else value)


def check_number(key: str, value: Any, meta: Meta, *, whole: bool = False) -> None:
    """Refuse what is not a finite number in the accepted range.

    Raises:
        ConfigError: The message names the key, the value and what is accepted.
    """
    good = isinstance(value, Integral) or (isinstance(value, Real) and not whole and math.isfinite(value))
    if not good or isinstance(value, bool) or not _inside(value, meta):
        raise ConfigError(f"{key}={value}. Give {_number_wanted(meta, whole)}.")


def _number_wanted(meta: Meta, whole: bool) -> str:
    limits = [
        f"{word} {limit if isinstance(limit, int) else format(limit, 'g')}"
        for word, limit in (
            ("of at least", meta.at_least), ("above", meta.above), ("at most", meta.at_most), ("below", meta.below),
        )
        if limit is not None
    ]  # fmt: skip
    return f"a {'whole' if whole else 'finite'} number {' and '.join(limits)}".strip()


def wrong_type(key: str, value: object, hint: Any, meta: Meta) -> str:
    """Say that the value of a setting has the wrong type, and what is accepted.

    Args:
        key: The setting.
        value: What was given, as text or as itself.
        hint: The type of the field.
        meta: Its metadata.
    """
    value, accepted = "null" if value is None else value, _types(hint)
    null = ", or null" if type(None) in accepted else ""
    kind = next(one for one in accepted if one is not type(None))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return unknown(key, value, [choice.value for choice in kind])
    if dataclasses.is_dataclass(kind):
        names = ", ".join(full_key(key, name) for name in accepted_names(cast(type[Any], kind)))
        return f"{key}={value} is one value for a group of settings. Set one of them: {names}."
    if typing.get_origin(kind) is list:
        (element,) = typing.get_args(kind)
        if str(value).startswith("["):
            return f"{key}={value} does not hold {_ELEMENTS.get(element, 'values')} alone. Give a list of them{null}."
        return f"{key}={value} is not a list. Write {key}=[{value}]{null and f', or {key}=null'}."
    if typing.get_origin(kind) is dict:
        return f"{key}={value} is not a mapping. Write {key}={{name: value}}."
    if kind is bool:
        return f"{key}={value} is neither true nor false. Choose true or false{null}."
    if kind in (int, float):
        whole = kind is int
        return f"{key}={value} is not a {'whole ' * whole}number. Give {_number_wanted(meta, whole)}{null}."
    return f"{key}={value} is not text. Give one text{null}."


def _inside(value: float, meta: Meta) -> bool:
    return (
        (meta.at_least is None or value >= meta.at_least)
        and (meta.above is None or value > meta.above)
        and (meta.at_most is None or value <= meta.at_most)
        and (meta.below is None or value < meta.below)
    )


def _types(hint: Any) -> set[Any]:
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return set(typing.get_args(hint))
    return {hint}


def accepted_names(kind: type[Any]) -> list[str]:
    """Names of the fields that the constructor of a dataclass takes."""
    return [one.name for one in fields(kind) if one.init]


def make(kind: type[T], given: Mapping[str, Any], what: str) -> T:
    """Return ``kind(**given)``.

    Args:
        kind: A dataclass.
        given: Values by field name.
        what: How messages name it, such as ``loss=quadratic``.

    Raises:
        ConfigError: A key is not a setting of ``kind``; the message lists those that are.
    """
    accepted = accepted_names(kind)
    for key in given:
        if key not in accepted:
            raise ConfigError(not_a_setting(full_key(getattr(kind, "prefix", ""), str(key)), what, accepted))
    return kind(**given)


def not_a_setting(key: str, what: str, accepted: list[str], owners: Sequence[str] = ()) -> str:
    """Say that ``what`` has no setting ``key``, what it takes, and which other choices have the key (``owners``)."""
    takes = f"It takes {', '.join(accepted)}." if accepted else "It has no settings."
    parent, dot, name = key.rpartition(".")
    similar = did_you_mean(name, accepted, f"{parent}{dot}")
    return f"{key} is not a setting of {what}. {takes}" + (f" {' or '.join(owners)} takes it." if owners else similar)


def hydra_schema(kind: type[Any], only: Container[str] | None = None) -> type[Any]:
    """Return a plain dataclass with the settings of ``kind``, for OmegaConf to check keys and types against.

    ``kind`` itself may be frozen or abstract, which OmegaConf takes for read-only or refuses.

    Args:
        kind: A dataclass.
        only: Names of the fields to take; all by default.
    """
    hints = _hints(kind)
    taken = [one for one in fields(kind) if one.init and (only is None or one.name in only)]
    return dataclasses.make_dataclass(kind.__name__, [(one.name, hints[one.name], _plain(one)) for one in taken])


def _plain(one: dataclasses.Field[Any]) -> Any:
    if one.default_factory is not dataclasses.MISSING:
        return field(default_factory=one.default_factory)
    return field(default="???" if one.default is dataclasses.MISSING else one.default)


def typed(kind: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values to the types of the fields of ``kind``, as OmegaConf does: names become choices, ints floats.

    Keys that ``kind`` does not have are passed on as they are.

    Raises:
        ConfigError: A value has the wrong type.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    hints, by_name = _hints(kind), {one.name: one for one in fields(kind) if one.init}
    plain = {
        key: plain_value(value)
        for key, value in given.items()
        if key in by_name and not dataclasses.is_dataclass(value)
    }
    try:
        node = OmegaConf.create(plain, flags={"allow_objects": True})
        converted = vars(OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(hydra_schema(kind, plain)), node)))
    except (OmegaConfBaseException, ValueError) as error:
        prefix = getattr(kind, "prefix", "")
        name = re.split(r"[.\[]", str(getattr(error, "full_key", None) or ""))[0]
        if name not in by_name:
            raise ConfigError(f"{prefix}: {str(error).splitlines()[0].rstrip('.')}.") from error
        problem = wrong_type(full_key(prefix, name), plain[name], hints[name], meta_of(by_name[name]))
        raise ConfigError(problem) from error
    return {**given, **converted}
