"""Files of tables: what every writer makes is read, and what cannot be rows is refused by name."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import feather, ipc, parquet

import sfu
from sfu.curvature.unlabelled import check_unlabelled, read_unlabelled
from sfu.data.tables import ROW_SUFFIXES, read_rows
from sfu.errors import ConfigError, DataError
from tests.records.cases import message_of, run, write_rows
from tests.unlearning.cases import rows, trained

KEYS = ("features", "labels", "weights")
ROWS = np.random.default_rng(0).standard_normal((90, 4)).astype("f4")
NUMBERS = np.arange(90) % 3
NAMES = np.array(["ant", "bee", "cow"])[NUMBERS].tolist()
FLAT = pyarrow.array(ROWS.reshape(-1))
LISTS = pyarrow.ListArray.from_arrays(pyarrow.array(range(0, 361, 4), pyarrow.int32()), FLAT)
TABLE = pyarrow.table({"id": NAMES, "features": LISTS, "labels": NUMBERS, "weights": np.ones(90)})


def write(path: Path, table: pyarrow.Table, compression: str | None = None) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=40, compression=compression or "none")
    elif path.suffix == ".feather":
        feather.write_feather(table, path, compression=compression or "uncompressed", chunksize=40)
    else:
        with ipc.new_stream(path, table.schema, options=ipc.IpcWriteOptions(compression=compression)) as stream:
            stream.write_table(table, 40)
    return path


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather"])
def test_rows_come_as_they_were_written(tmp_path, suffix, compression):
    table = TABLE.set_column(2, "label", pyarrow.array(NUMBERS.astype("i1")))
    for name, column in {
        "list": LISTS, "large": LISTS.cast(pyarrow.large_list(pyarrow.float64())),
        "half": LISTS.cast(pyarrow.list_(pyarrow.float16())),
        "fixed": pyarrow.FixedSizeListArray.from_arrays(FLAT, 4), "whole": pyarrow.array([[1, 2]] * 90),
    }.items():  # fmt: skip
        read = read_rows(
            write(tmp_path / f"{name}{suffix}", table.set_column(1, "features", column), compression), KEYS, ""
        )
        assert sorted(read) == ["features", "labels", "weights"]
        assert np.array_equal(read["features"], np.array(column.to_pylist(), read["features"].dtype)), name
        assert (read["labels"].tolist(), read["weights"].tolist()) == (NUMBERS.tolist(), [1.0] * 90)
    names = pyarrow.array(NAMES)
    for name, column in {
        "text": names,
        "large": names.cast("large_string"),
        "codes": names.dictionary_encode(),
    }.items():
        read = read_rows(
            write(tmp_path / f"{name}{suffix}", TABLE.set_column(2, "labels", column), compression), KEYS, ""
        )
        assert read["labels"].tolist() == NAMES, name
    several = pyarrow.array((NUMBERS[:, None] == range(3)).tolist())
    read = read_rows(write(tmp_path / f"several{suffix}", TABLE.set_column(2, "labels", several)), KEYS, "")
    assert read["labels"].tolist() == several.to_pylist()


@pytest.mark.parametrize("library", ["pandas", "polars", "datasets"])
def test_files_of_other_libraries_are_read(tmp_path, library):
    made = pytest.importorskip(library)
    if library == "pandas":
        frame = made.DataFrame({"features": list(ROWS), "label": NAMES})
        frame.to_parquet(tmp_path / "a.parquet"), frame.to_feather(tmp_path / "a.feather")
        frame.astype({"label": "category"}).to_feather(tmp_path / "b.feather")
    elif library == "polars":
        frame = made.DataFrame({"features": ROWS.tolist(), "labels": NAMES})
        frame.write_parquet(tmp_path / "a.parquet"), frame.write_ipc(tmp_path / "a.arrow", compression="zstd")
        frame.write_ipc_stream(tmp_path / "b.arrow")
    else:
        dataset = made.Dataset.from_dict({"features": ROWS, "label": NAMES})
        dataset.to_parquet(tmp_path / "a.parquet"), dataset.save_to_disk(tmp_path / "saved")
        next((tmp_path / "saved").glob("*.arrow")).rename(tmp_path / "a.arrow")
    files = [path for path in tmp_path.iterdir() if path.is_file()]
    assert len(files) > 1
    for path in files:
        read = read_rows(path, KEYS, "FORGET")
        assert np.array_equal(read["features"].astype("f4"), ROWS), path.name
        assert read["labels"].tolist() == NAMES, path.name


def changed(**columns: object) -> pyarrow.Table:
    return pyarrow.table({"features": [[1.0, 2.0], [3.0, 4.0]], "labels": [0, 1]} | columns)


@pytest.mark.parametrize("suffix", [".parquet", ".feather"])
@pytest.mark.parametrize(
    ("table", "why"),
    [
        (changed(features=[[1.0, 2.0], [3.0]]), "rows of column features have 2 and 1 values, not one length"),
        (changed(features=[[1.0, 2.0], None]), "column features has 1 null; remove those rows"),
        (changed(features=[[1.0, None], [1.0, 2.0]]), "rows of column features have 1 null"),
        (changed(features=[["a"], ["b"]]), r"column features holds list<\w+: string>, not numbers"),
        (changed(features=[[[1.0]], [[2.0]]]), r"column features holds list<.*list<.*>, not numbers"),
        (changed(features=["a", "b"]), "column features holds string, not a list of numbers in each row"),
        (changed(features=[1.0, 2.0]), "column features holds double, not a list of numbers in each row"),
        (changed(labels=[0, None]), "column labels has 1 null"), (changed(labels=["a", None]), "labels has 1 null"),
        (changed(labels=[{"a": 1}, {"a": 2}]), r"column labels holds struct<.*>, not numbers"),
        (changed(labels=pyarrow.array([0, 1], pyarrow.date32())), r"column labels holds date32\[day\], not numbers"),
        (changed(label=[0, 1]), "it has several columns for labels"),
        (
            changed(features=pyarrow.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((2, 2)))),
            r"column features holds extension<arrow\.fixed_shape_tensor.*>, not a list of numbers",
        ),
    ],
)  # fmt: skip
def test_what_is_no_row_is_named(tmp_path, table, why, suffix):
    path = write(tmp_path / f"a{suffix}", table)
    with pytest.raises(
        DataError, match=rf"^FORGET=.*a{suffix} cannot be read \(.*{why}.*\)\. Write it again with a list"
    ):
        read_rows(path, KEYS, "FORGET")


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather"])
def test_damaged_files_are_refused(tmp_path, suffix):
    path = write(tmp_path / f"a{suffix}", TABLE)
    whole = path.read_bytes()
    for content in (b"", b"rows", whole[:-1], whole[: len(whole) // 2], whole[1:], b"PARE" + whole[4:]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"^FORGET=.*cannot be read \("):
            read_rows(path, KEYS, "FORGET")


@pytest.mark.parametrize(("suffix", "compression"), [(".parquet", "none"), (".arrow", "zstd"), (".feather", "zstd")])
def test_what_unpacks_to_far_more_than_its_size_is_refused(tmp_path, suffix, compression):
    zeros = pyarrow.FixedSizeListArray.from_arrays(np.zeros(12 << 20), 1024)
    table = pyarrow.table({"features": zeros, "labels": np.zeros(len(zeros), int)})
    path = write(tmp_path / f"a{suffix}", table, compression)
    assert path.stat().st_size < 500_000
    with pytest.raises(DataError, match=r"and unpacks to .* MiB, which may be meant to fill the memory"):
        read_rows(path, KEYS, "FORGET")


def test_a_repeated_name_takes_memory_once(tmp_path):
    name = "x" * 100_000
    for suffix in (".parquet", ".feather"):
        path = tmp_path / f"a{suffix}"
        codes = pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.zeros(40, "i4")), [name])
        table = pyarrow.table({"features": [[1.0]] * 40, "labels": codes})
        found = read_rows(write(path, table), KEYS, "FORGET")["labels"]
        assert len({id(one) for one in found}) == 1


def test_encrypted_files_are_refused(tmp_path):
    from pyarrow.parquet import encryption

    class Keys(encryption.KmsClient):
        def wrap_key(self, key, name):
            return key

        def unwrap_key(self, key, name):
            return key

    path = tmp_path / "a.parquet"
    config = encryption.EncryptionConfiguration(footer_key="k", column_keys={"k": ["features.list.element"]})
    made = encryption.CryptoFactory(lambda settings: Keys()).file_encryption_properties(
        encryption.KmsConnectionConfig(), config
    )
    with parquet.ParquetWriter(path, TABLE.schema, encryption_properties=made) as writer:
        writer.write_table(TABLE)
    with pytest.raises(DataError, match="it is encrypted"):
        read_rows(path, KEYS, "FORGET")


def test_other_files_and_a_missing_library_are_named(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", TABLE)
    with pytest.raises(ConfigError, match=r"FORGET=a\.csv ends in '\.csv'\. sfu reads \.npz, .* and \.feather\."):
        read_rows(Path("a.csv"), KEYS, "FORGET")
    find = importlib.util.find_spec
    monkeypatch.setattr("sfu.data.tables.find_spec", lambda name: None if name == "pyarrow" else find(name))
    with pytest.raises(ConfigError, match=r"needs pyarrow, an optional extra: python -m pip install 'sfu\[parquet\]'"):
        check_unlabelled([str(path)])


@pytest.mark.parametrize("suffix", ROW_SUFFIXES[2:])
def test_the_command_serves_a_table_as_it_serves_arrays(tmp_path, capsys, monkeypatch, suffix):
    monkeypatch.chdir(tmp_path)
    features, labels = rows()
    names = tuple(f"class {number}" for number in range(int(labels.max()) + 1))
    head = trained()
    replace(head, recipe=replace(head.recipe, classes=names)).save("old")
    more = pyarrow.array(features[40:90].tolist())
    write(Path(f"gone{suffix}"), pyarrow.table(
        {"features": features[:40].tolist(), "label": [names[label] for label in labels[:40].tolist()]}
    ))  # fmt: skip
    write(Path(f"more{suffix}"), pyarrow.table({"features": more}))
    write_rows(Path("gone.npz")), write_rows(Path("more.npz"), 40, 90)
    for file in (suffix, ".npz"):
        assert run("old", f"gone{file}", "--unlabelled", f"more{file}", "--out", f"new{file}", "--apply") == 0
    one, other = (sfu.load_head(f"new{file}/head").parameters_CE for file in (suffix, ".npz"))
    assert one.tolist() == other.tolist()
    assert read_unlabelled([f"more{suffix}"], features.shape[1])[0].tolist() == more.to_pylist()
    capsys.readouterr()
    write(Path(f"wrong{suffix}"), pyarrow.table({"x": more, "labels": ["class 0"] * 50}))
    assert run("old", f"wrong{suffix}") == 2
    assert f"FORGET=wrong{suffix} has no 'features', but 'x', 'labels'. Save the rows" in message_of(capsys)
    assert run("old", f"gone{suffix}", "--unlabelled", f"wrong{suffix}") == 2
    assert f"--unlabelled wrong{suffix} has no 'features', but 'x', 'labels'" in message_of(capsys)
    write(Path(f"other{suffix}"), pyarrow.table({"features": more, "labels": ["zebra"] * 50}))
    assert run("old", f"other{suffix}") == 2
    assert "the label 'zebra' is no class of the head" in message_of(capsys)
