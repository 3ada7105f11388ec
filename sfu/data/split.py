"""Which training rows are to be forgotten: a fraction, whole classes or groups, or a file of rows or image names.

Shapes: N training rows, F forget rows, R = N - F retained rows.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from pydantic import FailFast
from torch import Tensor

from sfu.data.choices import chosen_first
from sfu.data.images.files import path_key
from sfu.data.settings import DEFAULT_FRACTION, RANDOM
from sfu.errors import ConfigError, DataError
from sfu.names import composed
from sfu.readers import Whole, read_array, read_json, read_text, refusing

if TYPE_CHECKING:
    from sfu.data.feature_data import Groups
    from sfu.data.settings import ForgetSettings

_ROWS = Annotated[list[Whole], FailFast()]
_WORDS = {"true": True, "false": False, "null": None}
_SMALL_FILE, _BYTES_PER_ROW = 1 << 16, 64  # of a list of row numbers


@dataclass(frozen=True)
class ForgetSplit:
    """Sorted row numbers of the training part.

    Attributes:
        forget_F: Rows to forget, int64.
        retain_R: All other rows, int64.
        kind: ``fraction``, ``classes``, ``groups``, ``indices``, ``files``, ``canaries``, or how a fraction was chosen.
        request: What methods are told that the rows are, one of :data:`sfu.data.settings.KINDS`.
    """

    forget_F: Tensor
    retain_R: Tensor
    kind: str
    request: str = RANDOM

    @classmethod
    def of(cls, forget: Tensor, n_train: int, kind: str, request: str) -> ForgetSplit:
        """Return the split that forgets these rows and retains all others.

        Raises:
            DataError: No row would be left.
        """
        if forget.numel() == n_train:
            raise DataError(f"the forget set is all {n_train} training rows, so nothing would be left to retain.")
        keep = torch.ones(n_train, dtype=torch.bool)
        keep[forget] = False
        return cls(forget.sort().values, keep.nonzero().squeeze(1), kind, request)


def make_split(
    config: ForgetSettings,
    labels_N: Tensor,
    n_classes: int,
    seed: int,
    class_names: Sequence[str] = (),
    image_names: Sequence[str] = (),
    groups: Groups | None = None,
    features_ND: Tensor | None = None,
) -> ForgetSplit:
    """Choose the forget set.

    ``forget.indices`` and ``forget.files`` stand alone. ``forget.classes`` and ``forget.groups`` take all rows of those
    classes or groups, or, with ``forget.fraction``, a part of them. Otherwise ``forget.fraction`` (0.1 unless given) of
    all rows is taken. ``forget.choose`` says which rows a fraction takes. Without ``features_ND``, as many are drawn at
    random in place of those that only features tell.

    Raises:
        ConfigError: Settings contradict each other or are out of range.
        DataError: The forget set is empty, is everything, or names rows that do not exist or twice.
    """
    forget, kind = choose_rows(config, labels_N, n_classes, seed, class_names, image_names, groups, features_ND)
    if config.parts > forget.numel():
        raise ConfigError(
            f"forget.parts={config.parts} but there are only {forget.numel()} rows to forget. Give at most that many."
        )
    return ForgetSplit.of(forget, labels_N.shape[0], kind, config.declared)


def choose_rows(
    config: ForgetSettings,
    labels_N: Tensor,
    n_classes: int,
    seed: int,
    class_names: Sequence[str] = (),
    image_names: Sequence[str] = (),
    groups: Groups | None = None,
    features_ND: Tensor | None = None,
) -> tuple[Tensor, str]:
    """Return the rows that the settings name, int64, and in which way; see :func:`make_split`."""
    n_train = labels_N.shape[0]
    alone = [key for key in ("indices", "files") if getattr(config, key) is not None]
    if alone:
        others = (config.classes, config.groups, config.fraction)
        if len(alone) == 2 or config.choose != RANDOM or any(one is not None for one in others):
            raise ConfigError(f"forget.{alone[0]} stands alone: leave out the other settings of forget.")
        if config.files is not None:
            forget, kind = _rows_of_files(Path(config.files).expanduser(), image_names), "files"
        else:
            forget, kind = _read_indices(Path(str(config.indices)).expanduser(), n_train), "indices"
    else:
        pool, fraction = torch.arange(n_train), config.fraction
        kind = "fraction" if config.choose == RANDOM else config.choose
        if config.classes is not None and config.groups is not None:
            raise ConfigError("forget.classes and forget.groups do not go together. Give one of them.")
        if config.classes is not None:
            pool, kind = _rows_of_classes(numbers_of(config.classes, class_names), labels_N, n_classes), "classes"
        elif config.groups is not None:
            pool, kind = _rows_of_groups(config.groups, groups), "groups"
        elif fraction is None:
            fraction = DEFAULT_FRACTION
        if fraction is None and config.choose != RANDOM:
            raise ConfigError(
                f"forget.choose={config.choose} chooses rows of a part, and forget.{kind} without forget.fraction "
                "takes all of them. Give forget.fraction, or leave forget.choose out."
            )
        forget = pool if fraction is None else _part(pool, fraction, config.choose, seed, labels_N, features_ND)
    return forget, kind


def _part(
    pool: Tensor, fraction: float, choose: str, seed: int, labels_N: Tensor, features_ND: Tensor | None
) -> Tensor:
    count = round(fraction * pool.numel())
    if count == 0:
        raise DataError(
            f"forget.fraction={fraction} of {pool.numel()} rows is an empty forget set. Forget at least one row."
        )
    if choose != RANDOM and features_ND is not None:
        return chosen_first(choose, pool, count, features_ND, labels_N, seed)
    order = torch.randperm(pool.numel(), generator=torch.Generator().manual_seed(seed))
    return pool[order[:count]]


def numbers_of(
    given_names: list[Any], names: Sequence[str], key: str = "forget.classes", what: str = "class"
) -> list[int]:
    """Return the numbers of classes or groups that are given by name, or by number if no name is a number.

    A name need not be quoted: ``10``, ``true`` or ``1e3`` reach sfu as a number or a truth value, and mean the class
    that is called so.

    Raises:
        DataError: A name is unknown, or the name of several; the message begins with ``key``.
    """
    shown_key = f"{key}={list(given_names)}"
    shown = [composed(name) for name in names]
    some_are_numbers = any(_is_whole(_unquoted(name)) for name in shown)
    numbers = []
    for given in given_names:
        if isinstance(given, str):
            found = [number for number, name in enumerate(shown) if name == composed(given)]
        else:
            found = [number for number, name in enumerate(shown) if repr(_unquoted(name)) == repr(given)]
        if not found and _is_whole(given) and not some_are_numbers:
            found = [given]
        if len(found) > 1:
            alike = " and ".join(repr(names[number]) for number in found)
            raise DataError(
                f"{shown_key}: {given!r} is the name of the {_PLURALS[what]} {alike}. Rename one of them, or give the "
                f"name in quotes if they differ ({key}='[\"{names[found[0]]}\"]')."
            )
        if not found:
            near = difflib.get_close_matches(str(given), shown, n=3) or list(shown[:5])
            hint = f"Its names include {', '.join(near)}" if names else "This dataset has numbers only"
            named = f", and because some {_PLURALS[what]} are named by numbers, a number is a name"
            why = named if _is_whole(given) else ""
            if not isinstance(given, str | int) or isinstance(given, bool):
                hint += ". Put the name in quotes if Hydra or YAML has changed it (no is read as false)"
            raise DataError(f"{shown_key}: {given!r} is not a {what}{why}. {hint}.")
        numbers.append(found[0])
    return numbers


_PLURALS = {"class": "classes", "group": "groups"}


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unquoted(name: str) -> Any:
    """Return what Hydra and YAML make of a name without quotes."""
    if name.lower() in _WORDS:
        return _WORDS[name.lower()]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(name)
    return name


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


def _rows_of_groups(given: list[Any], groups: Groups | None) -> Tensor:
    if groups is None:
        raise ConfigError(
            f"forget.groups={list(given)}: this dataset does not say whose its rows are. Add train_groups to the file "
            "of features, or a column group to dataset.labels_csv."
        )
    if not given:
        raise DataError("forget.groups=[] is an empty forget set. Name at least one group.")
    numbers = numbers_of(given, groups.names, "forget.groups", "group")
    outside = [number for number in numbers if not 0 <= number < len(groups.names)]
    if outside:
        raise DataError(f"forget.groups={list(given)} names {outside}. The groups are 0 .. {len(groups.names) - 1}.")
    if len(set(numbers)) != len(numbers):
        raise DataError(f"forget.groups={list(given)} names a group twice.")
    is_theirs_N = np.isin(groups.numbers_N, numbers)
    if is_theirs_N.all():
        whose = f"the only group, {groups.names[0]}" if len(groups.names) == 1 else "one of these groups"
        raise DataError(
            f"forget.groups={list(given)}: all {len(is_theirs_N)} training rows belong to {whose}, so nothing would be "
            "left to retain. Name fewer groups, or give train_groups one value for each person."
        )
    return torch.from_numpy(np.flatnonzero(is_theirs_N))


def _read_indices(path: Path, n_train: int) -> Tensor:
    where = f"forget.indices={path}"
    limit = _SMALL_FILE + _BYTES_PER_ROW * n_train  # whatever is longer names a row twice
    with refusing(where, "Give row numbers: .txt (one a line), .json (a list) or .npy.", DataError):
        if path.suffix == ".npy":
            values = read_array(path)
        elif path.suffix == ".json":
            values = np.array(read_json(path, _ROWS, limit, n_train + 1), dtype=np.int64)
        else:
            words = read_text(path, limit).replace("_", "?").split()  # int() takes 1_0 for 10
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
    limit = _SMALL_FILE + 8 * sum(len(os.path.abspath(name)) for name in names)  # up to 8 bytes a character
    with refusing(where, "Give one file name a line, each once.", DataError):
        lines = [line.strip() for line in read_text(path, limit).splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{where} is an empty forget set. Name at least one image.")
    places = _Places(names)
    rows: dict[int, str] = {}
    for line in lines:
        found = places.find(line)
        if not found:
            raise DataError(f"{where}: {line!r} is not an image of the training part{places.near(line)}.")
        if len(found) > 1:
            raise DataError(f"{where}: several images end in {line!r}. Give more of the path.")
        if found[0] in rows:
            raise DataError(f"{where} names {line!r} more than once. Name every image once.")
        rows[found[0]] = line
    return torch.tensor(list(rows), dtype=torch.int64)


class _Places:
    """Finds the files whose path is, or ends in, what a person wrote."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = [path_key(os.path.abspath(path)) for path in paths]
        self._rows: dict[str, list[int]] = {}
        for row, path in enumerate(self._paths):
            for end in {path.rpartition("/")[2], _last_two(path)}:
                self._rows.setdefault(end, []).append(row)

    def find(self, given: str) -> list[int]:
        """Return the rows of the paths that end in ``given``, or are ``given`` if it begins at the root."""
        wanted = path_key(os.path.expanduser(given))
        rows = self._rows.get(_last_two(wanted), ())
        if wanted.startswith("/"):
            return [row for row in rows if self._paths[row] == wanted]
        return [row for row in rows if f"/{self._paths[row]}".endswith(f"/{wanted}")]

    def near(self, given: str) -> str:
        """Return a hint at the end of a path that resembles ``given``; empty if there is none."""
        near = difflib.get_close_matches(path_key(given), list(self._rows)[:20_000], n=1)
        return f" (near: {near[0]})" if near else ""


def _last_two(path: str) -> str:
    return "/".join(path.split("/")[-2:]).lstrip("/")
