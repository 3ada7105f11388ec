"""How a Hessian is held. This module does not import PyTorch, so that configurations can name a structure."""

from __future__ import annotations

from enum import Enum


class Structure(Enum):
    """Chosen by size (``auto``), or a block shared by all classes, one a class, one in all, or products only."""

    auto = "auto"
    shared = "shared"
    blocks = "blocks"
    dense = "dense"
    products = "products"
