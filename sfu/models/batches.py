"""Read batches of a model's raw inputs, with labels where there are some, from what people hold.

Shapes: B rows of a batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from sfu.arrays import as_tensor, is_column, numbered
from sfu.deadline import check_time
from sfu.errors import DataError

LABEL_KEYS = ("labels", "label")
"""Keys of a batch under which Hugging Face has the labels."""
_MASK = "attention_mask"  # of padded texts
_ROWS = 64  # in a batch, where the examples come without batches


@dataclass(frozen=True)
class Batch:
    """Arguments of a model for some examples, and their labels.

    Attributes:
        name: How messages name it.
        args: Positional arguments.
        keywords: Keyword arguments, as Hugging Face's models take them.
        labels_B: Labels, ``[B]`` or ``[B, C]``; ``None`` if there are none, or if they are of no use.
    """

    name: str
    args: tuple[Any, ...]
    keywords: Mapping[str, Any]
    labels_B: Tensor | None = None

    def call(self, model: nn.Module) -> Any:
        """Return what the model returns for these examples.

        Raises:
            DataError: It fails.
        """
        check_time()
        try:
            return model(*self.args, **self.keywords)
        except Exception as error:
            inputs = " and ".join(map(_described, [*self.args, *self.keywords.values()][:3]))
            raise DataError(
                f"the model fails on {self.name}, {inputs} ({type(error).__name__}: {str(error)[:300].rstrip('.')}). "
                "Give raw inputs as the model takes them, in batches: a DataLoader, a Dataset, or (inputs, labels)."
            ) from error

    def marks(self, n_rows: int) -> Tensor | None:
        """Return numbers that tell each example from others, int32 ``[B, 8]``: a digest of its inputs.

        They are the same in every batch, however far texts are padded there. ``None`` if the inputs are no rows.
        """
        tensors = {str(number): value for number, value in enumerate(self.args)} | dict(self.keywords)
        mask: Any = tensors.get(_MASK)
        rows = {key: one for key, one in tensors.items() if isinstance(one, Tensor) and one.shape[:1] == (n_rows,)}
        if not rows:
            return None
        found = []
        for number in range(n_rows):
            digest = hashlib.blake2b(digest_size=32)
            for key, value in sorted(rows.items()):
                masked = isinstance(mask, Tensor) and mask.shape == value.shape
                row = (value[number][mask[number] > 0] if masked else value[number]).reshape(-1)
                digest.update(f"{key}:{row.dtype}:{len(row)}:".encode() + row.view(torch.uint8).numpy().tobytes())
            found.append(digest.digest())
        return torch.frombuffer(bytearray(b"".join(found)), dtype=torch.int32).reshape(n_rows, 8)

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """Return the inputs on a device, floating-point numbers in a dtype."""

        def moved(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                value = torch.from_numpy(value)
            if isinstance(value, Tensor):
                return value.to(device, dtype) if value.is_floating_point() else value.to(device)
            return _mapped(moved, value)

        return replace(self, args=moved(self.args), keywords=moved(dict(self.keywords)))


def read_batches(
    data: Any, labels: Any = None, *, name: str, labelled: bool = True, classes: Sequence[str] | None = None
) -> tuple[Iterator[Batch], int | None]:
    """Return the batches of some examples, and how many there are, if that is known.

    Args:
        data: A ``DataLoader``; a ``Dataset``, or what has its ``__len__`` and ``__getitem__``; a ``Dataset`` of Hugging
            Face; a pair (inputs, labels); a mapping of inputs; an array or column of inputs; or an iterator or list of
            batches. A batch is a pair (inputs, labels) or a mapping with ``labels``; inputs are a tensor, a tuple of
            arguments, or a mapping of keywords.
        labels: The labels, if ``data`` are inputs alone.
        name: How messages name the examples.
        labelled: Whether labels are needed. Otherwise they are ignored.
        classes: Names of the classes, if labels may be names.

    Raises:
        DataError: The examples have another form, or no labels or labels twice.
    """

    def batch(item: Any, which: str, given: Any = None) -> Batch:
        args, keywords, found = _split(item) if given is None else _arguments(item, given)
        if not labelled:
            return Batch(which, args, keywords)
        if found is None:
            keys = f" with the keys {', '.join(map(str, keywords))}" if keywords else ""
            raise DataError(
                f"{which} is {_described(item)}{keys}, without labels. Give pairs (inputs, labels), or mappings with "
                "the key 'labels'."
            )
        one_or_more = as_tensor(numbered(found, classes), f"{which}: labels")
        shapes = [shape for value in [*args, *keywords.values()] if (shape := getattr(value, "shape", ()))]
        if not one_or_more.ndim and shapes and not any(shape[0] == 1 for shape in shapes):
            raise DataError(
                f"{which} is a single example, {list(shapes[0])} with one label, and a model takes batches. Give "
                "batches, such as (row[None], [label]), or a Dataset of single examples."
            )
        return Batch(which, args, keywords, one_or_more)

    kind = f"{name}={type(data).__name__}"
    if isinstance(data, list | tuple) and labels is None and _is_pair(data):
        data, labels = data
    loader: Iterable[Any] | None = None
    if hasattr(data, "with_format") and not isinstance(data, Mapping):  # of Hugging Face
        loader = DataLoader(_in_tensors(data), batch_size=_ROWS)
    elif isinstance(data, DataLoader | Iterator) or (isinstance(data, list | tuple) and labels is None):
        loader = data
    elif not isinstance(data, Mapping | list | tuple) and not hasattr(data, "shape") and _is_dataset(data):
        loader = DataLoader(data, batch_size=_ROWS)
    if loader is None:
        whole = batch(data, name, labels)
        return _chunks(whole)
    if labels is not None:
        raise DataError(f"labels are given beside {kind}, which has labels of its own. Leave labels out.")
    if isinstance(loader, DataLoader) and getattr(loader.batch_sampler, "drop_last", False):
        raise DataError(f"{kind} has drop_last=True, so its last rows would be missing. Give it with drop_last=False.")
    try:
        total: int | None = len(loader)  # type: ignore[arg-type]
    except TypeError:  # of an iterator
        total = None
    return (batch(item, f"batch {number} of {kind}") for number, item in enumerate(loader)), total


def _in_tensors(data: Any) -> Any:
    """Return a data set of Hugging Face whose rows are tensors; one that makes tensors or arrays stays as it is."""
    form = getattr(data, "format", None)  # a stream has none
    if form is None:
        return data.with_format("torch")
    own = form["type"] in ("torch", "numpy", "custom")
    return data if own else data.with_format("torch", columns=form["columns"])


def _is_dataset(data: Any) -> bool:
    has_rows = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not is_column(data)
    return isinstance(data, IterableDataset | Dataset) or has_rows


def _is_pair(item: Sequence[Any]) -> bool:
    """Whether it is (inputs, labels), and no list of two batches, which are both pairs or both mappings."""
    return len(item) == 2 and not any(
        isinstance(item[0], kind) and isinstance(item[1], kind) for kind in (Mapping, list | tuple)
    )


def _split(item: Any) -> tuple[tuple[Any, ...], Mapping[str, Any], Any]:
    """Return arguments, keywords and labels of what a loader gives."""
    if isinstance(item, Mapping):
        inputs = {key: _array(value) for key, value in item.items() if key not in LABEL_KEYS}
        return (), inputs, next((item[key] for key in LABEL_KEYS if key in item), None)
    if isinstance(item, list | tuple) and len(item) == 2:
        return _arguments(item[0], item[1])
    return _arguments(item, None)


def _arguments(inputs: Any, labels: Any) -> tuple[tuple[Any, ...], Mapping[str, Any], Any]:
    if isinstance(inputs, Mapping):
        return (), {key: _array(value) for key, value in inputs.items() if key not in LABEL_KEYS}, labels
    return tuple(map(_array, inputs if isinstance(inputs, list | tuple) else [inputs])), {}, labels


def _array(one: Any) -> Any:
    return as_tensor(one, "inputs") if is_column(one) else one


def _chunks(whole: Batch) -> tuple[Iterator[Batch], int]:
    """Return a set of examples in batches."""
    sizes = [len(value) for value in [*whole.args, *whole.keywords.values()] if getattr(value, "shape", ())]
    if not sizes or len(set(sizes)) > 1:
        described = " and ".join(map(_described, [*whole.args, *whole.keywords.values()])) or "nothing"
        raise DataError(
            f"{whole.name} are {described}, which are no rows of inputs. Give a DataLoader, a Dataset, or tensors "
            "of as many rows each."
        )
    if whole.labels_B is not None and whole.labels_B.shape[:1] != (sizes[0],):
        raise DataError(
            f"{whole.name} are {sizes[0]} rows, but labels are {list(whole.labels_B.shape)}. Give one for each row."
        )
    starts = range(0, sizes[0], _ROWS)

    def part(start: int) -> Batch:
        def cut(value: Any) -> Any:
            return value[start : start + _ROWS] if getattr(value, "shape", ()) else value

        labels_B = None if whole.labels_B is None else whole.labels_B[start : start + _ROWS]
        keywords = {key: cut(value) for key, value in whole.keywords.items()}
        return Batch(f"rows {start:,} ... of {whole.name}", tuple(map(cut, whole.args)), keywords, labels_B)

    return map(part, starts), len(starts)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: change(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(change, value))
    return value


def _described(value: object) -> str:
    if hasattr(value, "shape"):
        return f"{list(value.shape)} {str(getattr(value, 'dtype', '')).removeprefix('torch.')}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, list | tuple | dict) else "")
