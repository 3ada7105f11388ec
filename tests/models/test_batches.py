"""Every form in which people hold examples gives the same ones; other forms are refused by name."""

from __future__ import annotations

from collections import UserDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import sfu
from sfu.errors import DataError
from sfu.models.batches import Batch, read_batches
from tests.models.cases import CLOSED, INPUTS, LABELS, RECORD, Dense, F

X, Y = INPUTS[:F], LABELS[:F]


class Frame:
    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape = array, array.shape

    def to_numpy(self) -> np.ndarray:
        return self.array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, column: object) -> None:
        raise KeyError(column)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


class Columns:
    """A data set of another library, such as that of Hugging Face: rows are mappings."""

    def __len__(self) -> int:
        return F

    def __getitem__(self, row: int) -> dict[str, object]:
        if row >= F:
            raise IndexError
        return {"x": X[row], "label": int(Y[row])}


FORMS = {
    "tensors": ((X, Y), None), "list": ([X, Y], None), "apart": (X, Y), "numpy": (X.numpy(), Y.numpy()),
    "frame": ((Frame(X.numpy()), Frame(Y.numpy())), None), "frame apart": (Frame(X.numpy()), Y.tolist()),
    "loader": (DataLoader(TensorDataset(X, Y), batch_size=7), None), "dataset": (TensorDataset(X, Y), None),
    "stream": (Stream(), None), "stream loader": (DataLoader(Stream(), batch_size=6), None),
    "iterator": (iter([(X[:9], Y[:9]), (X[9:], Y[9:])]), None), "batches": ([(X[:9], Y[:9]), (X[9:], Y[9:])], None),
    "keywords": ({"x": X, "labels": Y}, None), "keywords apart": ({"x": X}, Y), "keyword pair": (({"x": X}, Y), None),
    "user mapping": (UserDict(x=X, labels=Y), None), "columns": (Columns(), None),
    "pairs of keywords": ([({"x": X[:9]}, Y[:9]), ({"x": X[9:]}, Y[9:])], None),
    "arguments": (((X,), Y), None),
    "one by one": ([(X[row : row + 1], Y[row]) for row in range(F)], None),
    "lists of labels": ([(X[:9], Y[:9].tolist()), (X[9:], Y[9:].tolist())], None),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_are_the_same_examples(form):
    batches, total = read_batches(*FORMS[form], name="features")
    read = list(batches)
    inputs = [batch.args[0] if batch.args else batch.keywords["x"] for batch in read]
    assert torch.equal(torch.cat([torch.as_tensor(one) for one in inputs]), X)
    assert torch.equal(torch.cat([batch.labels_B.reshape(-1) for batch in read]), Y)
    assert total in (None, len(read))


@settings(max_examples=25)
@given(rows=st.integers(1, 150), size=st.integers(1, 150), columns=st.integers(0, 3))
def test_rows_and_labels_stay_together(rows, size, columns):
    inputs = torch.arange(rows).double()[:, None]
    labels = torch.arange(rows) if columns == 0 else torch.arange(rows)[:, None].expand(rows, columns)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=size)
    for data in ((inputs, labels), loader, TensorDataset(inputs, labels)):
        read = list(read_batches(data, name="features")[0])
        assert torch.equal(torch.cat([batch.args[0] for batch in read]), inputs)
        assert torch.equal(torch.cat([batch.labels_B for batch in read]), labels)


def test_marks_tell_examples_apart_and_not_batches_or_paddings():
    tokens, kinds = torch.tensor([[5, 6, 0], [5, 6, 7], [5, 0, 6]]), torch.zeros(3, 3, dtype=torch.int64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 1]])

    def marks(rows: slice, width: int = 3, other: int = 0) -> torch.Tensor:
        cut = {"input_ids": tokens + (1 - mask) * other, "token_type_ids": kinds, "attention_mask": mask}
        batch = Batch("", (), {key: one[rows, :width] for key, one in cut.items()})
        return batch.marks(len(tokens[rows]))

    every = marks(slice(3))
    assert len({tuple(row) for row in every[:2].tolist()}) == 2
    assert torch.equal(every[0], every[2])  # the same tokens, padded elsewhere
    assert torch.equal(marks(slice(1), 2), every[:1])
    assert torch.equal(marks(slice(3), other=9), every)
    unmasked = [Batch("", (tokens[rows],), {}).marks(len(tokens[rows])) for rows in (slice(3), slice(1, 3))]
    assert torch.equal(unmasked[0][1:], unmasked[1])
    assert len({tuple(row) for row in unmasked[0].tolist()}) == 3
    assert not torch.equal(Batch("", (tokens, kinds), {}).marks(3), Batch("", (kinds, tokens), {}).marks(3))
    assert Batch("", ([1, 2],), {"flag": True}).marks(2) is None


@pytest.mark.parametrize(
    ("data", "labels", "message"),
    [
        (DataLoader(TensorDataset(X, Y), batch_size=7, drop_last=True), None, "features=DataLoader has drop_last=True"),
        (DataLoader(TensorDataset(X, Y)), Y, "labels are given beside features=DataLoader, which has"),
        (X, None, r"features is \[40, 4\] float64, without labels\. Give pairs"),
        (TensorDataset(X), None, r"batch 0 of features=TensorDataset is a list of 1, without labels"),
        ({"x": X}, None, r"features is a dict of 1 with the keys x, without labels.* key 'labels'"),
        ((X, Y[:9]), None, r"features are 40 rows, but labels are \[9\]\. Give one for each row"),
        (({"x": X, "mask": X[:3]}, Y), None, r"\[40, 4\] float64 and \[3, 4\] float64, which are no rows of inputs"),
        (3, None, r"features is a int, without labels"), ([(X, Y[:9])], None, r"batch 0 .* labels of shape \[9\]"),
        ([], None, "features=list gives no examples"), ((X[:0], Y[:0]), None, "gives no examples"),
        ([(X, Y), (X, Y[:, None].expand(F, 3))], None, r"labels have different shapes .*: \[3\] and \[\]"),
        ([(X[:, :3], Y)], None, r"fails on batch 0 of features=list, \[40, 3\] float64 \(RuntimeError: .*Give raw"),
        ({"y": X, "labels": Y}, None, r"the model fails on rows 0 .*TypeError: .*keyword argument 'y'"),
        (zip(X, Y, strict=True), None, r"batch 0 of features=zip is a single example, \[4\].*row\[None\]"),
        ([(X[0], 0), (X[1], 1), (X[2], 2)], None, r"batch 0 .* is a single example, \[4\] with one label"),
    ],
)  # fmt: skip
def test_other_forms_are_refused(data, labels, message):
    with pytest.raises(DataError, match=message):
        sfu.unlearn(Dense(), data, labels, record=RECORD, curvature=CLOSED)
