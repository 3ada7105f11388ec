"""Read files that may be damaged or made to do harm.

Nothing is unpickled, and sizes are checked before memory is used. A record (JSON) is checked against a
:class:`Record`, YAML gives plain values, and arrays have the shape that their file says and holds. Whatever is wrong
with a file becomes one error that names it.
"""

from __future__ import annotations

import codecs
import io
import math
import re
import reprlib
import zipfile
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from sfu.errors import ArtifactError, SfuError
from sfu.files import human_size

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

T = TypeVar("T")

TEXT_BYTES = 4 << 20
"""The largest record or configuration that is read."""
_ITEMS = 100_000  # values in a record or a configuration: each takes some hundred bytes of memory
_DEPTH = 64
_SMALL, _RATIO = 64 << 20, 100  # bytes that any file may unpack to, and how many times its own size a larger one may
_NPY_HEADER = 10_000  # characters, as NumPy has it
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1}
_PIECE = 1 << 20
_NUMBERS = "biufc"  # kinds of dtype
_LONG_NUMBER = 40  # characters of a whole number in YAML

Count = Annotated[int, Field(ge=0, lt=2**63)]
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Size = Annotated[float, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
Percent = Annotated[float, Field(ge=0, le=100)]
Scalar = bool | Whole | float | str | None


class Record(BaseModel):
    """Base of what a JSON file must hold. Types are exact: no text, boolean or fraction stands for a whole number.

    Numbers are finite. Keys that are not declared are ignored; override ``model_config`` to keep them.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())


class Versioned(Record):
    """A record that says which version of it was written."""

    version: Count = Field(alias="schema")


R = TypeVar("R", bound=Record)


@contextmanager
def refusing(what: object, remedy: str, error: type[SfuError] = ArtifactError) -> Iterator[None]:
    """Turn whatever goes wrong in the block into ``error``: "``what`` cannot be read (why). ``remedy``".

    Parsers raise errors of many types on damaged files, so all are caught. Errors of sfu are passed on.
    """
    try:
        yield
    except SfuError:
        raise
    except Exception as problem:
        raise error(f"{what} cannot be read ({_why(problem)}). {remedy}") from problem


def _why(problem: Exception) -> str:
    if isinstance(problem, ValidationError):
        return _first_of(problem)
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror
    text = " ".join(str(problem).split())[:300].rstrip(".")
    return (
        text
        if text and type(problem) in (ValueError, NotOnlyTensorsError)
        else f"{type(problem).__name__}: {text}".rstrip(": ")
    )


def _first_of(problem: ValidationError) -> str:
    if problem.error_count() > 1000:  # listing them takes more memory than the file
        return f"{problem.error_count():,} values are wrong"
    first, *others = problem.errors(include_url=False)
    if first["type"] == "json_invalid":
        return first["msg"]
    place = ".".join(str(part) for part in first["loc"] if part != "[key]")[:200] or "the content"
    given = "" if first["type"] == "missing" else f"={reprlib.repr(first['input'])}"
    more = f"; {len(others)} more problems" if others else ""
    return f"{place}{given}: {first['msg']}{more}"


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes.

    Raises:
        OSError, ValueError: It cannot be read, is no regular file, or is larger.
    """
    require_regular(path)
    size = path.stat().st_size
    if size <= limit:
        return path.read_bytes()
    raise ValueError(f"it has {human_size(size)}, and at most {human_size(limit)} are read")


def text_encoding(start: bytes) -> str:
    """Return the encoding of a text by its first bytes: UTF-16 with a byte-order mark, or UTF-8 with or without one."""
    return "utf-16" if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"


def read_text(path: Path, limit: int) -> str:
    """Return the text in a regular file of at most ``limit`` bytes; see :func:`text_encoding`.

    Raises:
        OSError, ValueError: It cannot be read, is larger, or is no such text.
    """
    data = read_bytes(path, limit)
    return data.decode(text_encoding(data))


def require_regular(path: Path) -> None:
    """Refuse what is there but no regular file: reading a pipe or a device may never end.

    Raises:
        ValueError: It is a folder, a pipe or a device.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it is no regular file")


def read_record(path: Path, kind: type[R], remedy: str, error: type[SfuError] = ArtifactError) -> R:
    """Return the record in a JSON file.

    Raises:
        ArtifactError: (or ``error``) The file is missing, too large or no JSON, or a value is wrong; ``remedy`` ends
            the message.
    """
    with refusing(path, remedy, error):
        return parse_record(read_bytes(path, TEXT_BYTES), kind)


def parse_record(text: bytes, kind: type[R], items: int = _ITEMS) -> R:
    """Return the record that JSON text holds, in at most so many values.

    Raises:
        ValueError: It is no JSON, holds too much, or a value is wrong.
    """
    _require_few(text, items)
    return kind.model_validate_json(text)


def _require_few(text: bytes, items: int) -> None:
    if sum(text.count(mark) for mark in (b",", b"[", b"{")) > items:
        raise ValueError(f"it holds more than {items:,} values")


def read_json(path: Path, kind: type[T], limit: int = TEXT_BYTES, items: int = _ITEMS) -> T:
    """Return the value of a JSON file whose type is not a record's, such as ``list[int]``.

    Args:
        path: The file.
        kind: The type; see :class:`Record` for how exact it is.
        limit: Bytes that the file may have.
        items: Values that it may hold.

    Raises:
        OSError, ValueError: It cannot be read, is too large, or holds something else.
    """
    text = read_text(path, limit).encode()
    _require_few(text, items)
    exact: TypeAdapter[T] = TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))
    return exact.validate_json(text)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, as plain values. Aliases are refused: a few of them can stand for gigabytes.

    Raises:
        OSError, ValueError: It cannot be read, is too large or too deep, or holds an alias or no mapping.
    """
    import yaml

    text = read_bytes(path, TEXT_BYTES).decode()
    depth = 0
    for n_items, event in enumerate(yaml.parse(text, _yaml_loader())):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"line {event.start_mark.line + 1} has the alias *{event.anchor}, which sfu never follows")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEPTH or n_items > _ITEMS:
            raise ValueError(f"it holds more than {_ITEMS:,} values or is more than {_DEPTH} levels deep")
    found = yaml.load(text, _yaml_loader())
    if not isinstance(found, dict):
        raise ValueError("it holds no mapping")
    return {str(key): value for key, value in found.items()}


