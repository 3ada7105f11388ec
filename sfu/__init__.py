"""Source-free machine unlearning for PyTorch.

From Python::

    from sfu import LinearHead, unlearn

    head = LinearHead.from_module(model.fc, l2=5e-4, n_train=50_000)
    result = unlearn(head, forget_features, forget_labels)

From the command line: ``sfu --help``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sfu.heads.linear import LinearHead
    from sfu.request import ForgetRequest
    from sfu.settings import CurvatureConfig
    from sfu.unlearning.base import UnlearningResult
    from sfu.unlearning.unlearn import unlearn

__version__ = "0.1.0"
__all__ = ["CurvatureConfig", "ForgetRequest", "LinearHead", "UnlearningResult", "__version__", "unlearn"]

_HOMES = {
    "CurvatureConfig": "sfu.settings",
    "ForgetRequest": "sfu.request",
    "LinearHead": "sfu.heads.linear",
    "UnlearningResult": "sfu.unlearning.base",
    "unlearn": "sfu.unlearning.unlearn",
}


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that ``import sfu`` alone stays quick."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'sfu' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
