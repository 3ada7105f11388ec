"""What ``sfu --help``, ``--rows`` and ``--keys`` print, without PyTorch and, for the first two, without Hydra."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, get_type_hints

from sfu.config_files import config_dir, group_options

WIDTH = 80
_GROUPS = ("dataset", "backbone", "head", "loss", "curvature", "logger", "launcher", "experiment")
_USAGE = """\
sfu: source-free machine unlearning for PyTorch. It trains a head, discards the
training data, unlearns, and measures how close that came to retraining.

  sfu                                       the main job, on digits, in seconds
  sfu methods=[original,retrained,jit] head.l2=1e-4      your rows and settings
  sfu dataset=features dataset.path=FILE.npz                      your features
  sfu -m forget.fraction=0.05,0.1 seed=0,1,2 a sweep, with one table at the end
  sfu experiment=paper_table_2 dataset=digits             a table of the paper
  sfu ... --dry-run                    what is cached, what would be computed
"""
_MORE = """\
sfu --rows lists the rows for methods=[...]. sfu --keys [KEY ...] explains all
keys, or those that begin so; sfu ... --cfg job shows a composed configuration.
Results go to outputs/, or to hydra.run.dir=FOLDER (hydra.sweep.dir with -m).
See also sfu-report, sfu-features and sfu-results, each with --help."""


def help_text() -> str:
    """Return the help: what sfu is, the usual commands, and the choices of every group."""
    groups = [_wrapped(f"  {group:<11}", " ".join(group_options(group))) for group in _GROUPS]
    return "\n".join([_USAGE, "Choices (group=choice):", *groups, "", _MORE])


def rows_text() -> str:
    """Return every row that ``configs/method`` defines, with the first comment of its file."""
    lines = []
    for name in group_options("method"):
        text = (config_dir() / "method" / f"{name}.yaml").read_text(encoding="utf-8")
        comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
        lines.append(_wrapped(f"{name:<26}", " ".join(line.lstrip("# ") for line in comment)))
    return "\n".join(lines)


def _wrapped(start: str, text: str) -> str:
    return textwrap.fill(
        text, WIDTH - 1, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False
    )


def keys_text(prefixes: list[str]) -> str:
    """Return every key with its type, default and meaning; only those that begin with one of ``prefixes``, if any."""
    lines = []
    for key, hint, default, meaning, where in _keys():
        if not prefixes or any(key == prefix or key.startswith((prefix, f"{prefix}.")) for prefix in prefixes):
            lines.append(f"{key}: {_type_name(hint)} = {default}" + (f"   ({where})" if where else ""))
            if meaning:
                lines.append(_wrapped("    ", meaning))
    return "\n".join(lines) or f"No key begins with {' or '.join(prefixes)}."


def _keys() -> Iterator[tuple[str, Any, str, str, str]]:
    """Key, type, default, meaning, and the choices that have the key (empty if all of its group do)."""
    from sfu.experiment.config import GROUPS, RunConfig

    for one in fields(RunConfig):
        if one.name not in GROUPS:
            yield from _keys_of(one, get_type_hints(RunConfig)[one.name], "", "")
            continue
        members: dict[str, Any] = {name: GROUPS[one.name].named(name) for name in GROUPS[one.name].names()}
        shown: set[str] = set()
        for kind in members.values():
            for below in fields(kind):
                having = [name for name, other in members.items() if below.name in _settable(other)]
                if below.name in _settable(kind) and below.name not in shown:
                    shown.add(below.name)
                    where = "" if len(having) == len(members) else f"{one.name}={','.join(having)}"
                    yield from _keys_of(below, get_type_hints(kind)[below.name], f"{one.name}.", where)


def _settable(kind: Any) -> list[str]:
    return [one.name for one in fields(kind) if one.init]


def _keys_of(one: Any, hint: Any, prefix: str, where: str) -> Iterator[tuple[str, Any, str, str, str]]:
    from sfu.schema import meta_of

    key = f"{prefix}{one.name}"
    if is_dataclass(hint):
        for below in fields(hint):
            yield from _keys_of(below, get_type_hints(hint)[below.name], f"{key}.", where)
        return
    default = one.default_factory() if callable(one.default_factory) else one.default
    yield key, hint, _value(default), meta_of(one).help, where


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value.value if isinstance(value, Enum) else value)


def _type_name(hint: Any) -> str:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " | ".join(str(choice.value) for choice in hint)
    name = getattr(hint, "__name__", str(hint)) if not hasattr(hint, "__args__") else str(hint)
    return name.replace("NoneType", "null").replace("None", "null").replace("typing.", "")