@cache
def _yaml_loader() -> Any:
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc] # the C one is ten times as fast
        def construct_yaml_int(self, node: Any) -> int:
            if len(node.value) > _LONG_NUMBER:
                raise ValueError(f"line {node.start_mark.line + 1} has a number of {len(node.value)} characters")
            return int(super().construct_yaml_int(node))

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    return Loader


def read_array(path: Path) -> np.ndarray:
    """Return the array of numbers in an npy file.

    Raises:
        OSError, ValueError: It cannot be read, is no npy file, or does not hold what its header says.
    """
    require_regular(path)
    with path.open("rb") as file:
        return _npy(file, path.stat().st_size)


def read_arrays(path: Path, keys: Sequence[str], texts: Container[str] = ()) -> dict[str, np.ndarray]:
    """Return those of ``keys`` that an npz file or, by its suffix, a safetensors file holds.

    They hold numbers; those in ``texts`` may hold text.

    Raises:
        OSError, ValueError: It cannot be read, or does not hold what it says.
        Exception: What the parsers raise on damaged files; see :func:`refusing`.
    """
    require_regular(path)
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="pt") as tensors:  # NumPy has no bfloat16
            present = set(tensors.keys())
            return {key: _as_numpy(tensors.get_tensor(key), key) for key in keys if key in present}
    with zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        wanted = {key: members[key] for key in keys if key in members}
        require_modest(list(wanted.values()), path)
        found = {}
        for key, info in wanted.items():
            with archive.open(info) as file:
                found[key] = _npy(file, info.file_size, key, "biufcUS" if key in texts else _NUMBERS)
        return found


