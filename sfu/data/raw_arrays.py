"""Arrays as a dataset file holds them: their checks, and a test part for those without one. No PyTorch is imported."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sfu.data.labels import label_problem
from sfu.errors import DataError

_LAST_CODE, _SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)  # of Unicode


class RawArrays(NamedTuple):
    """Features ``[N, D]`` and labels ``[N]`` of the training part, ``[T, D]`` and ``[T]`` of the test part.

    ``train_groups`` ``[N]`` says whose the training rows are, if the dataset does.
    """

    train_features: np.ndarray
    train_labels: np.ndarray
    test_features: np.ndarray
    test_labels: np.ndarray
    train_groups: np.ndarray | None = None


class Shape(NamedTuple):
    """Numbers of training rows, test rows, features and classes, and the bytes of a number of the features."""

    rows: int
    test: int
    features: int
    classes: int
    itemsize: int


def stratified_test_split(
    features: np.ndarray,
    labels: np.ndarray,
    test_fraction: float,
    seed: int,
    source: str,
    groups: np.ndarray | None = None,
) -> RawArrays:
    """Hold out a seeded stratified test part (every class in proportion); see :func:`stratified_rows`.

    Raises:
        DataError: Features or labels cannot be used (rows are counted here as in the file), or a class is too small.
    """
    check_features(features, f"{source}: train_features")
    check_labels(labels, len(features), f"{source}: train_labels")
    train, test = stratified_rows(labels, test_fraction, seed, source)
    if groups is not None:
        groups = check_groups(groups, len(labels), f"{source}: train_groups")[train]
    return RawArrays(features[train], labels[train], features[test], labels[test], groups)


def stratified_rows(labels: np.ndarray, test_fraction: float, seed: int, source: str) -> tuple[np.ndarray, np.ndarray]:
    """Ascending row numbers of the training part and of a seeded stratified test part.

    Raises:
        DataError: A class is too small to appear on both sides.
    """
    from sklearn.model_selection import train_test_split

    try:
        train, test = train_test_split(
            np.arange(len(labels)), test_size=test_fraction, random_state=seed, stratify=labels
        )
    except ValueError as error:
        raise DataError(
            f"{source}: no stratified test part of dataset.test_fraction={test_fraction} can be drawn "
            f"({str(error)[:200]}). Give a test part, more rows a class, or another fraction."
        ) from error
    return np.sort(train), np.sort(test)


def check_features(array: np.ndarray, what: str) -> np.ndarray:
    """Return an array in a float dtype; raise :class:`DataError` unless it is a finite ``[rows, features]`` matrix."""
    if array.dtype.kind not in "fiub":
        raise DataError(f"{what} has dtype {array.dtype}. Give real numbers.")
    if array.ndim != 2 or 0 in array.shape:
        raise DataError(f"{what} has shape {list(array.shape)}. Give a non-empty [rows, features] array.")
    with np.errstate(over="ignore"):  # what becomes infinite is refused below
        kept = array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
    finite = np.isfinite(kept)
    if not finite.all():
        rows = np.flatnonzero(~finite.all(axis=1))
        raise DataError(
            f"{what} has NaN or infinite values in {rows.size} of {len(kept)} rows (first: row {rows[0]}). "
            "Remove or repair those rows."
        )
    return kept


def check_labels(array: np.ndarray, n_rows: int, what: str) -> np.ndarray:
    """Return labels ``[n_rows]`` as int64; raise :class:`DataError` if they are something else, with a remedy."""
    problem = label_problem(array, n_rows)
    if problem is not None:
        raise DataError(f"{what} {problem}")
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise DataError(f"{what} reaches {int(array.max())}. Give class indices 0 .. C-1.")
    return array.astype(np.int64)


def check_groups(array: np.ndarray, n_rows: int, what: str) -> np.ndarray:
    """Return the names of the groups of rows ``[n_rows]`` as text; an empty name belongs to no group.

    Raises:
        DataError: They are neither text nor whole numbers, or not one for each row.
    """
    if array.dtype.kind not in "iuUS":
        raise DataError(f"{what} has dtype {array.dtype}. Give text or whole numbers, one for each training row.")
    if array.shape != (n_rows,):
        raise DataError(f"{what} has shape {list(array.shape)} for {n_rows} training rows. Give one for each.")
    no_text = f"{what} holds text that is not Unicode. Write it again with numpy.savez."
    if array.dtype.kind == "U":
        codes = np.frombuffer(array.tobytes(), np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
        if ((codes > _LAST_CODE) | ((codes >= _SURROGATES[0]) & (codes <= _SURROGATES[1]))).any():
            raise DataError(no_text)  # NumPy would raise a SystemError
    try:
        texts = [one.decode() for one in array.tolist()] if array.dtype.kind == "S" else array.tolist()
    except ValueError as error:
        raise DataError(no_text) from error
    return np.array([str(one).strip() for one in texts])
