"""Read the lists in a MATLAB file (version 5): texts, numbers, and cells of them.

SciPy believes the sizes that a file gives, so a damaged one can take any amount of memory. Here every part is a slice
of what was read, and a compressed variable may unpack to a bounded size.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sfu.readers import read_bytes

_LARGEST = 16 << 20  # bytes, packed or unpacked; the lists of Stanford Dogs take less than 1 MiB
_HEADER, _PACKED, _MATRIX = 128, 15, 14
_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_TEXTS = {1: "latin1", 2: "latin1", 4: "utf-16", 16: "utf-8", 17: "utf-16"}
_CELL, _CHAR, _FIRST_NUMBER = 1, 4, 6
_DEPTH = 4  # cells in cells


def read_mat(path: Path, names: Container[str]) -> dict[str, Any]:
    """Return variables by name: numbers as a flat array, a text as ``str``, a cell as a list, anything else ``None``.

    Raises:
        OSError, ValueError, struct.error, zlib.error: It cannot be read or is no MATLAB file of version 5.
    """
    data = read_bytes(path, _LARGEST)
    order = {b"IM": "<", b"MI": ">"}.get(data[126:_HEADER])
    if order is None:
        raise ValueError("it is no MATLAB file of version 5")
    found: dict[str, Any] = {}
    for kind, body in _parts(data[_HEADER:], order):
        if kind == _PACKED:
            stream = zlib.decompressobj()
            body = stream.decompress(body, _LARGEST)
            if stream.unconsumed_tail:
                raise ValueError(f"a variable unpacks to more than {_LARGEST:,} bytes")
            ((kind, body),) = _parts(body, order)
        if kind == _MATRIX:
            name, value = _variable(body, order, names)
            found[name] = value
    return {name: value for name, value in found.items() if name in names}


def _parts(data: bytes, order: str) -> Iterator[tuple[int, bytes]]:
    """Yield type and content of each part; short ones have both sizes in their first four bytes."""
    place = 0
    while place < len(data):
        (kind,) = struct.unpack_from(f"{order}I", data, place)
        if kind >> 16:
            kind, size, start = kind & 0xFFFF, kind >> 16, place + 4
            place += 8
        else:
            (size,) = struct.unpack_from(f"{order}I", data, place + 4)
            start = place + 8
            place = start + size + (-size % 8 if kind != _PACKED else 0)
        if start + size > len(data):
            raise ValueError(f"a part of {size:,} bytes is cut short")
        yield kind, data[start : start + size]


def _variable(body: bytes, order: str, names: Container[str] | None, depth: int = 0) -> tuple[str, Any]:
    """Return name and value of a matrix; a name that is not among ``names`` has no value."""
    (_, flags), _, (_, name), *rest = _parts(body, order)
    what, called = struct.unpack(f"{order}II", flags)[0] & 0xFF, name.decode("ascii")
    if depth > _DEPTH:
        raise ValueError(f"it has cells more than {_DEPTH} deep")
    if names is not None and called not in names:
        return called, None
    if what == _CELL:
        return called, [_variable(part, order, None, depth + 1)[1] for _, part in rest]
    if what == _CHAR and rest:
        kind, text = rest[0]
        encoding = _TEXTS.get(kind, "")
        return called, text.decode(encoding + {"<": "-le", ">": "-be"}[order] if "16" in encoding else encoding)
    if what >= _FIRST_NUMBER and rest and rest[0][0] in _NUMBERS:
        return called, np.frombuffer(rest[0][1], f"{order}{_NUMBERS[rest[0][0]]}")
    return called, None
