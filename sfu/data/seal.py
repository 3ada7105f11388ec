"""The seal on source data while source-free methods run.

The pipeline drops every training row, then enters :func:`sealed`. Inside, loading a dataset through sfu raises
:class:`~sfu.errors.SourceFreeError`. So does opening one of its files, or any file in its folders: an audit hook sees
Python, NumPy and Pillow, and the readers of safetensors and torchvision, which the hook does not see, are wrapped. Only
the images to forget stay open. The seal catches honest mistakes, such as a method that quietly reloads the data. It is
no sandbox against hostile code.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.numpy
import safetensors.torch

from sfu.errors import SourceFreeError

_state = threading.local()  # its seal is that of the run in this thread
_hook_installed = False


@dataclass(frozen=True)
class _Seal:
    """Names of files and folders, as given and with every link followed."""

    closed: frozenset[str]
    allowed: frozenset[str]

    def covers(self, path: str) -> bool:
        """Whether ``path``, or what it links to, is closed."""
        return any(self._closes(name) for name in {os.path.abspath(path), os.path.realpath(path)})

    def _closes(self, name: str) -> bool:
        """Whether the nearest of the path and its parent folders that is in either set is closed."""
        while name not in self.allowed:
            if name in self.closed:
                return True
            parent = os.path.dirname(name)
            if parent == name:
                return False
            name = parent
        return False


def _current() -> _Seal | None:
    return getattr(_state, "seal", None)


@contextmanager
def sealed(paths: Sequence[Path], *, allowed: Sequence[Path] = ()) -> Iterator[None]:
    """Refuse to load a dataset, or to open any of ``paths`` or anything below them, until the block ends.

    What is ``allowed``, or below it, may be opened all the same (the images to forget).
    """
    global _hook_installed
    if not _hook_installed:
        sys.addaudithook(_refuse_sealed_files)
        _hook_installed = True
    before = _current()
    _state.seal = _Seal(_names(paths), _names(allowed))
    readers: list[tuple[Any, str]] = [
        (module, "safe_open") for module in (safetensors, safetensors.numpy, safetensors.torch)
    ]
    if "torchvision.io.image" in sys.modules:
        readers.append((sys.modules["torchvision.io.image"], "read_file"))
    originals = [getattr(module, name) for module, name in readers]
    for (module, name), reader in zip(readers, originals, strict=True):
        setattr(module, name, _guarded(reader))
    try:
        yield
    finally:
        _state.seal = before
        for (module, name), reader in zip(readers, originals, strict=True):
            setattr(module, name, reader)


def real_places(files: Sequence[Path]) -> list[Path]:
    """Where ``files`` lie when every link is followed: their folders, and the files that links among them lead to."""
    folders = {os.path.realpath(folder) for folder in {os.path.dirname(file) for file in files}}
    linked = {os.path.realpath(file) for file in files if os.path.islink(file)}
    return [Path(place) for place in sorted(folders | linked)]


def require_open(what: str) -> None:
    """Raise :class:`SourceFreeError` inside a sealed block; ``what`` names what was asked for."""
    if _current() is not None:
        raise SourceFreeError(
            f"{what} was asked for while a source-free method runs. The source data has been discarded. Declare "
            "access = Access.RETAINED in the method if it needs it."
        )


def _names(paths: Sequence[Path]) -> frozenset[str]:
    return frozenset(name(path) for path in paths for name in (os.path.abspath, os.path.realpath))


def _guarded(reader: Any) -> Any:
    def read_unless_sealed(filename: str | os.PathLike[str], *arguments: Any, **options: Any) -> Any:
        _refuse_sealed_files("open", (os.fspath(filename),))
        return reader(filename, *arguments, **options)

    return read_unless_sealed


def _refuse_sealed_files(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str | bytes) and (seal := _current()) is not None:
        path = os.fsdecode(arguments[0])
        if seal.covers(path):
            require_open(f"The file {path}")
