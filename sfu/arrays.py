"""Take what people hold in Python (tensors, arrays, lists, data frames, columns, loaders) and return tensors.

Only the form is changed here. Arrow, pandas, Polars and Hugging Face's ``datasets`` are known by their methods, and
none is imported. Shapes, ranges and whether the examples fit the head are checked where they are used.
PyTorch and NumPy are imported where they are needed, because heads import this module and configurations import heads.
Shapes: N rows, D features.
"""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Iterator, Sequence
from mmap import mmap
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from sfu.errors import DataError
from sfu.names import counted

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from torch.utils.data import DataLoader, Dataset


class ToNumpy(Protocol):
    """A data frame, a series or a column of pandas, Polars, Arrow or another library."""

    def to_numpy(self) -> Any:
        """Return the values as an array."""


Array: TypeAlias = "Tensor | np.ndarray | ToNumpy | Sequence[Any]"
"""What stands for an array of numbers."""
Pairs: TypeAlias = "DataLoader[Any] | Dataset[Any] | Iterator[tuple[Any, Any]]"
"""What gives the features of some rows and their labels, row by row or batch by batch; a list of pairs does, too."""


def as_examples(features: Array | Pairs, labels: Array | None) -> tuple[Tensor, Tensor]:
    """Return features and labels as tensors; a loader, a dataset, an iterator or a list of pairs has both.

    Raises:
        DataError: See :func:`as_tensor`; or labels are missing, given twice, or not what the loader gives.
    """
    from torch.utils.data import DataLoader, Dataset

    has_both = isinstance(features, DataLoader | Dataset | Iterator)
    if has_both or (labels is None and isinstance(features, list | tuple)):
        if labels is not None:
            raise DataError(
                f"labels are given beside features={type(features).__name__}, which has labels of its own. Leave "
                "labels out."
            )
        return _collect(cast("Pairs", features))
    if labels is None:
        raise DataError(
            "labels are missing. Give the label of each row of features, or give a DataLoader or Dataset of "
            "(features, labels) as features."
        )
    return as_tensor(cast("Array", features), "features"), as_tensor(labels, "labels")


def values_of(labels: Any) -> Sequence[Any]:
    """Return labels in Python's own types; none if they are no array, series or list."""
    given = column_values(labels)
    given = numpy_of(given) if hasattr(given, "to_numpy") else given
    values = given.tolist() if hasattr(given, "tolist") else given
    return values if isinstance(values, list | tuple) else ()


def numbered(labels: Any, names: Sequence[str] | None) -> Any:
    """Return class numbers for labels that are names; other labels are returned as they are.

    Raises:
        DataError: A name is none of the head's classes, or these have no names.
    """
    values = values_of(labels)
    if not any(isinstance(one, str) for one in values):
        return labels
    known = {name: number for number, name in enumerate(names or ())}
    strange = [one for one in values if not isinstance(one, str) or one not in known]
    if strange:
        which = f"The classes are {', '.join(names)}" if names else "The head has no names of its classes"
        raise DataError(
            f"the label {reprlib.repr(strange[0])} is no class of the head. {which}. Give one of them, or class "
            "numbers; sfu.TrainingRecord(classes=...) names them."
        )
    return [known[one] for one in values]


def as_tensor(given: Array, argument: str) -> Tensor:
    """Return numbers as a tensor without gradient: floats in 32 bits or more, whole numbers in 64.

    Args:
        given: A tensor, an array, nested lists, a list of tensors, or a data frame or column of another library, whose
            cells may be lists or arrays of one length.
        argument: How messages name it.

    Raises:
        DataError: It does not hold numbers in rows of one length.
    """
    import torch

    given = column_values(given)
    if isinstance(given, torch.Tensor):
        return _dense(given, argument)
    if isinstance(given, list | tuple) and given and all(isinstance(one, torch.Tensor) for one in given):
        if len(shapes := {tuple(one.shape) for one in given}) > 1:
            first, second = (list(shape) for shape in sorted(shapes)[:2])
            raise DataError(f"{argument} are tensors of shapes {first} and {second}. Give rows of one length.")
        return torch.stack([_dense(one, argument) for one in given])
    return _from_numpy(_as_array(given, argument), argument)


