"""One registry for everything that can be added: methods, datasets, losses, heads, estimators, backbones, loggers, ...

A kind is declared once, by its base class; a member is a subclass that gives its name::

    class Dataset(Registered, kind="dataset"): ...

    class Digits(Dataset, name="digits"): ...

Members are found where they are defined. sfu imports the modules of its own plug-in packages (:func:`add_modules`) and
the modules that other packages name as entry points of the group ``sfu.plugins``::

    [project.entry-points."sfu.plugins"]
    my_package = "my_package.my_method"

Nothing is looked up by a path or a class that a configuration file names.
"""

from __future__ import annotations

import difflib
import importlib.util
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Self

from sfu.errors import ConfigError

ENTRY_POINTS = "sfu.plugins"
_sources: list[tuple[type[Registered], str, tuple[str, ...]]] = []
"""Modules and packages of sfu that are still to be imported for a kind, and what is left out of them."""
_groups = [ENTRY_POINTS]
_kinds: list[type[Registered]] = []
_elsewhere: dict[str, Mapping[str, str]] = {}
"""The module of every member by kind and name, once :func:`use_members` has said so."""


class Registered:
    """Base of all kinds.

    Attributes:
        kind: What this is a kind of, as configurations call it, such as ``dataset``.
        registered_name: The member's own name; empty for a base class.
        synonyms: Names that others give to members, in lower case and of letters alone, for messages.
    """

    kind: ClassVar[str] = ""
    registered_name: ClassVar[str] = ""
    synonyms: ClassVar[Mapping[str, str]] = {}
    _members: ClassVar[dict[str, type[Any]]]

    def __init_subclass__(cls, *, kind: str | None = None, name: str | None = None, **options: Any) -> None:
        """Declare a kind (``kind=``) or a member of one (``name=``); a subclass with neither is a shared base.

        Raises:
            ConfigError: Another class of the kind has this name already.
        """
        super().__init_subclass__(**options)
        if kind is not None:
            cls.kind, cls._members = kind, {}
            _kinds.append(cls)
        cls.registered_name = name or ""
        if name is not None:
            known = cls._members.setdefault(name, cls)
            if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ConfigError(
                    f"two classes register the {cls.kind} '{name}': {known.__module__}.{known.__qualname__} and "
                    f"{cls.__module__}.{cls.__qualname__}. Rename one of them."
                )
            cls._members[name] = cls  # dataclass(slots=True) makes the class anew

    @classmethod
    def names(cls) -> list[str]:
        """Names of all members of this kind, sorted."""
        load_plugins(cls)
        return sorted({*cls._members, *_elsewhere.get(cls.kind, ())})

    @classmethod
    def names_of_plugins(cls) -> list[str]:
        """Names of the members that other packages have registered, sorted."""
        names = cls.names() if has_plugins() else []
        return [name for name in names if cls.named(name).__module__.partition(".")[0] != "sfu"]

    @classmethod
    def named(cls, name: str, key: str | None = None) -> type[Self]:
        """Return the member ``name``.

        Args:
            name: What to look up.
            key: The setting that gave the name, for the message; by default the kind.

        Raises:
            ConfigError: There is no such member; the message lists those there are.
        """
        load_plugins(cls)
        if name not in cls._members and name in (modules := _elsewhere.get(cls.kind, {})):
            importlib.import_module(modules[name])
        if name not in cls._members:
            raise ConfigError(unknown(key or cls.kind, name, cls.names(), cls.synonyms))
        return cls._members[name]


def unknown(key: str, value: object, accepted: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str:
    """Say that ``key=value`` is unknown, what is accepted, and which of it is meant by a synonym, or nearest."""
    names = sorted(accepted)
    meant = (synonyms or {}).get("".join(filter(str.isalpha, str(value).lower())))
    hint = did_you_mean(str(value), names) if meant is None else f" Did you mean {meant}?"
    return f"{key}={value} is unknown. Choose one of {', '.join(names)}.{hint}"


def did_you_mean(given: str, accepted: Sequence[str], prefix: str = "") -> str:
    """A sentence that names the accepted word nearest to what was given, after ``prefix``; empty if none is near."""
    cutoff = 0.5 if len(given) < 4 else 0.6  # l3 is as near to l2 as two letters can be
    near = difflib.get_close_matches(given, accepted, n=1, cutoff=cutoff)
    return f" Did you mean {prefix}{near[0]}?" if near else ""


def add_modules(kind: type[Registered], source: str, *, skip: Sequence[str] = ()) -> None:
    """Have a module, or all modules of a package but some, imported when a name of ``kind`` is first asked for."""
    if not _elsewhere:
        _sources.append((kind, source, tuple(skip)))


def load_plugins(kind: type[Registered] | None = None) -> None:
    """Import every module that defines members: those of sfu, then those that installed packages name.

    Args:
        kind: Import only the modules of sfu that define members of this kind, which is quicker; by default, all.

    Raises:
        ConfigError: A plug-in of an installed package cannot be imported; the message names it.
    """
    while wanted := [one for one in _sources if kind is None or issubclass(kind, one[0])]:
        _sources.remove(wanted[0])
        for name in _modules_of(*wanted[0][1:]):
            importlib.import_module(name)
    while _groups:
        group = _groups.pop()
        for entry in metadata.entry_points(group=group):
            try:
                entry.load()
            except Exception as error:
                _groups.append(group)  # the next look-up fails, too
                raise ConfigError(
                    f"the plug-in '{entry.name}' ({entry.value}) cannot be imported ({type(error).__name__}: {error}). "
                    "Repair or uninstall the package that declares it."
                ) from error


def member_modules() -> dict[str, dict[str, str]]:
    """Return the module of every member, by kind and name."""
    load_plugins()
    return {kind.kind: {name: one.__module__ for name, one in kind._members.items()} for kind in _kinds}


def use_members(modules: Mapping[str, Mapping[str, str]]) -> None:
    """Have this process find members only where another one has found them, and import each when it is asked for."""
    _elsewhere.update(modules)
    _sources.clear()
    _groups.clear()


def _modules_of(source: str, skipped: Sequence[str]) -> list[str]:
    """Return a module's name, or those of the modules in a package."""
    module = importlib.import_module(source)
    below = [one.name for one in pkgutil.iter_modules(getattr(module, "__path__", ())) if one.name not in skipped]
    return [source, *(f"{source}.{name}" for name in below)]


def has_plugins() -> bool:
    """Return whether an installed package declares plug-ins."""
    return bool(metadata.entry_points(group=ENTRY_POINTS))


def plugin_files() -> list[Path]:
    """Return the Python files of all installed packages and modules that declare plug-ins, sorted."""
    files: set[Path] = set()
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        spec = importlib.util.find_spec(entry.module.partition(".")[0])
        if spec is not None and spec.submodule_search_locations:
            files.update(path for folder in spec.submodule_search_locations for path in Path(folder).rglob("*.py"))
        elif spec is not None and spec.origin is not None:
            files.add(Path(spec.origin))
    return sorted(files)
