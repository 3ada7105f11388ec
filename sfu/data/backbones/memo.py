"""Remember what decides a backbone's features, so that a run whose features are cached need not build the backbone.

Building a network to find its digest costs seconds (importing its library above all). A record is found again as long
as the settings, the versions of the libraries, and a weights file's path, size, inode and times are the same.
"""

from __future__ import annotations

import json
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict

from sfu.data.images.files import file_state
from sfu.errors import ArtifactError
from sfu.files import write_text
from sfu.readers import Record, Scalar, read_record
from sfu.store import Store, cache_dir, key_of

if TYPE_CHECKING:
    from sfu.data.settings import BackboneSettings

_SCHEMA = 3
_NO_EFFECT = ("batch_size", "workers", "cache")
_RECORD = "record.json"


def recall(config: BackboneSettings) -> dict[str, Any] | None:
    """Return the record of the backbone of ``config``, or ``None`` if it was not built before."""
    return Store(cache_dir("backbones")).read(_key(config), _read)


class _Backbone(Record):
    model_config = ConfigDict(extra="allow")

    backbone: str
    weights: str
    transform: dict[str, Scalar | list[float]]
    dtype: str
    pooling: str


def _read(folder: Path) -> dict[str, Any]:
    return read_record(folder / _RECORD, _Backbone, "Remove it, and it is made again.").model_dump()


def remember(config: BackboneSettings, record: dict[str, Any]) -> None:
    """Cache ``record``; if that is impossible, the next run is slower and nothing else."""
    text = json.dumps(record, indent=2) + "\n"
    with suppress(ArtifactError):
        store = Store(cache_dir("backbones"))
        store.put(_key(config), lambda folder: write_text(folder / _RECORD, text), replace=True)


def _key(config: BackboneSettings) -> str:
    settings: dict[str, Any] = {key: value for key, value in vars(config).items() if key not in _NO_EFFECT}
    settings["versions"] = {name: _version(name) for name in ("torch", config.library)}
    settings["schema"] = _SCHEMA
    if (file := config.weights_file) is not None:
        settings["file"] = file_state(str(file))
    return key_of(settings)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
