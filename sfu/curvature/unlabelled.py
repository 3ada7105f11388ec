"""Unlabelled rows like the training rows, as files of features: the model's traffic, or related public data.

They show the curvature that the forget rows do not. Any images like the training ones serve, through the same backbone.
The Hessian does not depend on labels for the quadratic, logistic and softmax losses; where it does (Huberised hinge,
class weights), the head's own predictions stand for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sfu.data.raw_arrays import check_features
from sfu.data.tables import held, read_rows, require_rows
from sfu.errors import DataError
from sfu.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_KEYS = ("features", "test_features")
_KEY = "curvature.unlabelled"


def check_unlabelled(files: Sequence[str]) -> None:
    """Check, before long work starts, that the files are there and of a type that can be read.

    Raises:
        ConfigError: A file is of another type.
        DataError: A file does not exist.
    """
    for file in files:
        if not Path(file).expanduser().is_file():
            raise DataError(f"{_KEY}={file} does not exist (relative paths start at {Path.cwd()}). Give its path.")
        require_rows(Path(file), _KEY)


def read_unlabelled(files: Sequence[str], n_features: int, *, normalize_rows: bool = False) -> tuple[Tensor, ...]:
    """Return the array or column ``features`` (or else ``test_features``) of each file, ``[U, D]``.

    ``normalize_rows`` scales rows to norm 1, as those of the dataset were.

    Raises:
        ConfigError: A file is of another type.
        DataError: A file does not exist, is damaged, has no such array, or its rows do not fit the head.
    """
    check_unlabelled(files)
    return tuple(_read(Path(file).expanduser(), n_features, normalize_rows) for file in files)


def _read(path: Path, n_features: int, normalize_rows: bool) -> Tensor:
    arrays = read_rows(path, _KEYS, _KEY)
    key = next((key for key in _KEYS if key in arrays), None)
    if key is None:
        raise DataError(
            f"{_KEY}={path} has no 'features', but {held(path)}. Save the rows [rows, {n_features}] under that name."
        )
    features = torch.from_numpy(check_features(arrays[key], f"{_KEY}={path}: {key}"))
    if features.shape[1] != n_features:
        raise DataError(
            f"{_KEY}={path}: {key} is {features.shape[1]} wide but the head takes {n_features}. Extract it with the "
            "backbone the head was trained on."
        )
    return torch.nn.functional.normalize(features, dim=1) if normalize_rows else features
