"""Where features are kept: everything in one folder, those of augmented forget sets in one of their own below it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sfu.cache_dir import cache_dir

if TYPE_CHECKING:
    from sfu.settings import BackboneConfig

VIEWS = "forget-sets"


def cache_root(config: BackboneConfig) -> Path:
    """``backbone.cache``, or ``features`` in sfu's cache folder."""
    return Path(config.cache).expanduser() if config.cache else cache_dir("features")


def views_folder(config: BackboneConfig) -> Path:
    """Where features of augmented images to forget are kept: the one part that stays open to source-free methods."""
    return cache_root(config) / VIEWS
