"""Columns of Arrow, pandas, Polars and ``datasets`` are taken as arrays, and what is no array is refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import RidgeClassifier

import sfu
import sfu.sklearn
from sfu.arrays import as_examples, as_tensor, values_of
from sfu.errors import DataError
from sfu.models.batches import read_batches
from tests.models.cases import CLOSED, INPUTS, LABELS, RECORD, Dense, F

ROWS = np.random.default_rng(0).standard_normal((30, 4)).astype("f4")
NUMBERS = np.arange(30) % 3
NAMES = np.array(["ant", "bee", "cow"])[NUMBERS].tolist()


def arrow_columns():
    arrow = pytest.importorskip("pyarrow")
    flat = arrow.array(ROWS.reshape(-1))
    lists = arrow.ListArray.from_arrays(arrow.array(range(0, 121, 4), arrow.int32()), flat)
    fixed = arrow.FixedSizeListArray.from_arrays(flat, 4)
    return {
        "lists": lists, "large lists": lists.cast(arrow.large_list(arrow.float32())), "fixed": fixed,
        "chunks": arrow.chunked_array([fixed[:11], fixed[11:]]), "slice": arrow.concat_arrays([lists[:3], lists])[3:],
        "tensors": arrow.FixedShapeTensorArray.from_numpy_ndarray(ROWS),
        "table of numbers": arrow.table({str(column): ROWS[:, column] for column in range(4)}),
    }  # fmt: skip


def arrow_labels():
    arrow = pytest.importorskip("pyarrow")
    return {
        "numbers": arrow.array(NUMBERS), "chunks": arrow.chunked_array([NUMBERS[:9], NUMBERS[9:]]),
        "narrow": arrow.array(NUMBERS.astype("i1")),
    }, {
        "names": arrow.array(NAMES), "large": arrow.array(NAMES, arrow.large_string()),
        "chunks": arrow.chunked_array([NAMES[:9], NAMES[9:]]), "dictionary": arrow.array(NAMES).dictionary_encode(),
    }  # fmt: skip


def test_columns_of_arrow_are_arrays():
    for name, column in arrow_columns().items():
        found = as_tensor(column, "features")
        assert found.dtype == torch.float32, name
        assert np.array_equal(found, ROWS), name
    numbers, names = arrow_labels()
    for name, column in numbers.items():
        assert as_examples(arrow_columns()["fixed"], column)[1].tolist() == NUMBERS.tolist(), name
    for name, column in names.items():
        assert list(values_of(column)) == NAMES, name


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_columns_of_frames_are_arrays(library):
    frames, arrow = pytest.importorskip(library), pytest.importorskip("pyarrow")
    columns = arrow_columns()
    table = arrow.table({"features": columns["lists"], "fixed": columns["fixed"], "label": NAMES, "number": NUMBERS})
    frame = table.to_pandas() if library == "pandas" else frames.from_arrow(table)
    shuffled = frame.sample(10, random_state=0) if library == "pandas" else frame.sample(10, seed=0)
    for key in ("features", "fixed"):
        assert np.array_equal(as_tensor(frame[key], "features"), ROWS)
        assert np.array_equal(as_tensor(frame[[key]], "features"), ROWS)
        rows = as_tensor(shuffled[key], "features").tolist()
        assert all(row in ROWS.tolist() for row in rows)
    lists = frames.Series(ROWS.tolist()) if library == "pandas" else frames.Series("", ROWS.tolist())
    assert np.array_equal(as_tensor(lists, "features").float(), ROWS)
    assert as_tensor(frame["number"], "labels").tolist() == NUMBERS.tolist()
    category = frame["label"].astype("category") if library == "pandas" else frame["label"].cast(frames.Categorical)
    assert list(values_of(frame["label"])) == list(values_of(category)) == NAMES


def test_they_serve_heads_and_estimators():
    arrow = pytest.importorskip("pyarrow")
    features, names = arrow_columns()["lists"], arrow.array(NAMES)
    head = sfu.fit(features, names, l2=0.1, loss="quadratic")
    assert torch.equal(head.parameters_CE, sfu.fit(ROWS, NAMES, l2=0.1, loss="quadratic").parameters_CE)
    result = sfu.unlearn(head, features[:9], names[:9], curvature=CLOSED)
    same = sfu.unlearn(head, ROWS[:9], NAMES[:9], curvature=CLOSED)
    assert torch.equal(result.head.parameters_CE, same.head.parameters_CE)
    assert sfu.evaluate(head, result.head, (features[:9], names[:9])).summary()
    means = sfu.NearestCentroid.fit(features, names).forget(features[:9], names[:9])
    assert torch.equal(means.sums_CD, sfu.NearestCentroid.fit(ROWS, NAMES).forget(ROWS[:9], NAMES[:9]).sums_CD)
    ridge = RidgeClassifier().fit(ROWS, NAMES)
    coefficients = [
        sfu.sklearn.forget(ridge, X, y, n_train=30, curvature=CLOSED).estimator.coef_
        for X, y in ((features[:9], names[:9]), (ROWS[:9], NAMES[:9]))
    ]
    assert np.array_equal(*coefficients)


def refused():
    arrow = pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    lists = [[1.0, 2.0], [3.0, 4.0]]
    ragged = [[1.0, 2.0], [3.0], [4.0, 5.0]]
    return [
        (arrow.array(ragged), r"rows 0 and 1 of features have 2 and 1 values\. Give rows of one length"),
        (pandas.Series(ragged), r"rows 0 and 1 of features have 2 and 1 values"),
        (arrow.array([*lists, None]), r"features have 1 null in 3 rows\. Remove those rows"),
        (pandas.Series([*lists, None]), r"row 2 of features is None, not a list of numbers\. Remove it"),
        (pandas.Series([[1.0, None], [1.0, 2.0]]), r"row 0 of features hold None, which is no number"),
        (arrow.array([["a"], ["b"]]), r"features hold 'a', which is no number"),
        (arrow.array([{"a": 1}, {"a": 2}]), r"features hold \{'a': 1\}, which is no number"),
        (pandas.Series([[[1.0], [2.0, 3.0]], [[1.0]]]), r"row 0 of features are a list that is no array of numbers"),
        (arrow.array([[[1.0], [2.0, 3.0]], [[1.0], [2.0]]]), r"rows 0 and 1 of row 0 of features have 1 and 2 values"),
    ]  # fmt: skip


def test_what_is_no_array_is_named():
    for column, message in refused():
        with pytest.raises(DataError, match=message):
            as_tensor(column, "features")
    arrow = pytest.importorskip("pyarrow")
    head = sfu.fit(ROWS, NUMBERS, l2=0.1, loss="quadratic")
    with pytest.raises(DataError, match=r"features .*\[30, 2, 2\]"):
        sfu.unlearn(head, arrow.array(ROWS.reshape(30, 2, 2).tolist()), NUMBERS)
    with pytest.raises(DataError, match=r"features .*NaN"):
        sfu.unlearn(head, arrow.array([[1.0, None, 2.0, 3.0]]), [0])
    with pytest.raises(DataError, match=r"labels have 1 null in 2 rows"):
        sfu.unlearn(head, ROWS[:2], arrow.array([0, None]))


def test_no_module_imports_a_library_of_tables_at_its_top():
    """Neither does a column of one that is given, since columns are known by their methods."""
    files = sorted(Path(sfu.__file__).parent.rglob("*.py"))
    top = re.compile(r"^(?:import|from) (?:pyarrow|pandas|polars|datasets)\b", re.M)
    assert len(files) > 100
    assert [file.name for file in files if top.search(file.read_text("utf-8"))] == []


@pytest.fixture(scope="module")
def dataset():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "features": datasets.List(datasets.Value("float64")),
            "label": datasets.ClassLabel(names=["ant", "bee", "cow"]),
        }
    )
    made = datasets.Dataset.from_dict({"features": ROWS.tolist(), "label": NUMBERS}, features=features)
    return made.add_column("name", NAMES)


@pytest.mark.parametrize("form", [None, "numpy", "torch", "arrow", "pandas", "polars"])
def test_columns_of_datasets_are_arrays(dataset, form):
    if form in ("pandas", "polars"):
        pytest.importorskip(form)
    dataset = dataset.with_format(form)
    assert np.array_equal(as_tensor(dataset["features"], "features").float(), ROWS)
    assert as_tensor(dataset["label"], "labels").tolist() == NUMBERS.tolist()
    assert list(values_of(dataset["name"])) == NAMES
    some = dataset.select([4, 2])
    assert np.array_equal(as_tensor(some["features"], "features").float(), ROWS[[4, 2]])


def test_a_transform_of_a_dataset_is_applied(dataset):
    twice = dataset.with_transform(lambda rows: {"features": [[2 * x for x in row] for row in rows["features"]]})
    assert np.array_equal(as_tensor(twice["features"], "features").float(), 2 * ROWS)


@pytest.mark.parametrize("form", [None, "numpy", "torch", "arrow", "stream"])
def test_whole_models_take_a_dataset(form):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"x": INPUTS[:F].tolist(), "label": LABELS[:F].tolist()})
    given = made.to_iterable_dataset() if form == "stream" else made.with_format(form)
    read = list(read_batches(given, name="features")[0])
    assert torch.equal(torch.cat([batch.keywords["x"] for batch in read]).float(), INPUTS[:F].float())
    assert torch.cat([batch.labels_B for batch in read]).tolist() == LABELS[:F].tolist()
    if form is None:
        made = made.rename_column("x", "inputs")
        model = Dense()
        found = sfu.unlearn(model, made, record=RECORD, curvature=CLOSED)
        apart = sfu.unlearn(model, (made["inputs"], made["label"]), record=RECORD, curvature=CLOSED)
        wanted = sfu.unlearn(model, (INPUTS[:F], LABELS[:F]), record=RECORD, curvature=CLOSED)
        for one in (found, apart):
            torch.testing.assert_close(one.head.parameters_CE, wanted.head.parameters_CE, rtol=1e-4, atol=1e-6)
