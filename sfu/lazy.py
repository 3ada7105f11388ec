"""PyTorch, imported when an attribute of it is first used.

Importing PyTorch takes seconds, and settings stand beside the code that they configure. Modules that are imported to
compose or to check a configuration therefore take it from here, and ``Tensor`` for annotations alone::

    from sfu.lazy import torch

    if TYPE_CHECKING:
        from torch import Tensor
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Torch()
