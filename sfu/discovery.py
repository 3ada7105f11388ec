"""Find the one class a plug-in file defines. Files are looked up inside sfu only, never by a path from a config."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import TypeVar, cast

Base = TypeVar("Base")


def modules_in(*packages: str) -> dict[str, str]:
    """The modules directly inside ``packages`` by their last name."""
    found = {
        module.name: f"{package}.{module.name}"
        for package in packages
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__)
    }
    return dict(sorted(found.items()))


def module_names(package: str) -> list[str]:
    """Names of the modules directly inside ``package``."""
    return list(modules_in(package))


def only_subclass(module_name: str, base: Callable[..., Base]) -> type[Base]:
    """The one concrete subclass of ``base`` defined in the module.

    Raises:
        TypeError: There is none, or more than one.
    """
    module = importlib.import_module(module_name)
    found = [
        member
        for member in vars(module).values()
        if inspect.isclass(member)
        and issubclass(member, cast(type, base))
        and member.__module__ == module_name
        and not inspect.isabstract(member)
    ]
    if len(found) != 1:
        raise TypeError(f"{module_name} must define exactly one {getattr(base, '__name__', base)}, not {len(found)}.")
    return cast(type[Base], found[0])