def _as_numpy(tensor: Tensor, key: str) -> np.ndarray:
    import torch

    if tensor.is_floating_point() and tensor.dtype not in (torch.float64, torch.float32):
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            name = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{key} is {name}, whose scale the file does not hold; write it as float16 or float32")
        tensor = tensor.float()
    return tensor.numpy()


def array_names(path: Path) -> list[str]:
    """Return the names of the arrays in a file that :func:`read_arrays` has read, sorted."""
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="np") as tensors:
            return sorted(tensors.keys())
    with zipfile.ZipFile(path) as archive:
        return sorted(name.removesuffix(".npy") for name in archive.namelist())


def array_shapes(path: Path, keys: Sequence[str]) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return the shapes, and bytes of a number, of the arrays that :func:`read_arrays` would read, from their headers.

    It raises what :func:`read_arrays` does.
    """
    require_regular(path)
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="np") as tensors:
            parts = {key: tensors.get_slice(key) for key in sorted(tensors.keys()) if key in keys}
            return {key: (tuple(part.get_shape()), _BYTES.get(part.get_dtype(), 4)) for key, part in parts.items()}
    found = {}
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if (key := info.filename.removesuffix(".npy")) in keys:
                with archive.open(info) as file:
                    shape, _, dtype, _ = _npy_header(file, info.file_size, key)
                found[key] = shape, dtype.itemsize
    return found


def require_modest(members: Sequence[zipfile.ZipInfo], path: Path, *, packed: bool = True) -> None:
    """Refuse members of a zip file that are encrypted, oddly compressed, or far larger than the file.

    Unless they may be ``packed``, they may not take more bytes than the file has.

    Raises:
        ValueError: The message says which.
    """
    own = path.stat().st_size
    for info in members:
        if info.flag_bits & 0x1:
            raise ValueError(f"{info.filename} is encrypted")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{info.filename} has compression {info.compress_type}; sfu reads deflate only")
        if info.compress_size > own:
            raise ValueError(f"{info.filename} claims {human_size(info.compress_size)} of a file of {human_size(own)}")
    require_modest_size(sum(info.file_size for info in members), path, packed=packed)


def require_modest_size(size: int, path: Path, *, packed: bool = True) -> None:
    """Refuse a file whose content takes far more bytes than it has, or more at all unless it may be ``packed``.

    Raises:
        ValueError: It does.
    """
    own = path.stat().st_size
    if size > (max(_SMALL, _RATIO * own) if packed else own):
        raise ValueError(
            f"it has {human_size(own)} and unpacks to {human_size(size)}, which may be meant to fill the memory; write "
            "it without compression"
        )


def _npy_header(file: IO[bytes], size: int, what: str) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Read the shape, order, dtype and length of the header of an array from a file of ``size`` bytes."""
    import numpy as np

    start = file.read(12)
    length = {1: 10 + int.from_bytes(start[8:10], "little"), 2: 12 + int.from_bytes(start[8:12], "little")}
    version = start[6] if start[:6] == b"\x93NUMPY" and len(start) == 12 else 0
    if version not in length:
        raise ValueError(f"{what} is no npy file" + (f" of version 1 or 2, but {version}" if version else ""))
    if length[version] > min(_NPY_HEADER, size):
        raise ValueError(f"{what} has a header of {length[version]:,} bytes")
    header = io.BytesIO(start + file.read(max(length[version] - len(start), 0)))
    np.lib.format.read_magic(header)
    read = np.lib.format.read_array_header_1_0 if version == 1 else np.lib.format.read_array_header_2_0
    return *read(header), length[version]


