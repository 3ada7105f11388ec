"""The lock on source data while a source-free method runs.

The runner drops every training row, then enters :func:`sealed`. Inside, loading a dataset through sfu raises
:class:`~sfu.errors.SourceFreeError`, and so does opening one of its files with Python or NumPy (an audit hook sees
that) or with safetensors (which opens files in Rust, unseen by the hook, and is wrapped instead). It guards against
honest mistakes, such as a method that quietly reloads the data; it is no sandbox against hostile code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.numpy
import safetensors.torch

from sfu.errors import SourceFreeError

_OPENER = "safe_open"
_sealed_paths: frozenset[str] | None = None
_hook_installed = False


@contextmanager
def sealed(paths: Sequence[Path]) -> Iterator[None]:
    """Refuse to load a dataset, or to open any of ``paths``, until the block ends."""
    global _sealed_paths, _hook_installed
    if not _hook_installed:
        sys.addaudithook(_refuse_sealed_files)
        _hook_installed = True
    before = _sealed_paths
    _sealed_paths = frozenset(os.path.realpath(path) for path in paths)
    wrapped = [(module, getattr(module, _OPENER)) for module in (safetensors, safetensors.numpy, safetensors.torch)]
    for module, opener in wrapped:
        setattr(module, _OPENER, _guarded(opener))
    try:
        yield
    finally:
        _sealed_paths = before
        for module, opener in wrapped:
            setattr(module, _OPENER, opener)


def _guarded(opener: Any) -> Any:
    def open_unless_sealed(filename: str | os.PathLike[str], *arguments: Any, **options: Any) -> Any:
        _refuse_sealed_files("open", (os.fspath(filename),))
        return opener(filename, *arguments, **options)

    return open_unless_sealed


def require_open(what: str) -> None:
    """Raise :class:`SourceFreeError` inside a sealed block; ``what`` names what was asked for."""
    if _sealed_paths is not None:
        raise SourceFreeError(
            f"{what} was asked for while a source-free method runs. The source data has been discarded; declare "
            "access = Access.RETAINED in the method if it needs it."
        )


def _refuse_sealed_files(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _sealed_paths and isinstance(arguments[0], str | bytes):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if path in _sealed_paths:
            require_open(f"The file {path}")
