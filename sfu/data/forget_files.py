"""Images to forget by file name, as deletion requests name them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sfu.errors import ConfigError, DataError

_DEPTH = 4  # how many last parts of a path may name an image


def rows_of_files(path: Path, names: Sequence[str]) -> Tensor:
    """Training row numbers of the images named in a text file, one a line.

    A line is the image's path or its last parts, such as ``cat/0001.jpg``, as long as only one training image ends so.
    ``names`` are the paths of the training images.

    Raises:
        ConfigError: The dataset has no files.
        DataError: The list is unreadable or empty, or a line names no training image, several, or one again.
    """
    where = f"forget.files={path}"
    if not names or not Path(names[0]).suffix:
        raise ConfigError(f"{where}: this dataset has no files to name; use forget.indices.")
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{where} cannot be read ({error}); one file name a line is needed.") from error
    if not lines:
        raise DataError(f"{where} is an empty forget set; name at least one image.")
    places = _places(names)
    rows: list[int] = []
    for line in lines:
        found = places.get(line)
        if found is None:
            near = difflib.get_close_matches(line, list(places)[:20_000], n=1)
            hint = f" (near: {near[0]})" if near else ""
            raise DataError(f"{where}: {line!r} is no image of the training part{hint}.")
        if found < 0:
            raise DataError(f"{where}: several images end in {line!r}; give more of the path.")
        rows.append(found)
    if len(set(rows)) < len(rows):
        twice = next(line for line, row in zip(lines, rows, strict=True) if rows.count(row) > 1)
        raise DataError(f"{where} names {twice!r} more than once; name every image once.")
    return torch.tensor(rows, dtype=torch.int64)


def _places(names: Sequence[str]) -> dict[str, int]:
    """The row of every path and of its last parts; -1 where several rows share them."""
    places: dict[str, int] = {}
    for row, name in enumerate(names):
        parts = name.split("/")
        endings = {name, *("/".join(parts[-count:]) for count in range(1, min(_DEPTH, len(parts)) + 1))}
        for ending in endings:
            places[ending] = -1 if ending in places else row
    return places
