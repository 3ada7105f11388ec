"""Whatever people hold their examples in gives the same tensors, or an error that says what to do."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import sfu
from sfu.arrays import as_examples, as_tensor, first_not_finite
from sfu.errors import DataError

VALUES = np.arange(12).reshape(4, 3) % 5
LABELS = np.array([0, 1, 2, 1])


class Frame:
    """A data frame or series of any library."""

    def __init__(self, values):
        self.values = values

    def to_numpy(self, dtype=None, copy=False):
        return self.values


class Rows(Dataset):
    """A dataset that never ends its iteration by itself, as those without ``__iter__`` may do."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index % len(self.items)]


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(torch.from_numpy(VALUES).float(), LABELS.tolist(), strict=True)


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


NUMPY = ["f2", "f4", "f8", "g", ">f4", ">f8", "i1", "i2", "i4", "i8", ">i8", "u1", "u2", "u4", "u8"]
TORCH = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]
TORCH += [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32]


@pytest.mark.parametrize(
    "given",
    [
        *(VALUES.astype(name) for name in NUMPY),
        *(torch.from_numpy(VALUES).to(dtype) for dtype in TORCH),
        torch.from_numpy(VALUES).double().requires_grad_(),
        torch.nn.Parameter(torch.from_numpy(VALUES).float()),
        torch.from_numpy(VALUES).float().T.contiguous().T,
        VALUES[::-1].copy()[::-1],
        read_only(VALUES.astype("f4")),
        np.ma.masked_array(VALUES),
        VALUES.tolist(),
        tuple(map(tuple, VALUES.tolist())),
        list(VALUES.astype("f4")),
        list(torch.from_numpy(VALUES).half()),
        [torch.from_numpy(row).float().requires_grad_() for row in VALUES],
        Frame(VALUES.astype("f8")),
        Frame(VALUES.astype(object)),
        Frame(np.array([[float(v) if i else int(v) for i, v in enumerate(row)] for row in VALUES], dtype=object)),
    ],
    ids=lambda given: f"{type(given).__name__}-{getattr(given, 'dtype', '')}",
)
def test_every_form_of_numbers_gives_the_same_tensor(given):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = as_tensor(given, "features")
    assert found.dtype in (torch.float32, torch.float64, torch.int64)
    assert not found.requires_grad
    assert torch.equal(found.double(), torch.from_numpy(VALUES).double())


def test_a_frame_of_pandas_gives_its_columns():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": VALUES[:, 0], "b": VALUES[:, 1].astype("f4"), "c": VALUES[:, 2] > 2})
    labels = pandas.Series(LABELS, index=[9, 3, 5, 1], dtype="Int64")
    features, found = as_examples(frame, labels)
    assert features[:, :2].tolist() == VALUES[:, :2].tolist()
    assert features[:, 2].tolist() == (VALUES[:, 2] > 2).tolist()
    assert found.tolist() == LABELS.tolist()
    with pytest.raises(DataError, match=r"labels hold <NA>, which is no number\. Give the class indices 0 \.\. C-1"):
        as_examples(frame, labels.astype(object).where(labels > 0, pandas.NA))
    with pytest.raises(DataError, match=r"features hold 'x', which is no number\. Give numbers alone"):
        as_examples(frame.assign(d="x"), LABELS)


ROWS = TensorDataset(torch.from_numpy(VALUES).half(), torch.from_numpy(LABELS))


@pytest.mark.parametrize(
    "given",
    [
        ROWS, DataLoader(ROWS), DataLoader(ROWS, batch_size=3), DataLoader(ROWS, batch_size=None),
        Rows(list(zip(VALUES.astype("f4"), LABELS.tolist(), strict=True))), Subset(ROWS, range(4)), Stream(),
        Rows([(row.tolist(), torch.tensor([label])) for row, label in zip(VALUES, LABELS, strict=True)]),
        DataLoader(Stream(), batch_size=3), list(DataLoader(ROWS, batch_size=3)), iter(DataLoader(ROWS, batch_size=3)),
        ((row, label) for row, label in zip(VALUES, LABELS, strict=True)),
    ],
    ids=lambda given: type(given).__name__,
)  # fmt: skip
def test_a_loader_or_dataset_gives_features_and_labels(given):
    features, labels = as_examples(given, None)
    assert features.tolist() == VALUES.tolist()
    assert labels.tolist() == LABELS.tolist()


