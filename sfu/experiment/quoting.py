"""Say how to write a setting whose value Hydra cannot read: a path or a name with ``=``, ``#``, quotes or accents."""

from __future__ import annotations

import itertools
import re
import shlex
import typing
from collections.abc import Sequence

from sfu.experiment.config import RunConfig
from sfu.experiment.dry_run import MULTIRUN
from sfu.experiment.explain import settings_at

_PLAIN = re.compile(r"[A-Za-z0-9_/\-\\+.$%*@?|: \t]*")  # what Hydra's grammar takes without quotes
_PAIRS = ("''", '""', "\u2018\u2019", "\u201c\u201d", "\u201e\u201c")  # with those that word processors make


def unreadable(arguments: Sequence[str]) -> str | None:
    """Return what to say of the first setting that Hydra cannot read, and how to write it; ``None`` if there is none.

    What is proposed can be pasted into a POSIX shell.
    """
    if any(text.endswith("\r") for text in arguments):
        return (
            "a setting ends with a carriage return, as in a script with the line ends of Windows. Save the script with "
            "those of Linux (sed -i 's/\\r$//' SCRIPT)."
        )
    if any(text.strip() == "\\" for text in arguments):
        return (
            "a backslash stands alone among the settings. It continues a line in bash, if nothing follows it; cmd.exe "
            "takes ^ and PowerShell takes ` instead."
        )
    settings = [
        text
        for before, text in zip(["", *arguments], arguments, strict=False)
        if not text.startswith("-") and ("=" in text or not before.startswith("-"))  # --cfg job
    ]
    for place, text in enumerate(settings):
        key, equals, value = text.partition("=")
        if not equals and place and not text.startswith("~"):
            words = itertools.takewhile(lambda word: "=" not in word, settings[place:])
            before, joined = settings[place - 1], " ".join([settings[place - 1], *words])
            return (
                f"{text} is no setting, because it has no '='. If it belongs to {before}, put all of it in quotes: "
                f"{_quoted(*joined.split('=', 1))}"
            )
        parsed = _parsed(text)
        if equals and parsed is None and not value.lstrip().startswith("{"):
            return f"{text} cannot be read, because {_why(key, value.strip())}. Write {_quoted(key, value)}"
        if parsed is True and not any(flag in arguments for flag in MULTIRUN):
            one = "a list" if _is_list(key) else "one value with a comma"
            remedy = f"for {one}, write {_quoted(key, value)}" if _takes_text(key) else "otherwise, give one value."
            return f"{text} gives several values, which only a sweep takes. For a sweep, add -m; {remedy}"
    return None


def _why(key: str, value: str) -> str:
    if value.startswith("[") != value.endswith("]"):
        return "the brackets of a list must match" if _is_list(key) else "brackets in a value must be quoted"
    parts = _parts(value) if value.startswith("[") else [value]
    odd = next((part for part in parts if _parsed(f"{key}=[{part}]") is None), value)
    mark = odd[len(_PLAIN.match(odd).group()) :][:1]  # type: ignore[union-attr] # it matches nothing, too
    return f"{mark!r} in a value must be quoted" if mark else "its value must be quoted"


def _parts(value: str) -> list[str]:
    return [part.strip() for part in value.removeprefix("[").removesuffix("]").split(",")]


def _parsed(text: str) -> bool | None:
    """Whether a setting has several values for a sweep; ``None`` if Hydra cannot read it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(text).is_sweep_override()
    except HydraException:
        return None


def _quoted(key: str, value: str) -> str:
    """Return the setting with its value quoted for Hydra, and all of it for the shell."""
    value = value.strip()
    whole = _hydra_quoted(value)
    if _is_list(key) or (value.startswith("[") and value.endswith("]")):
        parts = _parts(value)
        listed = f"[{','.join(part if _parsed(f'{key}=[{part}]') is False else _hydra_quoted(part) for part in parts)}]"
        whole = listed if _parsed(f"{key}={listed}") is False else whole
    return shlex.quote(f"{key}={whole}")


def _hydra_quoted(text: str) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString

    if len(text) > 1 and text[0] + text[-1] in _PAIRS:
        text = text[1:-1]
    return QuotedString(text, Quote.double).with_quotes()


def _hint(key: str) -> str:
    *parents, name = key.lstrip("+").split(".")
    owner = settings_at(RunConfig, parents)
    return "" if owner is None else str(typing.get_type_hints(owner).get(name, ""))


def _is_list(key: str) -> bool:
    return _hint(key).startswith("list[")


def _takes_text(key: str) -> bool:
    hint = _hint(key)
    return not hint or "str" in hint or "Any" in hint
