"""Read the rows to forget from files, all of which are one request.

Shapes: F rows, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sfu.data.tables import held, read_rows
from sfu.errors import DataError

_NEEDED, _KEYS = ("features", "labels"), ("features", "labels", "weights")


def read_forget_files(paths: Sequence[Path]) -> dict[str, np.ndarray]:
    """Return the arrays ``features`` [F, D], ``labels`` [F] and, if they are there, ``weights`` [F] of all files.

    Raises:
        ConfigError: A file is of another type.
        DataError: A file cannot be read, or lacks an array that is needed or that another file has; or the arrays of
            two files do not fit together.
    """
    files = [_read(path) for path in paths]
    first = files[0]
    for path, arrays in zip(paths, files, strict=True):
        if set(arrays) != set(first):
            odd = next(iter(set(arrays) ^ set(first)))
            raise DataError(f"one of FORGET={paths[0]} and {path} has '{odd}', and the other has not. Make them alike.")
        for key, values in arrays.items():
            if (values.shape[1:], values.dtype.kind) != (first[key].shape[1:], first[key].dtype.kind):
                raise DataError(
                    f"FORGET={path} has {key} {list(values.shape)} of type {values.dtype}, but {paths[0]} has "
                    f"{list(first[key].shape)} of {first[key].dtype}. Make them alike."
                )
    return {key: np.concatenate([arrays[key] for arrays in files]) for key in first}


def _read(path: Path) -> dict[str, np.ndarray]:
    arrays = read_rows(path, _KEYS, "FORGET")
    for key in _NEEDED:
        if key not in arrays:
            raise DataError(
                f"FORGET={path} has no '{key}', but {held(path)}. Save the rows with numpy.savez(FILE, features=..., "
                "labels=...), or as Parquet with a list of numbers in each row of 'features'."
            )
        if arrays[key].ndim == 0:
            raise DataError(f"FORGET={path}: {key} is a single number. Give one row, or one label, for each example.")
    return arrays
