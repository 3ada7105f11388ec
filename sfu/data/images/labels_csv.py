"""Read labels of image files from a CSV file: columns ``file``, ``label`` and, optionally, ``split`` and ``group``."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from sfu.data.images.files import Walk, is_image, path_key
from sfu.data.images.image_set import ImageSet
from sfu.data.images.images import FileImages
from sfu.errors import DataError
from sfu.names import composed, warn_once
from sfu.readers import refusing, require_regular, text_encoding

_SPLITS = ("train", "test")
_GROUPS = ("group", "person")
_SHOWN = 5
_LONGEST_HEADER = 1 << 16  # characters


class _Row(NamedTuple):
    file: str
    label: str
    split: str
    line: int
    group: str = ""


class _Present:
    """The files below a folder: what is listed in it, and what links lead to by other ways."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = set(Walk(folder).files_below(folder))
        self._by_key = {path_key(file): file for file in self.files}
        self._by_stem: dict[str, str | None] = {}
        for file in filter(is_image, self.files):
            stem = os.path.splitext(path_key(file))[0]
            self._by_stem[stem] = None if stem in self._by_stem else file

    def written(self, file: str) -> str:
        """Return the name that a listed file has on the disk.

        Slashes and accents may be written otherwise, and the ending may be missing if one image alone has the name.
        """
        exact, slashed = (os.path.normpath(name) if name else "" for name in (file, file.replace("\\", "/")))
        found = next((name for name in (exact, slashed) if name in self), None)
        return found or self._by_key.get(path_key(file)) or self._by_stem.get(path_key(file)) or exact

    def __contains__(self, file: str) -> bool:
        return file in self.files or (not _is_outside(file) and os.path.isfile(self.folder / file))


def _is_outside(file: str) -> bool:
    return os.path.isabs(file) or file.split(os.sep)[0] == ".."


def read_labels_csv(path: Path, folder: Path, n_classes: int | None) -> ImageSet:
    """Return the images below ``folder`` that a CSV file lists, sorted by name, whatever the order of its rows.

    The CSV file is UTF-8, with a header; other columns are ignored. Commas, semicolons or tabs separate the cells. If
    all labels are integers, they are class indices from 0 (below ``n_classes``, if that is given; then some may be
    absent). Otherwise they are names, numbered in sorted order. The column ``group``, or else ``person``, says whose
    the images are; an empty cell belongs to no group.

    Raises:
        DataError: The file cannot be read, lacks a column, or has wrong rows; the message names their lines.
    """
    present = _Present(folder)
    rows, has_split, has_groups = _read_rows(path, present)
    rows.sort()
    files = [row.file for row in rows]
    left_out = sum(is_image(file) for file in present.files.difference(files))
    if left_out:
        warn_once(__name__, f"{left_out} images below {folder} are not in {path} and are left out")
    labels_N, names = _numbered([row.label for row in rows], path, n_classes)
    if len(names) < 2:
        raise DataError(f"dataset.labels_csv={path} holds one class, {names[0]}. At least two are needed.")
    is_test_N = np.array([row.split == "test" for row in rows]) if has_split else _parts_by_folder(files, path)
    if is_test_N is not None and (is_test_N.all() or not is_test_N.any()):
        raise DataError(
            f"dataset.labels_csv={path}: every row has split {rows[0].split}. Leave the column out to have a test part "
            "drawn."
        )
    groups_N = np.array([row.group for row in rows]) if has_groups else None
    return ImageSet(FileImages([f"{folder}/{file}" for file in files]), labels_N, is_test_N, names, groups_N)


def _parts_by_folder(files: list[str], path: Path) -> np.ndarray | None:
    """The test part if the listed files lie in train/ and test/; ``None`` if not in both of them."""
    first_N = np.array([file.split(os.sep)[0] for file in files])
    if not set(_SPLITS) <= set(first_N.tolist()):
        return None
    strays = np.flatnonzero(~np.isin(first_N, _SPLITS))
    if len(strays):
        raise DataError(
            f"dataset.labels_csv={path}: {files[strays[0]]!r} lies in neither train/ nor test/. "
            "Add a split column (train or test)."
        )
    return first_N == "test"