IMAGE = torch.zeros(3, 8, 8)


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (VALUES, None, r"labels are missing\. Give the label of each row .* DataLoader or Dataset"),
        (ROWS, LABELS, r"labels are given beside features=TensorDataset, .* Leave labels out"),
        (VALUES, ["cat", "dog", "cat", "dog"], r"labels hold .*'cat'.*no number\. Give the class indices 0 \.\. C-1"),
        (VALUES, Frame(np.array(["cat"] * 4, object)), r"labels hold 'cat', which is no number"),
        (VALUES, np.array([2**63] * 4, "u8"), r"labels reach 9223372036854775808, which no 64-bit integer holds"),
        ([[1.0, 2.0], [3.0]], LABELS, r"features are a list that is no array of numbers .*Give rows of one length"),
        ([torch.zeros(2), torch.zeros(3)], LABELS, r"features are tensors of shapes \[2\] and \[3\]"),
        ("features.npz", LABELS, r"features hold .*'features\.npz', which is no number\. Give numbers alone"),
        ({"x": 1}, LABELS, r"features hold \{'x': 1\}, which is no number"),
        (np.ma.masked_array(VALUES, VALUES == 0), LABELS, r"masked values\. Remove those rows"),
        (np.array(["2020-01-01"], "M8[D]"), LABELS, "features hold .*which is no number"),
        (torch.zeros(4, 3).to_sparse(), LABELS, r"features are a torch\.sparse_coo tensor on cpu\. Give a dense one"),
        (torch.zeros(4, 3, device="meta"), LABELS, "features are a .* tensor on meta"),
        (DataLoader(ROWS, batch_size=3, drop_last=True), None, r"drop_last=True, .*Give a loader with drop_last=False"),
        (Rows([]), None, r"features=Rows gives no examples\. Give at least one"),
        (Rows([{"x": 1, "y": 2}]), None, r"item 0 .* is a dict of 2\. Without labels=, it must be a pair"),
        (Rows([(1, 2, 3)]), None, r"item 0 of features=Rows is a tuple of 3\. Without labels=, it must be a pair"),
        (VALUES.tolist(), None, r"item 0 of features=list is a list of 3\. Without labels=, it must be a pair"),
        (VALUES[:, :2].tolist(), None, r"item 0 of features=list has features of shape \[\]"),
        (iter(ROWS), LABELS, "labels are given beside features=.*, which has labels of its own"),
        (Rows([(IMAGE, 1)]), None, r"item 0 .*\[3, 8, 8\], not \[D\] .*pass images through the backbone first"),
        (DataLoader(Rows([(IMAGE, 1)])), None, r"item 0 of features=DataLoader .*\[1, 3, 8, 8\]"),
        (Rows([([1.0], 1), ([1.0, 2.0], 1)]), None, r"item 1 .*\[1, 2\], not \[rows, 1\], as before"),
        (Rows([(torch.zeros(4, 3), torch.zeros(3))]), None, r"item 0 .* has 4 rows .* labels of shape \[3\]"),
        (Rows([([1.0], "cat")]), None, r"item 0 of features=Rows: labels hold .*'cat'"),
    ],
)  # fmt: skip
def test_what_is_no_example_is_named_with_a_remedy(features, labels, message):
    with pytest.raises(DataError, match=message):
        as_examples(features, labels)


@pytest.mark.parametrize("mode", ["r", "c"])
def test_a_mapped_file_is_not_read_into_memory(tmp_path, mode):
    np.save(tmp_path / "rows.npy", np.arange(30, dtype=np.float32).reshape(10, 3))
    mapped = np.load(tmp_path / "rows.npy", mmap_mode=mode)
    for given in (mapped, mapped[2:8], np.asarray(mapped)):
        assert as_tensor(given, "features").data_ptr() == given.ctypes.data
    for given in (mapped[:, :2], mapped[::2], mapped.astype(np.float32)):  # PyTorch needs rows that lie together
        assert as_tensor(given, "features").data_ptr() != given.ctypes.data
        assert as_tensor(given, "features").tolist() == given.tolist()


def test_a_head_is_fitted_to_a_mapped_file(tmp_path):
    drawn = np.random.default_rng(0)
    rows, labels = drawn.standard_normal((200, 5)).astype(np.float32), drawn.integers(0, 3, 200)
    np.save(tmp_path / "rows.npy", rows)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    heads = [sfu.fit(given, labels, l2=1e-2, loss="quadratic", keep="full") for given in (rows, mapped)]
    assert torch.equal(heads[0].parameters_CE, heads[1].parameters_CE)
    results = [
        sfu.unlearn(head, given[20:60], labels[20:60], request="random")
        for head, given in zip(heads, (rows, mapped), strict=True)
    ]
    assert torch.equal(results[0].head.parameters_CE, results[1].head.parameters_CE)
    assert np.array_equal(np.load(tmp_path / "rows.npy"), rows)


def test_the_first_row_that_is_not_finite_is_found_in_any_piece():
    rows = torch.zeros(11, 2)
    assert first_not_finite(rows, piece=4) is None
    for row in (10, 5, 4, 3, 0):
        rows[row, 1] = torch.inf
        assert first_not_finite(rows, piece=4) == row
