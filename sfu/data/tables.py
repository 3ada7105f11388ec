"""Rows in files of tables: Parquet, Arrow and Feather, with a column ``features`` of lists of one length.

pyarrow reads them, an optional extra. Nothing is unpickled. As for other files (:mod:`sfu.readers`), what a file
unpacks to is compared with its own size before it is unpacked: for Parquet by the counts of its footer, for Arrow by
the lengths that stand before each compressed buffer.
"""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sfu.data.datasets.features import SUFFIXES, read_feature_file, require_suffix
from sfu.errors import ConfigError, DataError
from sfu.names import counted
from sfu.readers import array_names, refusing, require_modest_size, require_regular

if TYPE_CHECKING:
    import pyarrow

ROW_SUFFIXES = (*SUFFIXES, ".parquet", ".arrow", ".feather")
"""Files in which rows to forget and unlabelled rows may be."""
_OTHER_NAMES = {"label": "labels"}
_SHOWN = 8  # names in a message
_VALUE = 8  # bytes that a number or an offset takes at most


def require_rows(path: Path, setting: str) -> None:
    """Raise :class:`ConfigError` unless the file is of a type that can be read here; ``setting`` names the key."""
    require_suffix(path, setting, ROW_SUFFIXES)
    if path.suffix not in SUFFIXES and find_spec("pyarrow") is None:
        raise ConfigError(f"{setting}={path} needs pyarrow, an optional extra: python -m pip install 'sfu[parquet]'.")


def read_rows(path: Path, keys: tuple[str, ...], setting: str) -> dict[str, np.ndarray]:
    """Return those of ``keys`` that a file of arrays or of a table holds. The column ``label`` is read as ``labels``.

    Labels may be names. They come as an array of Python's strings.

    Raises:
        ConfigError: The file is of another type, or pyarrow is not installed; ``setting`` names the key.
        DataError: It is damaged, holds something else than numbers, or unpacks to far more than its own size.
    """
    require_rows(path, setting)
    if path.suffix in SUFFIXES:
        return read_feature_file(path, keys, setting)
    remedy = "Write it again with a list of numbers in each row of 'features' and a number or a name in 'labels'."
    with refusing(f"{setting}={path}", remedy, DataError):
        require_regular(path)
        names = _columns(path)
        wanted = {name: key for name in names if (key := _OTHER_NAMES.get(name, name)) in keys}
        twice = [key for key in keys if list(wanted.values()).count(key) > 1 or names.count(key) > 1]
        if twice:
            raise ValueError(f"it has several columns for {twice[0]}")
        read = _read_parquet if path.suffix == ".parquet" else _read_arrow
        table = read(path, list(wanted))
        table.validate(full=True)  # of a damaged Arrow file, offsets may lead anywhere
        return {key: _array(table.column(name), key) for name, key in wanted.items()}


def held(path: Path) -> str:
    """Return some names of the arrays or columns of a file that :func:`read_rows` has read."""
    names = array_names(path) if path.suffix in SUFFIXES else _columns(path)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(map(reprlib.repr, names[:_SHOWN])) or "nothing") + more


def _columns(path: Path) -> list[str]:
    schema = _parquet(path).schema_arrow if path.suffix == ".parquet" else _reader(path).schema
    return list(schema.names)


# Parquet


def _parquet(path: Path) -> pyarrow.parquet.ParquetFile:
    from pyarrow.parquet import ParquetFile

    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"PAR1":
        raise ValueError("it is encrypted" if magic == b"PARE" else "it is no Parquet file")
    file = ParquetFile(path)
    texts = [name for name in ("labels", "label") if name in file.schema.names]
    return ParquetFile(path, read_dictionary=texts)  # a name that is repeated takes memory once


def _read_parquet(path: Path, names: Sequence[str]) -> pyarrow.Table:
    file = _parquet(path)
    leaves = [number for number in range(len(file.schema)) if file.schema.column(number).path.split(".")[0] in names]
    file.scan_contents(columns=leaves)  # raises an error where the next lines would end the process (pyarrow 26)
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    chunks = [group.column(leaf) for group in groups for leaf in leaves]
    require_modest_size(sum(max(_VALUE * chunk.num_values, chunk.total_uncompressed_size) for chunk in chunks), path)
    return file.read(columns=list(names), use_threads=False)


# Arrow: messages in a stream, or in a file that ends in their places (Feather)

_MAGIC, _END = b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"
_DICTIONARY = 2  # type of a message
_TABLES = {"dictionaries": 2, "batches": 3}  # in the end of a file


def _open(path: Path) -> pyarrow.MemoryMappedFile:
    """Return the file at its start, if its end is there, without which fewer rows would be read."""
    from pyarrow import memory_map

    source = memory_map(str(path))
    magic = source.read(8)
    if magic[:4] == b"FEA1":
        raise ValueError("it is of the first version of Feather; write it again with a current pyarrow or pandas")
    source.seek(max(0, source.size() - 8))
    if not source.read(8).endswith(_MAGIC if magic[:6] == _MAGIC else _END):
        raise ValueError("it is cut short, or no Arrow file")
    source.seek(0)
    return source


def _reader(path: Path, names: Sequence[str] | None = None) -> Any:
    from pyarrow import ipc

    source = _open(path)
    make = ipc.open_file if source.read(6) == _MAGIC else ipc.open_stream
    source.seek(0)
    reader = make(source)
    if names is None:
        return reader
    fields = [reader.schema.get_field_index(name) for name in names]
    return make(_open(path), options=ipc.IpcReadOptions(included_fields=fields, use_threads=False))


