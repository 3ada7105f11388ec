"""Which training rows are to be forgotten: a random fraction, whole classes, or a file of rows or image names.

Shapes: N training rows, F forget rows, R = N - F retained rows.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from pydantic import FailFast
from torch import Tensor

from sfu.errors import ConfigError, DataError
from sfu.readers import Whole, read_array, read_bytes, read_json, refusing

if TYPE_CHECKING:
    from sfu.data.settings import ForgetSettings

DEFAULT_FRACTION = 0.1
_DEPTH = 4  # how many last parts of a path may name an image
_ROWS = Annotated[list[Whole], FailFast()]
_SMALL_FILE, _BYTES_PER_ROW = 1 << 16, 64  # of a list of row numbers


@dataclass(frozen=True)
class ForgetSplit:
    """Sorted row numbers of the training part.

    Attributes:
        forget_F: Rows to forget, int64.
        retain_R: All other rows, int64.
        kind: ``fraction``, ``classes``, ``indices`` or ``files``.
    """

    forget_F: Tensor
    retain_R: Tensor
    kind: str


def make_split(
    config: ForgetSettings,
    labels_N: Tensor,
    n_classes: int,
    seed: int,
    class_names: Sequence[str] = (),
    image_names: Sequence[str] = (),
) -> ForgetSplit:
    """Choose the forget set.

    ``forget.indices`` and ``forget.files`` stand alone. ``forget.classes`` takes all rows of those classes, or, with
    ``forget.fraction``, a random part of them. Otherwise ``forget.fraction`` (0.1 unless given) of all rows is drawn.

    Raises:
        ConfigError: Settings contradict each other or are out of range.
        DataError: The forget set is empty, is everything, or names rows that do not exist or twice.
    """
    n_train = labels_N.shape[0]
    forget, kind = choose_rows(config, labels_N, n_classes, seed, class_names, image_names)
    if forget.numel() == n_train:
        raise DataError(f"the forget set is all {n_train} training rows, so nothing would be left to retain.")
    keep = torch.ones(n_train, dtype=torch.bool)
    keep[forget] = False
    return ForgetSplit(forget.sort().values, keep.nonzero().squeeze(1), kind)


def choose_rows(
    config: ForgetSettings,
    labels_N: Tensor,
    n_classes: int,
    seed: int,
    class_names: Sequence[str] = (),
    image_names: Sequence[str] = (),
) -> tuple[Tensor, str]:
    """Return the rows that the settings name, int64, and in which way; see :func:`make_split`."""
    n_train = labels_N.shape[0]
    alone = [key for key in ("indices", "files") if getattr(config, key) is not None]
    if alone:
        if len(alone) == 2 or config.classes is not None or config.fraction is not None:
            raise ConfigError(f"forget.{alone[0]} stands alone: leave out the other settings of forget.")
        if config.files is not None:
            forget, kind = _rows_of_files(Path(config.files).expanduser(), image_names), "files"
        else:
            forget, kind = _read_indices(Path(str(config.indices)).expanduser(), n_train), "indices"
    else:
        pool, kind = torch.arange(n_train), "fraction"
        fraction = config.fraction
        if config.classes is not None:
            numbers = _numbers(config.classes, class_names)
            pool, kind = _rows_of_classes(numbers, labels_N, n_classes), "classes"
        elif fraction is None:
            fraction = DEFAULT_FRACTION
        forget = pool if fraction is None else _draw(pool, fraction, seed)
    return forget, kind


def _draw(pool: Tensor, fraction: float, seed: int) -> Tensor:
    count = round(fraction * pool.numel())
    if count == 0:
        raise DataError(
            f"forget.fraction={fraction} of {pool.numel()} rows is an empty forget set. Forget at least one row."
        )
    order = torch.randperm(pool.numel(), generator=torch.Generator().manual_seed(seed))
    return pool[order[:count]]


def _numbers(classes: list[Any], names: Sequence[str]) -> list[int]:
    """Class numbers, those given by name looked up; where the names are numbers themselves, a number is a name."""
    numbers = []
    place = {name: number for number, name in enumerate(names)}
    named_by_number = bool(names) and all(name.isdecimal() for name in names)
    for given in classes:
        whole = isinstance(given, int) and not isinstance(given, bool)
        if whole and not named_by_number:
            numbers.append(given)
        elif (whole or isinstance(given, str)) and str(given) in place:
            numbers.append(place[str(given)])
        else:
            near = difflib.get_close_matches(str(given), names, n=3) or list(names[:5])
            hint = f"Its names include {', '.join(near)}" if names else "This dataset has numbers only"
            raise DataError(f"forget.classes={list(classes)}: {given!r} is not a class. {hint}.")
    return numbers


def _rows_of_classes(classes: list[int], labels_N: Tensor, n_classes: int) -> Tensor:
    if not classes:
        raise DataError("forget.classes=[] is an empty forget set. Name at least one class.")
    unknown = [c for c in classes if not 0 <= c < n_classes]
    if unknown:
        raise DataError(f"forget.classes={list(classes)} names {unknown}. The classes are 0 .. {n_classes - 1}.")
    if len(set(classes)) != len(classes):
        raise DataError(f"forget.classes={list(classes)} names a class twice.")
    rows = torch.isin(labels_N, torch.tensor(list(classes))).nonzero().squeeze(1)
    if rows.numel() == 0:
        raise DataError(f"forget.classes={list(classes)}: no training row has these labels. The forget set is empty.")
    return rows


def _read_indices(path: Path, n_train: int) -> Tensor:
    where = f"forget.indices={path}"
    limit = _SMALL_FILE + _BYTES_PER_ROW * n_train  # whatever is longer names a row twice
    with refusing(where, "Give row numbers: .txt (one a line), .json (a list) or .npy.", DataError):
        if path.suffix == ".npy":
            values = read_array(path)
        elif path.suffix == ".json":
            values = np.array(read_json(path, _ROWS, limit, n_train + 1), dtype=np.int64)
        else:
            words = read_bytes(path, limit).replace(b"_", b"?").split()  # int() takes 1_0 for 10
            values = np.array([int(word) for word in words], dtype=np.int64)
    if values.size == 0:
        raise DataError(f"{where} is an empty forget set. Forget at least one row.")
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise DataError(f"{where} holds {values.dtype} of shape {list(values.shape)}. Give a flat list of integers.")
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= n_train:
        raise DataError(f"{where} names rows {low} .. {high}. The training rows are 0 .. {n_train - 1}.")
    if values.size > n_train:
        raise DataError(f"{where} holds {values.size} numbers for {n_train} training rows. List every row once.")
    unique, counts = np.unique(values, return_counts=True)
    if unique.size != values.size:
        raise DataError(f"{where} names row {int(unique[counts > 1][0])} more than once. List every row once.")
    return torch.from_numpy(values.astype(np.int64))


def _rows_of_files(path: Path, names: Sequence[str]) -> Tensor:
    """Training row numbers of the images named in a text file, one a line.

    A line is the image's path or its last parts, such as ``cat/0001.jpg``, as long as only one training image ends so.
    """
    where = f"forget.files={path}"
    if not names or not Path(names[0]).suffix:
        raise ConfigError(f"{where}: this dataset has no files to name. Use forget.indices.")
    limit = _SMALL_FILE + 4 * sum(map(len, names))  # a name is of up to 4 bytes a character
    with refusing(where, "Give one file name a line, each once.", DataError):
        lines = [line.strip() for line in read_bytes(path, limit).decode().splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{where} is an empty forget set. Name at least one image.")
    places = _places(names)
    rows: list[int] = []
    for line in lines:
        found = places.get(line)
        if found is None:
            near = difflib.get_close_matches(line, list(places)[:20_000], n=1)
            hint = f" (near: {near[0]})" if near else ""
            raise DataError(f"{where}: {line!r} is not an image of the training part{hint}.")
        if found < 0:
            raise DataError(f"{where}: several images end in {line!r}. Give more of the path.")
        rows.append(found)
    if len(set(rows)) < len(rows):
        twice = next(line for line, row in zip(lines, rows, strict=True) if rows.count(row) > 1)
        raise DataError(f"{where} names {twice!r} more than once. Name every image once.")
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
