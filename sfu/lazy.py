"""PyTorch, imported when an attribute of it is first used.

Importing PyTorch takes seconds, and settings stand beside the code that they configure. Modules that are imported to
compose or to check a configuration therefore take it from here, and ``Tensor`` for annotations alone::

    from sfu.lazy import torch

    if TYPE_CHECKING:
        from torch import Tensor

A command imports it, and what else takes long, inside :func:`first_imports`.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Torch()


@contextmanager
def first_imports() -> Iterator[None]:
    """Import modules quickly: collect no garbage in this block, and spare later collections what it has imported.

    Python's collector would search the growing modules again and again, and once more when the process ends. In a
    process that has imported PyTorch already, the block changes nothing.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(_collect_and_freeze)


def _collect_and_freeze() -> None:
    gc.collect()  # it closes and reports what was left open
    gc.freeze()
