"""Where sfu keeps what it can make again: features, downloads, fingerprints of files."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir(kind: str) -> Path:
    """``$SFU_CACHE/kind``, or ``kind`` under ``sfu`` in the user's cache folder (``$XDG_CACHE_HOME``, ``~/.cache``)."""
    given = os.environ.get("SFU_CACHE")
    if given:
        return Path(given).expanduser() / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sfu" / kind
