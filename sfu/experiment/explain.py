"""Turn an error of Hydra or OmegaConf into one message that names the key and what is accepted there."""

from __future__ import annotations

import io
import re
import traceback
import typing
from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Any, cast

from sfu.config_files import group_options
from sfu.errors import SfuError
from sfu.experiment.config import GROUPS, RunConfig
from sfu.registry import unknown
from sfu.schema import accepted_names, not_a_setting


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
    if override and "is not in struct" in text:
        return _unknown_key(override.group(1), text) or text
    wrong_type = re.search(r"Error merging override (\S+)\n(.*)", text)
    if wrong_type and key:
        given, reason = wrong_type.groups()
        return f"{given}: {reason.rstrip('.')}. `sfu --keys {key.group(1)}` says what it takes."
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
        return unknown(group, name, options.split())
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


def _unknown_key(full_key: str, text: str) -> str | None:
    """Say what the node of an unknown key takes, which key is nearest, and which other choices have the key."""
    *parents, key = full_key.split(".")
    object_type = re.search(r"object_type=(\w+)", text)
    group, base = (parents[0], GROUPS[parents[0]]) if parents and parents[0] in GROUPS else ("", None)
    if base is None:
        owner = settings_at(RunConfig, parents)
        return None if owner is None else not_a_setting(full_key, ".".join(parents) or "sfu", accepted_names(owner))
    members = {name: base.named(name) for name in base.names()}
    for name, member in members.items():
        owner = settings_at(member, parents[1:])
        if owner is not None and object_type is not None and owner.__name__ == object_type.group(1):
            what = ".".join([f"{group}={name}", *parents[1:]])
            others = [f"{group}={other}" for other, kind in members.items() if key in accepted_names(kind)]
            return not_a_setting(full_key, what, accepted_names(owner), others if len(parents) == 1 else ())
    return None


def settings_at(kind: type[Any], path: list[str]) -> type[Any] | None:
    """Return the settings to which a path of keys leads; ``None`` if it leads to a value or nowhere."""
    for part in path:
        hint = typing.get_type_hints(kind).get(part)
        if not is_dataclass(hint):
            return None
        kind = cast(type[Any], hint)
    return kind
