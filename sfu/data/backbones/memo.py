"""What decides a backbone's features, remembered, so that a run whose features are kept need not build it again.

Building a network to find its digest costs seconds (importing its library above all). The memo is believed as long as
the settings, the versions of the libraries and a weights file's path, size, inode and times are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfu.cache_dir import cache_dir
from sfu.errors import ArtifactError
from sfu.files import write_text

if TYPE_CHECKING:
    from sfu.settings import BackboneConfig

_SCHEMA = 1
_NO_EFFECT = ("batch_size", "workers", "cache")


def recall(config: BackboneConfig) -> dict[str, Any] | None:
    """The record of the backbone of ``config``, or ``None`` if it was not built before."""
    try:
        found = json.loads(_path(config).read_text(encoding="utf-8"))
        record = found["record"]
        known = found["sha256"] == _digest(record) and isinstance(record, dict)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if known else None


def remember(config: BackboneConfig, record: dict[str, Any]) -> None:
    """Keep ``record``; where that cannot be written, the next run is slower and nothing else."""
    try:
        write_text(_path(config), json.dumps({"record": record, "sha256": _digest(record)}, indent=2) + "\n")
    except ArtifactError:
        return


def _path(config: BackboneConfig) -> Path:
    settings: dict[str, Any] = {key: value for key, value in vars(config).items() if key not in _NO_EFFECT}
    settings["versions"] = {name: _version(name) for name in ("torch", config.library)}
    settings["schema"] = _SCHEMA
    if config.weights not in ("default", "none"):
        settings["file"] = _file(Path(config.weights).expanduser())
    return cache_dir("backbones") / f"{_digest(settings)[:32]}.json"


def _file(path: Path) -> list[Any]:
    try:
        status = os.stat(path)
    except OSError:
        return [os.path.abspath(path)]
    return [os.path.abspath(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