def is_column(given: Any) -> bool:
    """Return whether it is no array of NumPy or PyTorch, but says how to make one."""
    return _is_of_datasets(given) or hasattr(given, "to_numpy")


def column_values(given: Any) -> Any:
    """Return the values of a column of ``datasets``, which NumPy would read row by row; return anything else as it is.

    A column without a format comes as an Arrow array, and others as their format has them.
    """
    if not _is_of_datasets(given):
        return given
    return given.source.with_format("arrow")[:][given.column_name] if given.source.format["type"] is None else given[:]


def _is_of_datasets(given: Any) -> bool:
    return hasattr(given, "column_name") and hasattr(getattr(given, "source", None), "with_format")


def numpy_of(given: Any) -> np.ndarray:
    """Return what NumPy makes of it. Arrow's ``to_numpy()`` refuses to copy, so ``__array__`` comes first."""
    import numpy as np

    given = column_values(given)
    return np.asarray(given if hasattr(given, "__array__") or not hasattr(given, "to_numpy") else given.to_numpy())


def _as_array(given: Any, argument: str) -> np.ndarray:
    import numpy as np

    if np.ma.is_masked(given):
        raise DataError(f"{argument} are a masked array with masked values. Remove those rows.")
    nulls = getattr(given, "null_count", 0)  # a method in Polars
    if isinstance(nulls := nulls() if callable(nulls) else nulls, int) and nulls:
        raise DataError(f"{argument} have {counted(nulls, 'null')} in {len(given):,} rows. Remove those rows.")
    try:
        array = numpy_of(given)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(
            f"{argument} are a {type(given).__name__} that is no array of numbers ({str(error)[:200].rstrip('.')}). "
            "Give rows of one length."
        ) from error
    if array.dtype != object:
        return array
    values = array.reshape(-1).tolist()
    if any(map(_is_row, values)):
        rows = _stacked(values, argument)
        return rows if array.ndim == 1 or array.shape[1:] == (1,) else rows.reshape(array.shape + rows.shape[1:])
    # columns of several types, or of a type with missing values: numbers all the same, if nothing else is in them
    for value in values:
        if not isinstance(value, int | float | np.number):
            raise _no_number(argument, value)
    return array.astype(np.int64 if all(isinstance(value, int | np.integer) for value in values) else np.float64)


def _is_row(value: Any) -> bool:
    return isinstance(value, list | tuple) or bool(getattr(value, "shape", ()))


def _stacked(values: list[Any], argument: str) -> np.ndarray:
    """Return the rows of a column whose cells are lists or arrays."""
    import numpy as np

    rows = []
    for number, value in enumerate(values):
        if not _is_row(value):
            raise DataError(f"row {number} of {argument} is {reprlib.repr(value)}, not a list of numbers. Remove it.")
        rows.append(_as_array(value, f"row {number} of {argument}"))
        if rows[-1].shape != rows[0].shape:
            first, this = (len(row) if row.ndim == 1 else list(row.shape) for row in (rows[0], rows[-1]))
            raise DataError(
                f"rows 0 and {number} of {argument} have {first} and {this} values. Give rows of one length."
            )
    return np.stack(rows)


def _from_numpy(array: np.ndarray, argument: str) -> Tensor:
    import numpy as np
    import torch

    kind = array.dtype.kind
    if kind == "V" and array.dtype.name.startswith(("bfloat", "float")):  # of the package ml_dtypes
        array, kind = array.astype(np.float32), "f"
    if kind not in "fiubc":
        raise _no_number(argument, array.reshape(-1)[0] if array.size else array.dtype)
    if kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise DataError(f"{argument} reach {int(array.max())}, which no 64-bit integer holds. Give smaller numbers.")
    wanted = {"f": np.float32 if array.dtype.itemsize <= 4 else np.float64, "c": np.complex128, "b": np.bool_}
    if array.dtype in (np.float32, np.float64) and array.flags.c_contiguous and _is_mapped(array):
        with warnings.catch_warnings():  # of memory that cannot be written: nothing writes to what it was given
            warnings.simplefilter("ignore", UserWarning)
            return torch.from_numpy(np.asarray(array))
    # a copy, because PyTorch takes no other byte order, no negative strides and no read-only memory
    return torch.from_numpy(np.array(array, dtype=wanted.get(kind, np.int64), order="C"))