def _npy(file: IO[bytes], size: int, what: str = "it", kinds: str = _NUMBERS) -> np.ndarray:
    """Read an array from a file of ``size`` bytes; its shape must account for every one of them."""
    import numpy as np

    shape, fortran, dtype, length = _npy_header(file, size, what)
    if dtype.kind not in kinds:
        why = {
            "O": "; sfu never loads pickled objects",
            "V": "; bfloat16 arrays are saved so: write them as float32",
            "U": "; number the classes: numpy.unique(labels, return_inverse=True)[1]",
        }
        raise ValueError(f"{what} holds {dtype}, not numbers{why.get(dtype.kind.replace('S', 'U'), '')}")
    n_bytes = math.prod(shape) * dtype.itemsize
    if any(axis < 0 for axis in shape) or n_bytes != size - length:
        held = size - length
        raise ValueError(f"{what} has shape {list(shape)}, which takes {n_bytes:,} bytes, but holds {held:,}")
    values = np.empty(n_bytes, np.uint8)
    view, done = memoryview(cast(Any, values)), 0
    while done < n_bytes:
        piece = file.read(min(_PIECE, n_bytes - done))
        if not piece:
            raise ValueError(f"{what} is cut short")
        view[done : done + len(piece)] = piece
        done += len(piece)
    if file.read(1):  # at the end, a zip member's checksum is compared
        raise ValueError(f"{what} holds more than it says")
    return values.view(dtype).reshape(shape, order="F" if fortran else "C")


def read_tensors(path: Path, remedy: str, error: type[SfuError] = ArtifactError) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, on the CPU.

    Raises:
        ArtifactError: (or ``error``) It is missing or damaged.
    """
    from safetensors.torch import load_file

    with refusing(path, remedy, error):
        require_regular(path)
        return load_file(path)


class NotOnlyTensorsError(ValueError):
    """A file of ``torch.save`` holds an object that would have to be unpickled."""


def read_torch(path: Path) -> Any:
    """Return what ``torch.save`` wrote, on the CPU: tensors, plain values, and containers of them.

    Raises:
        NotOnlyTensorsError: It holds another object.
        OSError, ValueError: It cannot be read, or asks for more memory than a file of its size deserves.
        Exception: What PyTorch raises on damaged files; see :func:`refusing`.
    """
    import pickle

    import torch

    try:
        return torch.load(_checked(path), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:Unsupported \w+: (?:GLOBAL )?|unsupported GLOBAL )(\S+)", str(error))
        if found is None:
            raise ValueError("it is damaged, or no torch file") from error
        raise NotOnlyTensorsError(f"it holds more than tensors ({found[1]}), which sfu never unpickles") from error


def _checked(path: Path) -> Path | io.BytesIO:
    """Return what can be loaded with the memory that a file of this size deserves.

    Files of today are zip files whose members are not compressed; those with larger members are refused. Older ones are
    read into memory, which gives no more bytes than it has, whatever length the file asks for.
    """
    require_regular(path)
    if not zipfile.is_zipfile(path):
        content = path.read_bytes()
        _refuse_buffers(content)
        return io.BytesIO(content)
    with zipfile.ZipFile(path) as archive:
        require_modest(archive.infolist(), path, packed=False)
        for info in archive.infolist():
            if info.filename.endswith("data.pkl"):
                _refuse_buffers(archive.read(info))
    return path


def _refuse_buffers(content: bytes) -> None:
    """Refuse what PyTorch would make of any size that a file asks for."""
    if b"bytearray" in content:
        raise ValueError("it asks for a bytearray, which weights have no use for")


def floats(tensors: Mapping[str, Tensor], key: str, n_axes: int) -> Tensor:
    """Return a tensor of finite float32 or float64 numbers with so many axes.

    Raises:
        ValueError: It is missing, of another kind, or not finite.
    """
    import torch

    if key not in tensors:
        raise ValueError(f"it has no tensor {key}, but {', '.join(sorted(tensors)[:10]) or 'nothing'}")
    found = tensors[key]
    if found.dtype not in (torch.float32, torch.float64) or found.ndim != n_axes:
        raise ValueError(
            f"{key} is {str(found.dtype).removeprefix('torch.')} of shape {list(found.shape)}, but must be float32 or "
            f"float64 with {n_axes} axes"
        )
    if not torch.isfinite(found).all():
        raise ValueError(f"{key} has NaN or infinite values")
    return found
