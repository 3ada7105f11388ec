"""Readers: what is damaged or made to do harm is refused in a sentence, before it takes memory or time."""

from __future__ import annotations

import io
import os
import re
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import Field

from sfu.errors import ArtifactError, DataError
from sfu.readers import Count, Record, Size, floats, read_array, read_arrays, read_record, read_yaml, refusing
from tests.reporting.scripts import load_script


def npy(array: np.ndarray, **header: object) -> bytes:
    """An npy file with parts of its header replaced."""
    file = io.BytesIO()
    about = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape, **header}
    np.lib.format.write_array_header_1_0(file, about)
    return file.getvalue() + array.tobytes()


def zipped(folder: Path, *, compression: int = zipfile.ZIP_DEFLATED, **members: bytes) -> Path:
    path = folder / "a.npz"
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def patched(path: Path, mark: bytes, offset: int, value: bytes) -> Path:
    """Overwrite a field of every header that begins with ``mark``."""
    body = bytearray(path.read_bytes())
    place = body.find(mark)
    while place >= 0:
        body[place + offset : place + offset + len(value)] = value
        place = body.find(mark, place + 1)
    path.write_bytes(body)
    return path


def why_refused(read, *given) -> str:
    """The message of a reader that must refuse, in less than 32 MiB."""
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as caught, refusing("x", "Do this.", DataError):
            read(*given)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert str(caught.value).endswith("). Do this.")
    return str(caught.value)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<i8", "|b1", "<c16"])
def test_honest_arrays_are_read_as_numpy_reads_them(tmp_path, dtype, order):
    made = np.asarray(np.arange(12).reshape(3, 4) % 2, dtype, order=order)
    np.save(tmp_path / "a.npy", made)
    np.savez_compressed(tmp_path / "a.npz", a=made, b=made[:0], c=np.array(3.0))
    np.testing.assert_array_equal(read_array(tmp_path / "a.npy"), made)
    found = read_arrays(tmp_path / "a.npz", ("a", "b", "c", "absent"))
    assert {name: array.shape for name, array in found.items()} == {"a": (3, 4), "b": (0, 4), "c": ()}
    np.testing.assert_array_equal(found["a"], made)
    assert found["a"].dtype == made.dtype


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"shape": (2**40,)}, "takes .* bytes, but holds 24"),
        ({"shape": (2**31, 2**31)}, "but holds 24"),
        ({"shape": (2,)}, "takes 16 bytes, but holds 24"),
        ({"shape": (-3,)}, "shape"),
        ({"shape": (-1, -3)}, "shape"),
        ({"shape": (3, 0)}, "takes 0 bytes"),
        ({"descr": "|O"}, "holds object, not numbers; sfu never loads pickled objects"),
        ({"descr": "|V8"}, "not numbers"),
        ({"descr": "<U2"}, "not numbers"),
        ({"descr": "no"}, "descr"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header, why):
    (tmp_path / "a.npy").write_bytes(npy(np.arange(3.0), **header))
    zipped(tmp_path, a=npy(np.arange(3.0), **header))
    for message in (why_refused(read_array, tmp_path / "a.npy"), why_refused(read_arrays, tmp_path / "a.npz", "a")):
        assert re.search(why, message), message


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no npy file"),
        (b"[1, 2]", "no npy file"),
        (b"\x93NUMPY\x03\x00" + bytes(40), "of version 1 or 2, but 3"),
        (b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31) + bytes(99), "header of 2,147,483,660 bytes"),
        (b"\x93NUMPY\x01\x00" + struct.pack("<H", 9000) + b"(" * 9000, "cannot be read"),
        (b"\x93NUMPY\x01\x00" + struct.pack("<H", 9000) + b"-" * 9000, "cannot be read"),
        (npy(np.arange(3.0))[:-1], "takes 24 bytes, but holds 23"),
        (npy(np.arange(3.0)) + b"x", "takes 24 bytes, but holds 25"),
    ],
)
def test_what_is_no_npy_file_is_refused(tmp_path, content, why):
    (tmp_path / "a.npy").write_bytes(content)
    assert why in why_refused(read_array, tmp_path / "a.npy")


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("a.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (20 << 20, 1)})
        for _ in range(80):
            file.write(bytes(1 << 20))
    assert "KiB and unpacks to 80.0 MiB, which may be meant to fill the memory" in why_refused(
        read_arrays, path, ("a",)
    )


def test_a_file_of_zeros_that_is_small_is_no_bomb(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros((1000, 1000)))
    assert read_arrays(tmp_path / "a.npz", ("a",))["a"].shape == (1000, 1000)


CENTRAL, LOCAL = b"PK\x01\x02", b"PK\x03\x04"


@pytest.mark.parametrize(
    ("places", "value", "why"),
    [
        (((CENTRAL, 8), (LOCAL, 6)), b"\x01\x00", "a.npy is encrypted"),
        (((CENTRAL, 10), (LOCAL, 8)), b"\x63\x00", "a.npy has compression 99; sfu reads deflate only"),
        (((CENTRAL, 10), (LOCAL, 8)), b"\x0e\x00", "compression 14"),
        (((CENTRAL, 24), (LOCAL, 22)), b"\xff\xff\xff\x7f", "unpacks to 2.0 GiB"),
        (((CENTRAL, 20), (LOCAL, 18)), b"\xff\xff\xff\x7f", "a.npy claims 2.0 GiB of a file of"),
        (((CENTRAL, 24), (LOCAL, 22)), b"\xff\x00\x00\x00", "Bad CRC-32"),
        (((CENTRAL, 16), (LOCAL, 14)), b"\x00\x00\x00\x00", "Bad CRC-32"),
        (((LOCAL, 35),), b"\xff" * 30, "Error -3 while decompressing"),
    ],
)
def test_tricks_with_zip_headers_are_refused(tmp_path, places, value, why):
    path = zipped(tmp_path, a=npy(np.random.default_rng(0).normal(size=50)))
    assert read_arrays(path, ("a",))["a"].shape == (50,)
    for mark, offset in places:
        patched(path, mark, offset, value)
    assert why in why_refused(read_arrays, path, ("a",))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    for name in ("a.npy", "a.npz", "a.json"):
        os.mkfifo(tmp_path / name)
    assert "no regular file" in why_refused(read_array, tmp_path / "a.npy")
    assert "no regular file" in why_refused(read_arrays, tmp_path / "a.npz", ("a",))
    with pytest.raises(ArtifactError, match="no regular file"):
        read_record(tmp_path / "a.json", Example, "Do this.")


class Example(Record):
    count: Count
    size: Size | None = None
    flag: bool = False
    names: list[str] = Field(default_factory=list)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"count": true}', "count=True: Input should be a valid integer"),
        ('{"count": 1293.9}', r"count=1293\.9"),
        ('{"count": 3.0}', "count=3.0"),
        ('{"count": "3"}', "count='3'"),
        ('{"count": -1}', "count=-1: Input should be greater than or equal to 0"),
        ('{"count": 9223372036854775808}', "count="),
        ('{"count": 1, "size": -5}', "size=-5"),
        ('{"count": 1, "size": NaN}', "size=nan: Input should be a finite number"),
        ('{"count": 1, "size": 1e999}', "size=inf"),
        ('{"count": 1, "flag": "false"}', "flag='false': Input should be a valid boolean"),
        ('{"count": 1, "flag": 0}', "flag=0"),
        ('{"count": 1, "names": "ab"}', "names='ab': Input should be a valid array"),
        ("{}", "count: Field required"),
        ("[]", r"the content=\[\]: Input should be an object"),
        ("", "Invalid JSON"),
        ('{"count": 1', "Invalid JSON"),
        ("\xff", "Invalid JSON"),
        ('{"count":' + "[" * 9000, "recursion limit"),
        ('{"count":' + '{"a":' * 5000 + "1" + "}" * 5001, "recursion limit"),
        ('{"count":' + "9" * 5000 + "}", "number out of range"),
        ('{"names": [' + "1," * 200_000 + "1]}", "more than 100,000 values"),
        ('{"count": 1, "names": [' + "1," * 2000 + "1]}", "2,001 values are wrong"),
        ('{"names": ["' + "x" * (5 << 20) + '"]}', r"it has 5\.0 MiB, and at most 4\.0 MiB are read"),
    ],
)
def test_a_record_has_the_types_it_declares(tmp_path, text, why):
    (tmp_path / "a.json").write_bytes(text.encode("latin1"))
    with pytest.raises(ArtifactError, match=rf"a\.json cannot be read \(.*{why}.*\)\. Do this\."):
        read_record(tmp_path / "a.json", Example, "Do this.")


