"""Turn an error of Hydra or OmegaConf into one message that names the key and what is accepted there."""

from __future__ import annotations

import io
import re
import traceback
import typing
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, cast

from sfu.config_files import group_options
from sfu.errors import SfuError
from sfu.experiment.config import GROUPS, RunConfig
from sfu.registry import unknown
from sfu.schema import accepted_names, full_key, meta_of, not_a_setting, wrong_type


def explain(error: BaseException) -> str:
    """Return the message to print for ``error``."""
    text = str(error).strip()
    if isinstance(error, SfuError):
        return text
    cause = error.__cause__
    if cause is not None and str(cause) not in text:
        text = f"{text}\n{str(cause).strip()}"
    key = re.search(r"full_key: (\S+)", text)
    override = re.search(r"Could not override '([^']+)'", text)
    if key and re.search(r"not in|not found", text):
        return _unknown_key(key.group(1), text) or text
    if override and ("is not in struct" in text or "No match in the defaults list" in text):
        return _unknown_key(override.group(1), text) or text
    wrong = re.search(r"Error merging override [+~]*([^=\s]+)=(.*)\n", text)
    if wrong and key:
        return _wrong_type(wrong[1], wrong[2], text) or text
    in_file = re.search(r"[Vv]alue '([^']*)'", text)
    if in_file and key and "object_type=" in text:
        return _wrong_type(key[1].partition("[")[0], in_file[1], text) or text
    if isinstance(error, OSError) and (path := error.filename or _open_file(error)):
        return (
            f"cannot use {path} ({error.strerror}). If it is the output folder, choose one you can write to "
            "with hydra.run.dir=FOLDER (hydra.sweep.dir=FOLDER with -m)."
        )
    missing = re.search(
        r"Could not find '([^']+)/([^/']+)'\s+Available options in '[^']+':\s+(.*?)\n?Config search", text, re.S
    )
    if missing:
        group, name, options = missing.groups()
        return unknown(group, name, options.split(), GROUPS[group].synonyms if group in GROUPS else None)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "\n".join(
        line for line in lines if not line.startswith(("object_type=", "reference_type=", "To append to your config"))
    )


def _open_file(error: BaseException) -> str | None:
    """The file that was open where an error was raised: that of a full disk does not name it."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if isinstance(value, io.TextIOBase) and isinstance(name := getattr(value, "name", None), str):
                return name
    return None


def wrong_choice(arguments: Iterable[str]) -> str | None:
    """Say which group of settings was given something else than the name of a choice; ``None`` if none was.

    Hydra raises ``ValueError`` or ``TypeError`` for it, which name no key.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ChoiceSweep, QuotedString
    from hydra.errors import HydraException

    for text in arguments:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException:
            continue
        group, value = override.key_or_group, override._value
        options = group_options(group) if group in (*GROUPS, "backbone", "experiment") else []
        values = value.list if isinstance(value, ChoiceSweep) else value if isinstance(value, list) else [value]
        if options and not all(isinstance(one, str | QuotedString) for one in values):
            return f"{text} does not name a choice of {group}. Name one of {', '.join(options)}."
    return None


def _unknown_key(whole: str, text: str) -> str | None:
    """Say what the node of an unknown key takes, which key is nearest, and which other choices have the key."""
    *parents, key = whole.split(".")
    object_type = re.search(r"object_type=(\w+)", text)
    first = whole.partition(".")[0]
    if first == "method" or first in group_options("method"):
        return (
            f"{whole} is not a setting of sfu. Rows are chosen by the key methods, as in "
            f"methods=[original,retrained,scrub]; sfu --rows lists them. For a row with settings of its own, add a "
            "variant: methods=[original,mine] '+variants.mine={base:scrub,settings:{lr:0.01}}'."
        )
    group, base = (parents[0], GROUPS[parents[0]]) if parents and parents[0] in GROUPS else ("", None)
    if base is None:
        owner = settings_at(RunConfig, parents)
        if owner is None:
            return None
        similar = [] if parents else [name for name in _all_keys() if name.rpartition(".")[2] == key]
        meant = f" Did you mean {' or '.join(similar)}?" if similar else ""
        said = not_a_setting(whole, ".".join(parents) or "sfu", accepted_names(owner))
        return said.partition(" Did you mean")[0] + meant if meant else said
    members = {name: base.named(name) for name in base.names()}
    for name, member in members.items():
        owner = settings_at(member, parents[1:])
        if owner is not None and object_type is not None and owner.__name__ == object_type.group(1):
            what = ".".join([f"{group}={name}", *parents[1:]])
            others = [f"{group}={other}" for other, kind in members.items() if key in accepted_names(kind)]
            return not_a_setting(whole, what, accepted_names(owner), others if len(parents) == 1 else ())
    return None


def _wrong_type(key: str, value: str, text: str) -> str | None:
    """Say what is accepted in place of a value of the wrong type."""
    *parents, name = key.split(".")
    object_type = re.search(r"object_type=(\w+)", text)
    if parents and parents[0] in GROUPS:
        base = GROUPS[parents[0]]
        owners = [settings_at(base.named(one), parents[1:]) for one in base.names()]
    else:
        owners = [settings_at(RunConfig, parents)]
    having = [one for one in owners if one is not None and name in accepted_names(one)]
    having.sort(key=lambda one: object_type is None or one.__name__ != object_type.group(1))
    if not having:
        return None
    (found,) = [one for one in fields(having[0]) if one.name == name]
    return wrong_type(key, value, typing.get_type_hints(having[0])[name], meta_of(found))


def _all_keys() -> list[str]:
    """All keys, each once, with those of all choices."""
    keys = [name for group, base in GROUPS.items() for one in base.names() for name in _keys_of(base.named(one), group)]
    return list(dict.fromkeys([*keys, *_keys_of(RunConfig, "")]))


def _keys_of(kind: type[Any], prefix: str) -> Iterator[str]:
    hints = typing.get_type_hints(kind)
    for one in fields(kind):
        hint, key = hints[one.name], full_key(prefix, one.name)
        if is_dataclass(hint) and one.name not in GROUPS:
            yield from _keys_of(cast(type[Any], hint), key)
        elif one.init and one.name not in GROUPS:
            yield key


def settings_at(kind: type[Any], path: list[str]) -> type[Any] | None:
    """The settings to which a path of keys leads; ``None`` if it leads to a value or nowhere."""
    for part in path:
        hint = typing.get_type_hints(kind).get(part)
        if not is_dataclass(hint):
            return None
        kind = cast(type[Any], hint)
    return kind