def _read_rows(path: Path, present: _Present) -> tuple[list[_Row], bool, bool]:
    """Read the rows, of which no more are held than there are files; also return whether they have splits and groups.

    Raises:
        DataError: The file cannot be read, lacks a column, has wrong rows or none.
    """
    rows: list[_Row] = []
    problems: list[str] = []
    n_problems, lines = 0, dict[str, int]()
    with refusing(f"dataset.labels_csv={path}", "Write it as CSV in UTF-8.", DataError):
        require_regular(path)
        with path.open("rb") as start:
            encoding = text_encoding(start.read(2))
        with path.open(newline="", encoding=encoding) as file:
            header, delimiter, first = _header(file)
            reader = csv.reader(file, delimiter=delimiter)
            columns = [name.strip() for name in header]
            lacking = [name for name in ("file", "label") if name not in columns]
            if lacking:
                raise DataError(
                    f"dataset.labels_csv={path} has no column {' and no column '.join(lacking)}. Its first line names "
                    f"{', '.join(columns)[:200] or 'nothing'}. It must name file,label and optionally split and group."
                )
            has_split = "split" in columns
            grouping = next((name for name in _GROUPS if name in columns), None)
            wanted = ("file", "label", "split", grouping)
            places = [columns.index(name) if name in columns else len(columns) for name in wanted]
            for cells in reader:
                if not any(cells):
                    continue
                file_name, label, split, group = (
                    cells[place].strip() if place < len(cells) else "" for place in places
                )
                row = _Row(present.written(file_name), composed(label), split, first + reader.line_num, composed(group))
                problem = _problem(row, present, lines.get(row.file, row.line), has_split)
                if row.file in present:
                    lines.setdefault(row.file, row.line)
                if problem is None:
                    rows.append(row)
                    continue
                n_problems += 1
                if len(problems) < _SHOWN:
                    problems.append(f"line {row.line}: {problem}")
    if problems:
        more = f" (and {n_problems - _SHOWN} more)" if n_problems > _SHOWN else ""
        raise DataError(f"dataset.labels_csv={path}: {'; '.join(problems)}{more}. Correct these rows.")
    if not rows:
        raise DataError(f"dataset.labels_csv={path} holds no row below its header.")
    return rows, has_split, grouping is not None


def _header(file: IO[str]) -> tuple[list[str], str, int]:
    """Return the cells of the header, what separates cells, and the number of the header's line.

    Excel separates cells by semicolons where numbers have a decimal comma, and may say so in a line ``sep=;``.
    """
    line, number, delimiter = file.readline(_LONGEST_HEADER), 1, ""
    if line.lower().startswith("sep="):
        delimiter = line[4:5].strip("\r\n")
        line, number = file.readline(_LONGEST_HEADER), 2
    delimiter = delimiter or max(",;\t", key=line.count)
    return next(csv.reader([line], delimiter=delimiter), []), delimiter, number


def _problem(row: _Row, present: _Present, first: int, has_split: bool) -> str | None:
    if not row.file:
        return "no file"
    if row.file not in present:
        if _is_outside(row.file):
            return f"{row.file!r} is outside dataset.path={present.folder}; files are given relative to it"
        return f"{row.file!r} does not exist below dataset.path={present.folder}"
    if first != row.line:
        return f"{row.file!r} is in line {first} already"
    if not row.label:
        return f"no label for {row.file!r}"
    if has_split and row.split not in _SPLITS:
        return f"split {row.split!r} of {row.file!r} is neither train nor test"
    return None


def _numbered(labels: list[str], path: Path, n_classes: int | None) -> tuple[np.ndarray, tuple[str, ...]]:
    try:
        numbers = [int(label.replace("_", "?")) for label in labels]  # int() takes 1_0 for 10
    except ValueError:
        names, labels_N = np.unique(labels, return_inverse=True)
        return labels_N, tuple(names.tolist())
    count = max(numbers) + 1 if n_classes is None else n_classes
    outside = sorted({number for number in numbers if not 0 <= number < count})
    if outside:
        raise DataError(
            f"dataset.labels_csv={path}: label {outside[0]} is not a class index from 0"
            + ("." if n_classes is None else f" below dataset.n_classes={n_classes}.")
        )
    unused = count - len(set(numbers))
    if n_classes is None and unused:
        raise DataError(
            f"dataset.labels_csv={path}: integer labels are class indices 0 .. {count - 1}, but {unused} of these do "
            "not occur. Count from 0 without gaps, use names, or set dataset.n_classes."
        )
    return np.array(numbers, dtype=np.int64), tuple(str(number) for number in range(count))
