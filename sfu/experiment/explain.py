"""Turn an error of Hydra or OmegaConf into one message that names the key and what is accepted there."""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing

from omegaconf import DictConfig

from sfu.errors import ConfigError, SfuError
from sfu.settings import RunConfig


def explain(error: BaseException) -> str:
    """The message to print for ``error``."""
    text = str(error).strip()
    if isinstance(error, SfuError):
        return text
    cause = error.__cause__
    if cause is not None and str(cause) not in text:
        text = f"{text}\n{str(cause).strip()}"
    key = re.search(r"full_key: (\S+)", text)
    if key and re.search(r"not in|not found", text):
        return _unknown_key(key.group(1)) or text
    override = re.search(r"Could not override '([^']+)'", text)
    if override and "is not in struct" in text:
        return _unknown_key(override.group(1)) or text
    if isinstance(error, OSError) and error.filename:
        return (
            f"cannot use {error.filename} ({error.strerror}). If it is the output folder, choose one you can write to "
            "with hydra.run.dir=FOLDER (hydra.sweep.dir=FOLDER with -m)."
        )
    missing = re.search(
        r"Could not find '([^']+)/([^/']+)'\s+Available options in '[^']+':\s+(.*?)\n?Config search", text, re.S
    )
    if missing:
        group, name, options = missing.groups()
        return f"{group}={name} is unknown; {group} can be {', '.join(options.split())}."
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "\n".join(
        line for line in lines if not line.startswith(("object_type=", "reference_type=", "To append to your config"))
    )


def refuse_added_keys(config: DictConfig) -> None:
    """Refuse keys that were added with ``+`` where the schema has none: nothing would read them.

    Raises:
        ConfigError: Naming the key and what is accepted there.
    """

    def visit(node: DictConfig, accepted: dict[str, object], path: list[str]) -> None:
        for key in node:
            full = [*path, str(key)]
            if str(key) not in accepted:
                raise ConfigError(_unknown_key(".".join(full)) or f"{'.'.join(full)} is not a setting.")
            below = _fields(accepted[str(key)])
            if below:
                visit(node[key], below, full)

    visit(config, _fields(RunConfig), [])


def _unknown_key(full_key: str) -> str | None:
    """Say which keys the deepest known node takes, and the nearest one."""
    node: object = RunConfig
    known: list[str] = []
    for part in full_key.split("."):
        fields = _fields(node)
        if part not in fields:
            accepted = list(fields)
            if not accepted:
                return None
            near = difflib.get_close_matches(part, accepted, n=1)
            where = ".".join(known)
            hint = f" Did you mean {'.'.join([*known, near[0]])}?" if near else ""
            return f"{full_key} is not a setting; {where or 'sfu'} takes {', '.join(accepted)}.{hint}"
        node = fields[part]
        known.append(part)
    return None


def _fields(node: object) -> dict[str, object]:
    if not (isinstance(node, type) and dataclasses.is_dataclass(node)):
        return {}
    hints = typing.get_type_hints(node)
    return {field.name: hints[field.name] for field in dataclasses.fields(node)}