def test_a_record_that_is_right(tmp_path):
    (tmp_path / "a.json").write_text('{"count": 3, "size": 2, "names": ["x"], "of a later version": [1]}')
    assert read_record(tmp_path / "a.json", Example, "") == Example(count=3, size=2.0, names=["x"])


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (LAUGHS, "line 2 has the alias \\*a, which sfu never follows"),
        ("a: &a [*a]", "alias"),
        ("a: &a {b: *a}", "alias"),
        ("a: " + "[" * 70 + "]" * 70, "more than 64 levels deep"),
        ("a: " + "[" * 5000, "maximum nesting depth"),
        ("a: [" + "x," * 200_000 + "]", "more than 100,000 values"),
        ("a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("a: !!int ''", "IndexError"),
        ("a: !!bool maybe", "KeyError"),
        ("a: 0x" + "f" * 9000, "a number of 9002 characters"),
        ("a: 2026-99-99", "month"),
        ("- 1", "it holds no mapping"),
        ("a: [", "cannot be read"),
        ("\x00", "cannot be read"),
    ],
)
def test_yaml_that_does_harm_is_refused(tmp_path, text, why):
    (tmp_path / "a.yaml").write_text(text)
    assert re.search(why, why_refused(read_yaml, tmp_path / "a.yaml"))


def test_yaml_that_is_right(tmp_path):
    (tmp_path / "a.yaml").write_text("a: {b: [1, 2.5, null, true, '*x']}\n3: 0x10\n")
    assert read_yaml(tmp_path / "a.yaml") == {"a": {"b": [1, 2.5, None, True, "*x"]}, "3": 16}


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (
            torch.zeros(2, 3, dtype=torch.int64),
            "w is int64 of shape [2, 3], but must be float32 or float64 with 2 axes",
        ),
        (torch.zeros(2, 3, dtype=torch.bfloat16), "w is bfloat16"),
        (torch.zeros(3), "of shape [3]"),
        (torch.full((2, 3), torch.nan), "w has NaN or infinite values"),
        (torch.full((2, 3), -torch.inf), "w has NaN or infinite values"),
    ],
)
def test_tensors_are_finite_floats(tensor, why):
    assert why in why_refused(floats, {"w": tensor}, "w", 2)
    assert "no tensor v, but w" in why_refused(floats, {"w": tensor}, "v", 2)


@pytest.mark.slow
def test_hostile_files_of_every_format_are_read_or_refused(tmp_path, capsys):
    """A slice of ``scripts/fuzz_readers.py``; run the whole of it after a change to a reader."""
    assert load_script("fuzz_readers").main(["--inputs", "240", "--out", str(tmp_path)]) == 0
    assert " inputs in " in capsys.readouterr().out.splitlines()[-1]
