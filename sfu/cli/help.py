"""What ``sfu --help``, ``--rows`` and ``--keys`` print, without PyTorch and, for the first two, without Hydra."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from sfu.config_files import config_dir, group_options
from sfu.registry import has_plugins

if TYPE_CHECKING:
    from sfu.schema import Choice

WIDTH = 80
_GROUPS = ("dataset", "backbone", "head", "loss", "curvature", "request", "logger", "launcher", "experiment")
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
See also sfu-unlearn, sfu-plan, sfu-report, sfu-features and sfu-results, each
with --help."""


def help_text() -> str:
    """Return the help: what sfu is, the usual commands, and the choices of every group."""
    groups = [_wrapped(f"  {group:<11}", " ".join(_choices(group))) for group in _GROUPS]
    return "\n".join([_USAGE, "Choices (group=choice):", *groups, "", _MORE])


def _choices(group: str) -> list[str]:
    """The choices of a group; those of installed plug-ins may need PyTorch to be found."""
    if not has_plugins():
        return group_options(group)
    from sfu.experiment.config import GROUPS

    return sorted({*group_options(group), *(GROUPS[group].names() if group in GROUPS else ())})


def rows_text() -> str:
    """Return every row that ``configs/method`` defines, with the first comment of its file, and plug-ins' methods."""
    lines = []
    for name in group_options("method"):
        text = (config_dir() / "method" / f"{name}.yaml").read_text(encoding="utf-8")
        comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
        lines.append(_wrapped(f"{name:<26}", " ".join(line.lstrip("# ") for line in comment)))
    if has_plugins():
        from sfu.unlearning.base import UnlearningMethod

        for name in UnlearningMethod.names_of_plugins():
            kind = UnlearningMethod.named(name)
            lines.append(_wrapped(f"{name:<26}", (kind.__doc__ or "").strip().partition("\n")[0]))
    return "\n".join(lines)


def _wrapped(start: str, text: str) -> str:
    return textwrap.fill(
        text, WIDTH - 1, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False
    )


def keys_text(prefixes: list[str]) -> str:
    """Return every key with its type, default and meaning; only those that begin with one of ``prefixes``, if any."""
    lines = []
    for key, head, meanings in _keys():
        if not prefixes or key.startswith(tuple(prefixes)):
            lines.append(textwrap.fill(head, WIDTH - 1, subsequent_indent=" " * 8, break_on_hyphens=False))
            lines += [_wrapped("    ", meaning) for meaning in meanings]
    return "\n".join(lines) or f"No key begins with {' or '.join(prefixes)}."


class _Key(NamedTuple):
    type: str
    default: str
    meaning: str


def _keys() -> Iterator[tuple[str, str, list[str]]]:
    """Every key, its line with type and default, and what it means."""
    from sfu.experiment.config import GROUPS, RunConfig

    of_run = _described(RunConfig, {**_file("sfu"), "backbone": _file("backbone/auto")})
    for one in fields(RunConfig):
        if one.name in GROUPS:
            yield from _keys_of_group(one.name, GROUPS[one.name])
        for key, (type_name, default, meaning) in of_run.items():
            if key.split(".")[0] == one.name:
                yield key, f"{key}: {type_name} = {default}", [meaning]


def _keys_of_group(group: str, base: type[Choice]) -> Iterator[tuple[str, str, list[str]]]:
    """The keys of all choices of a group, with the defaults and meanings of each where they differ."""
    members = {name: _described(base.named(name), _file(f"{group}/{name}")) for name in base.names()}
    for name in dict.fromkeys(name for keys in members.values() for name in keys):
        key, having = f"{group}.{name}", {member: keys[name] for member, keys in members.items() if name in keys}
        if name == base.chosen_by:
            yield key, f"{key}: {' | '.join(having)}", [f"The choice itself; {group}=NAME sets it and its defaults."]
            continue
        (default, _), *others = _names_by({member: found.default for member, found in having.items()})
        differing = "; ".join(f"{other} with {group}={','.join(names)}" for other, names in others)
        (meaning, _), *more = meanings = _names_by({member: found.meaning for member, found in having.items()})
        lacking = [member for member in members if member not in having]
        if more:
            told = [f"{group}={','.join(names)}: {meaning}" for meaning, names in meanings]
        elif len(lacking) < len(having):
            told = [meaning + (f" Not with {group}={','.join(lacking)}." if lacking else "")]
        else:
            told = [f"{meaning} Only with {group}={','.join(having)}."]
        line = f"{key}: {next(iter(having.values())).type} = {default}"
        yield key, line + (f" ({differing})" if differing else ""), told


def _names_by(values: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Every value with the names that have it, the commonest first."""
    names = {value: [name for name in values if values[name] == value] for value in values.values()}
    return sorted(names.items(), key=lambda item: -len(item[1]))


def _described(kind: type[Any], file: Mapping[str, Any]) -> dict[str, _Key]:
    """The keys of settings, but those that are choices, with the defaults of a configuration file where it has some."""
    from sfu.experiment.config import plain
    from sfu.reporting.report.grouping import flatten

    defaults = flatten(plain(kind())) | flatten(file)
    return {key: _Key(_type_name(hint), defaults[key], meaning) for key, hint, meaning in _leaves(kind, "")}


def _leaves(kind: Any, prefix: str) -> Iterator[tuple[str, Any, str]]:
    """The settings of a dataclass and of those in it: name, type and meaning."""
    from sfu.schema import Choice, meta_of

    hints = get_type_hints(kind)
    for one in fields(kind):
        hint, key = hints[one.name], f"{prefix}{one.name}"
        if isinstance(hint, type) and issubclass(hint, Choice):
            continue
        if is_dataclass(hint):
            yield from _leaves(hint, f"{key}.")
        elif one.init:
            yield key, hint, meta_of(one).help


def _file(name: str) -> dict[str, Any]:
    """What a file in ``configs`` sets; nothing if there is none, as for a plug-in."""
    import yaml

    path = config_dir() / f"{name}.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _type_name(hint: Any) -> str:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " | ".join(str(choice.value) for choice in hint)
    name = getattr(hint, "__name__", str(hint)) if not hasattr(hint, "__args__") else str(hint)
    return name.replace("NoneType", "null").replace("None", "null").replace("typing.", "")
