"""The folder that ``sfu-unlearn`` writes, and what its files are called.

``head.safetensors``, ``head.json`` and ``head.secret`` are the head (``sfu.load_head("FOLDER/head")``), and
``model.safetensors`` or ``model.pt`` is the model it belongs to, if it came from a checkpoint. ``record-1.json``,
``record-1.md``, ``record-2.json`` and so on are the records, one an event. The folder ``before`` has the head and the
model before the last request, if that kept them. No PyTorch is imported.
"""

from __future__ import annotations

import re
from pathlib import Path

from sfu.files import SECRET, file_digest
from sfu.records.record import FileDigests

HEAD = "head"
BEFORE = "before"
MODELS = ("model.safetensors", "model.pt")
_RECORD = re.compile(r"record-([1-9]\d*)\.json")


def is_head_folder(path: Path) -> bool:
    """Return whether a path is a folder that holds a head as ``sfu-unlearn`` writes it."""
    return (path / f"{HEAD}.json").is_file()


def folder_of(path: Path) -> Path:
    """Return the folder of ``sfu-unlearn`` that a path belongs to: itself, or the one that holds this head or model.

    Any other path is returned as it is.
    """
    folder = path.parent
    is_part = path.name == HEAD or path.stem == HEAD or path.name in MODELS
    return folder if is_part and is_head_folder(folder) and records_in(folder) else path


def records_in(folder: Path) -> list[Path]:
    """Return the records in a folder, by their number."""
    found = {int(match[1]): path for path in folder.iterdir() if (match := _RECORD.fullmatch(path.name))}
    return [found[number] for number in sorted(found)]


def model_in(folder: Path) -> Path | None:
    """Return the checkpoint in a folder, if there is one."""
    return next((folder / name for name in MODELS if (folder / name).is_file()), None)


def head_files(folder: Path) -> list[Path]:
    """Return the files of the head in a folder, and the model it belongs to."""
    return [*_parts(folder / HEAD).values(), *filter(None, [model_in(folder)])]


def _parts(stem: Path) -> dict[str, Path]:
    suffixes = {"tensors": ".safetensors", "settings": ".json", "secret": SECRET}
    files = {key: stem.with_name(stem.name + suffix) for key, suffix in suffixes.items()}
    return {key: path for key, path in files.items() if path.is_file()}


def digests_of(stem: Path, model: Path | None = None) -> FileDigests:
    """Return the digests of the files of a head at a stem, and of the model it belongs to."""
    digests = {key: file_digest(path) for key, path in _parts(stem).items()}
    return FileDigests(**digests, model=None if model is None else file_digest(model))