def _read_arrow(path: Path, names: Sequence[str]) -> pyarrow.Table:
    size = 0
    for message in _messages(_open(path)):
        size += _unpacked(message)
        require_modest_size(size, path)
    return _reader(path, names).read_all()


def _messages(source: pyarrow.MemoryMappedFile) -> Iterator[pyarrow.Message]:
    """Give the messages that hold rows or dictionaries."""
    from pyarrow import ipc

    if source.read(6) != _MAGIC:
        source.seek(0)
        for message in ipc.MessageReader.open_stream(source):
            if message.type != "schema":
                yield message
        return
    source.seek(source.size() - 10)
    (length,) = struct.unpack("<i", source.read(4))
    source.seek(source.size() - 10 - length)
    end = _Flat(source.read(length))
    for number in _TABLES.values():
        if (place := end.field(end.root, number)) is not None:
            blocks = end.follow(place)
            for block in range(end.at("I", blocks)):
                source.seek(end.at("q", blocks + 4 + 24 * block))
                yield ipc.read_message(source)


class _Flat:
    """A flatbuffer: the metadata of a message, or the end of a file.

    https://flatbuffers.dev/internals and https://arrow.apache.org/docs/format/Columnar.html have the layout.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.root = self.follow(0)

    def at(self, kind: str, place: int) -> int:
        if place < 0:
            raise ValueError("its metadata are damaged")
        return int(struct.unpack_from("<" + kind, self.data, place)[0])

    def follow(self, place: int) -> int:
        return place + self.at("I", place)

    def field(self, table: int, number: int) -> int | None:
        """Return where a field of a table stands; ``None`` if it is left out."""
        layout, place = table - self.at("i", table), 4 + 2 * number
        offset = self.at("H", layout + place) if place < self.at("H", layout) else 0
        return table + offset if offset else None

    def inner(self, table: int, number: int) -> int:
        if (place := self.field(table, number)) is None:
            raise ValueError("its metadata are damaged")
        return self.follow(place)


def _unpacked(message: pyarrow.Message) -> int:
    """Return the bytes that the buffers of a message take once they are unpacked."""
    flat, body = _Flat(message.metadata.to_pybytes()), message.body
    batch, kind = flat.inner(flat.root, 2), flat.field(flat.root, 1)
    if kind is not None and flat.at("B", kind) == _DICTIONARY:
        batch = flat.inner(batch, 1)
    if flat.field(batch, 3) is None:  # not compressed
        return 0 if body is None else len(body)
    buffers, total = flat.inner(batch, 2), 0
    for number in range(flat.at("I", buffers)):
        place, length = (flat.at("q", buffers + 4 + 16 * number + half) for half in (0, 8))
        if length:  # the length of the content comes first; -1: it is stored as it is
            size = int(struct.unpack("<q", body[place : place + 8].to_pybytes())[0])
            total += length if size == -1 else size
            if place < 0 or size < -1:
                raise ValueError("its metadata are damaged")
    return total


# Columns


def _array(column: pyarrow.ChunkedArray, key: str) -> np.ndarray:
    from pyarrow import types

    if column.null_count:
        raise ValueError(f"column {key} has {counted(column.null_count, 'null')}; remove those rows")
    kind = column.type
    texts = kind.value_type if types.is_dictionary(kind) else kind
    if key == "labels" and str(texts) in ("string", "large_string", "string_view"):
        encoded = column if types.is_dictionary(kind) else column.cast("large_string").dictionary_encode()
        return np.concatenate([_names(chunk) for chunk in encoded.chunks] or [np.empty(0, object)])
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        _require_numbers(kind.value_type, key, kind)
        rows = [_rows(chunk, key) for chunk in column.chunks if len(chunk)]
        if len(widths := sorted({row.shape[1] for row in rows})) > 1:
            raise ValueError(f"rows of column {key} have from {widths[0]} to {widths[-1]} values, not one length")
        return np.concatenate(rows) if rows else np.empty((0, 0), np.float32)
    if key.endswith("features"):
        raise ValueError(f"column {key} holds {kind}, not a list of numbers in each row")
    _require_numbers(kind, key, kind)
    return np.asarray(column)


def _require_numbers(kind: pyarrow.DataType, key: str, whole: pyarrow.DataType) -> None:
    from pyarrow import types

    if not (types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind)):
        raise ValueError(f"column {key} holds {whole}, not numbers")


def _names(chunk: pyarrow.DictionaryArray) -> np.ndarray:
    if chunk.dictionary.null_count:
        raise ValueError("column labels has nulls; remove those rows")
    return np.array([*chunk.dictionary.to_pylist(), None], object)[np.asarray(chunk.indices)]


def _rows(chunk: pyarrow.Array, key: str) -> np.ndarray:
    from pyarrow import types

    values = chunk.flatten()
    if values.null_count:
        raise ValueError(f"rows of column {key} have {counted(values.null_count, 'null')}; remove those rows")
    if types.is_fixed_size_list(chunk.type):
        width = chunk.type.list_size
    else:
        lengths = np.asarray(chunk.value_lengths())
        width = int(lengths[0])
        if (lengths != width).any():
            number = int((lengths != width).argmax())
            raise ValueError(f"rows of column {key} have {width} and {lengths[number]} values, not one length")
    return np.asarray(values).reshape(len(chunk), width)