def _is_mapped(array: np.ndarray) -> bool:
    """Return whether an array lies in a file that is mapped into memory, and so may be larger than memory."""
    import numpy as np

    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return isinstance(owner, mmap)


def first_not_finite(features_ND: Tensor, piece: int = 1 << 16) -> int | None:
    """Return the number of the first row with a value that is not finite, looking at a ``piece`` of rows at a time."""
    import torch

    for start in range(0, len(features_ND), piece):
        finite_N = torch.isfinite(features_ND[start : start + piece]).all(1)
        if not bool(finite_N.all()):
            return start + int(finite_N.int().argmin())
    return None


def _no_number(argument: str, value: Any) -> DataError:
    value = value.item() if getattr(value, "size", 0) == 1 else value
    remedy = "Give the class indices 0 .. C-1" if argument.endswith("labels") else "Give numbers alone"
    return DataError(f"{argument} hold {reprlib.repr(value)}, which is no number. {remedy}.")


def _dense(tensor: Tensor, argument: str) -> Tensor:
    """Return a tensor whose numbers PyTorch can compare and add: some narrow types lack these operations."""
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise DataError(
            f"{argument} are a {'quantized' if tensor.is_quantized else tensor.layout} tensor on {tensor.device}. Give "
            "a dense one that holds its numbers."
        )
    tensor = tensor.detach()
    if tensor.is_floating_point():
        return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.to(torch.float32)
    return tensor if tensor.is_complex() or tensor.dtype == torch.bool else tensor.to(torch.int64)


def _collect(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Return all rows of a loader or dataset of (features, labels)."""
    import torch
    from torch.utils.data import DataLoader

    name = f"features={type(pairs).__name__}"
    if isinstance(pairs, DataLoader) and getattr(pairs.batch_sampler, "drop_last", False):
        raise DataError(
            f"{name} has drop_last=True, so its last rows may not be forgotten. Give a loader with drop_last=False."
        )
    features: list[Tensor] = []
    labels: list[Tensor] = []
    for number, pair in enumerate(_items(pairs)):
        item = f"item {number} of {name}"
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise DataError(f"{item} is {_described(pair)}. Without labels=, it must be a pair (features, labels).")
        rows, of_rows = as_tensor(pair[0], f"{item}: features"), as_tensor(pair[1], f"{item}: labels")
        if rows.ndim == 1:
            rows, of_rows = rows[None], of_rows.reshape(1) if of_rows.numel() == 1 else of_rows[None]
        if rows.ndim != 2 or (features and rows.shape[1] != features[0].shape[1]):
            wanted = f"[rows, {features[0].shape[1]}], as before" if features else "[D] for a row or [rows, D]"
            raise DataError(
                f"{item} has features of shape {list(rows.shape)}, not {wanted}. Give the inputs of the head: pass "
                "images through the backbone first."
            )
        if of_rows.shape[:1] != rows.shape[:1]:
            raise DataError(f"{item} has {len(rows)} rows of features and labels of shape {list(of_rows.shape)}.")
        features.append(rows)
        labels.append(of_rows)
    if not features:
        raise DataError(f"{name} gives no examples. Give at least one.")
    return torch.cat(features), torch.cat(labels)


def _items(pairs: Pairs) -> Iterator[Any]:
    from torch.utils.data import Dataset, IterableDataset

    if not isinstance(pairs, Dataset) or isinstance(pairs, IterableDataset):
        yield from pairs
        return
    for index in range(len(pairs)):  # type: ignore[arg-type] # iterating over a dataset may never end
        yield pairs[index]


def _described(item: object) -> str:
    size = f" of {len(item)}" if isinstance(item, list | tuple | dict) else ""
    return f"a {type(item).__name__}{size}"
