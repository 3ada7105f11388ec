"""Feed damaged and hostile files to every reader of sfu: each must read the file or raise an SfuError.

    python scripts/fuzz_readers.py --inputs 100000          # about half an hour on one core
    python scripts/fuzz_readers.py --formats head npz --inputs 2000
    python scripts/fuzz_readers.py --replay fuzz-failures/head-17

Input n of a format is always the same file. An input fails if its reader raises another error, works for more than 10 s
(or says nothing for a minute), or allocates more than 64 MiB plus twice the size that the file has or, once that was
checked, says it unpacks to. What fails is saved in ``fuzz-failures``, and the exit code is 1. Memory is the larger of
what Python and NumPy allocated and what the process's resident peak grew by. Counts by format and outcome are printed.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import os
import random
import select
import shutil
import signal
import struct
import sys
import tarfile
import tempfile
import time
import traceback
import tracemalloc
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml

from sfu.errors import SfuError

SECONDS, MEMORY = 10, 64 << 20
_LOST = 60.0  # seconds without a word from the process that reads
_BATCH = 500
_MASK = 2**64 - 1


class _TooSlow(BaseException):
    pass


# ------------------------------------------------------------------------------------------------ what is done to files


def mutated_bytes(data: bytes, draw: random.Random) -> bytes:
    """Flip, cut, repeat and overwrite bytes."""
    body = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        size = len(body)
        place, width = draw.randrange(size + 1), draw.choice((1, 2, 4, 8))
        kind = draw.randrange(8)
        if kind == 0 and size:
            body[draw.randrange(size)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del body[place:]
        elif kind == 2:
            del body[place : place + draw.randrange(1, 64)]
        elif kind == 3:
            body[place:place] = body[place : place + draw.randrange(1, 256)]
        elif kind == 4:
            body[place : place + width] = draw.choice((b"\0", b"\xff", b"\x7f", b"\x80")) * width
        elif kind == 5:
            body[place : place + width] = draw.randbytes(width)
        elif kind == 6:
            number = draw.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, size, size * 1000))
            body[place : place + 8] = (number & _MASK).to_bytes(8, "little")
        else:
            body[place:place] = draw.choice(
                (b"[" * 3000, b"{" * 3000, b"-" * 3000, b"9" * 5000, b"\0" * 100, b"\n" * 9)
            )
    return bytes(body)


def nasty(draw: random.Random) -> Any:
    """Return a JSON value that something may stumble on."""
    if draw.random() < 0.04:
        kind = draw.randrange(4)
        large = "x" * 100_000, [1] * 50_000, ["x"] * 50_000
        return large[kind] if kind < len(large) else {str(n): n for n in range(20_000)}
    if draw.random() < 0.15:
        return draw.choice(([], {}, [[]], [None], {"": None}, {"a": {"a": [1, True, "x"]}}))
    return draw.choice(
        (
            None, True, False, 0, -1, 1, -5, 900, 1293.9, 2**31, 2**63, 10**400, -0.5, 1e308, 0.1, 3, "NUMBER",
            "DEEP", "",
            " ", "\n", "false", "0", "NaN", "nan", "[bold]x[/red]", "\x1b[31m", "../../etc", "a/b", "\ud800",
            "2026-11-27",
            "float16", "psd_fit", "running", "killed",
        )
    )  # fmt: skip


def _nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    places = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(places)[:100]:
        yield value, key
        yield from _nodes(item)


def mutated_json(value: Any, draw: random.Random) -> Any:
    """Replace, remove, rename and move values of a JSON document."""
    value = json.loads(json.dumps(value))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        nodes = list(_nodes(value))
        if not nodes or draw.random() < 0.02:
            return nasty(draw)
        parent, key = draw.choice(nodes)
        kind = draw.randrange(6)
        if kind <= 2:
            parent[key] = nasty(draw)
        elif kind == 3:
            del parent[key]
        elif kind == 4:
            other, place = draw.choice(nodes)
            parent[key] = json.loads(json.dumps(other[place])) if place in _keys(other) else None
        elif isinstance(parent, dict):
            parent[str(nasty(draw))[:50]] = parent.pop(key)
    return value


def _keys(value: Any) -> Any:
    return value if isinstance(value, dict) else range(len(value))


def json_text(value: Any, draw: random.Random) -> bytes:
    """Write JSON, with numbers and nesting that ``json`` would not write."""
    text = json.dumps(value)
    depth = draw.choice((10, 100, 1000, 100_000))
    deep = draw.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "[" * depth))
    number = draw.choice(("NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "-0", "1" + "0" * 400, "01", "0x10"))
    return text.replace('"DEEP"', deep).replace('"NUMBER"', number).encode("utf-8", "surrogatepass")


def on_json(data: bytes, draw: random.Random) -> bytes:
    """Change a JSON file, mostly as JSON."""
    return mutated_bytes(data, draw) if draw.random() < 0.25 else json_text(mutated_json(json.loads(data), draw), draw)


def on_yaml(data: bytes, draw: random.Random) -> bytes:
    """Change a YAML file, and add what only YAML has."""
    kind = draw.randrange(5)
    if kind == 0:
        return mutated_bytes(data, draw)
    if kind == 1:
        text = json_text(mutated_json(yaml.safe_load(data), draw), draw)
        return text if draw.random() < 0.5 else yaml.safe_dump(json.loads(data_or(text))).encode("utf-8", "replace")
    lines = data.decode().splitlines()
    laughs = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{n}: &{n} [{','.join(['*' + before] * 9)}]\n" for before, n in zip("abcdefgh", "bcdefghi", strict=True)
    )
    lines.insert(
        draw.randrange(len(lines) + 1),
        draw.choice(
            (
                laughs, "x: &x [*x]", "x: &x {a: *x}", "<<: *nothing", "x: !!python/object/apply:os.system [id]",
                "x: !!int ''", "x: !!bool maybe", "x: !!timestamp y", "x: !!float z", "x: !!binary '%'",
                "x: !!set {a, b}",
                "x: 0x" + "f" * 20_000, "x: 1:" + "59:" * 3000 + "1", "x: " + "9" * 5000, "x: 2026-99-99", "x: .inf",
                "? [a, b]\n: c", "? {a: b}\n: c", "x: " + "[" * 500, "x: " + "[" * 200 + "]" * 200, "x: {" * 60,
                "%YAML 9.9",
                "--- \n--- ", "\t", "x: |\n" + " " * 3000, "x: \x01", "seed: [[[]]]", "methods: {a: 1}", "1: 2",
                "null: 3",
                "x: [" + "a," * 200_000 + "]", "- 1", "x: 'unfinished", "&a &b c", "dataset: 3",
                "variants: !!omap [a: 1]",
            )
        ),
    )  # fmt: skip
    return "\n".join(lines).encode()


def data_or(text: bytes) -> bytes:
    """Return the text if it is JSON, else an empty mapping."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return b"{}"
    return text


_DTYPES = (
    "<f4",
    "<f8",
    ">f4",
    "<i8",
    "<u8",
    "|b1",
    "|O",
    "<U3",
    "|S4",
    "|V8",
    "<f2",
    "<c8",
    "<f16",
    "<M8[s]",
    "q" * 9,
    "<f3",
)


def npy_bytes(draw: random.Random, array: np.ndarray) -> bytes:
    """Write an npy file whose header may lie."""
    shape: Any = draw.choice(
        (
            array.shape, array.shape, (2**40,), (2**31, 2**31), (-1,), (-4, -4), (0, 10**30), (), (1,) * 70, (True,),
            (10**400,),
            (array.size,), (array.size + 1,), (array.size - 1,), array.shape[::-1], [3], None, "x",
        )
    )  # fmt: skip
    descr: Any = array.dtype.str if draw.random() < 0.6 else draw.choice(_DTYPES)
    if draw.random() < 0.05:
        descr = draw.choice(
            ([("a", "<f4")], [("a", "|O")], ("<f4", (1000, 1000)), [("a", "<f4", (2**31,))], 3, None, {})
        )
    header = repr({"descr": descr, "fortran_order": draw.choice((False, False, True, 1)), "shape": shape})
    header = draw.choice(
        (header, header, header, "(" * 500, "-" * 9000, "{" * 3000, header + "#" * 9000, "__import__('os')", "")
    )
    if draw.random() < 0.1:
        header = mutated_bytes(header.encode(), draw).decode("latin1")
    version = draw.choice((1, 1, 1, 2, 2, 3, 9))
    body = header.encode("latin1")
    length = len(body) if draw.random() < 0.9 else draw.choice((0, 1, 65_535, 2**31, 2**32 - 1))
    start = (
        b"\x93NUMPY"
        + bytes((version, 0))
        + (struct.pack("<H", length & 0xFFFF) if version == 1 else struct.pack("<I", length))
    )
    return start + body + array.tobytes()


def npy_of(array: np.ndarray) -> bytes:
    """Write an honest npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def on_npy(data: bytes, draw: random.Random) -> bytes:
    """Change an npy file: its bytes, its header, or all of it."""
    kind = draw.randrange(4)
    if kind == 0:
        return mutated_bytes(data, draw)
    if kind == 1:
        return draw.choice(
            (b"", b"PK\x03\x04", zip_of({"a.npy": data}), b"[1, 2]", npy_of(np.array(["a", None], object)))
        )
    return npy_bytes(draw, np.load(io.BytesIO(data)))


def zip_of(files: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Write a zip file."""
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return body.getvalue()


def _zeros(n_bytes: int) -> Iterator[bytes]:
    for _ in range(n_bytes >> 20):
        yield bytes(1 << 20)


def bomb(shape: tuple[int, ...], keep: dict[str, bytes], name: str) -> bytes:
    """Write an npz file with an array of float32 zeros, compressed a thousandfold."""
    body = io.BytesIO()
    header = np.lib.format
    with zipfile.ZipFile(body, "w", zipfile.ZIP_DEFLATED) as archive:
        for other, content in keep.items():
            if other != name:
                archive.writestr(other, content)
        with archive.open(name, "w", force_zip64=True) as file:
            header.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
            for piece in _zeros(4 * int(np.prod(shape))):
                file.write(piece)
    return body.getvalue()


_BOMBS: dict[tuple[str, int], bytes] = {}


def on_zip(data: bytes, draw: random.Random) -> bytes:
    """Change a zip of npy files: its bytes, its directory, its members, or into a bomb."""
    kind = draw.randrange(10)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist()}
    if kind <= 1:
        return mutated_bytes(data, draw)
    if kind <= 4:
        names = draw.sample(sorted(files), draw.randrange(1, len(files) + 1))
        for name in names:
            files[name] = (
                on_npy(files[name], draw) if files[name].startswith(b"\x93NUMPY") else mutated_bytes(files[name], draw)
            )
        return zip_of(
            files, draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
        )
    if kind == 5 and draw.random() < 0.2:
        name, rows = draw.choice(sorted(files)), draw.choice((1, 15, 17))
        if (name, rows) not in _BOMBS:
            _BOMBS[name, rows] = bomb((rows, 1 << 20), files, name)
        return _BOMBS[name, rows]
    body = bytearray(zip_of(files, draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))))
    for _ in range(draw.choice((1, 1, 2, 4))):
        mark, fields = draw.choice(
            (
                (b"PK\x01\x02", {8: 2, 10: 2, 16: 4, 20: 4, 24: 4, 28: 2, 30: 2, 32: 2, 38: 4, 42: 4}),
                (b"PK\x03\x04", {4: 2, 6: 2, 8: 2, 14: 4, 18: 4, 22: 4, 26: 2, 28: 2}),
                (b"PK\x05\x06", {4: 2, 8: 2, 10: 2, 12: 4, 16: 4, 20: 2}),
            )
        )
        places = [place for place in range(len(body)) if body.startswith(mark, place)]
        if not places:
            continue
        offset = draw.choice(sorted(fields))
        value = draw.choice((0, 1, 8, 9, 12, 14, 95, 99, 0xFFFF, 2**31, 2**32 - 1, draw.randrange(2**32), len(body)))
        place, width = draw.choice(places) + offset, fields[offset]
        body[place : place + width] = (value & (256**width - 1)).to_bytes(width, "little")
    return bytes(body)


def on_safetensors(data: bytes, draw: random.Random) -> bytes:
    """Change a safetensors file: its bytes, its header, or what its numbers are."""
    if draw.random() < 0.3:
        return mutated_bytes(data, draw)
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    kind = draw.randrange(4)
    if kind == 0:
        header = mutated_json(header, draw)
    elif kind == 1:
        name = draw.choice([key for key in header if key != "__metadata__"])
        header[name]["dtype"] = draw.choice(
            ("F32", "F64", "BF16", "F16", "I64", "I32", "U8", "BOOL", "F8_E4M3", "X", 3)
        )
        if draw.random() < 0.5:
            header[name]["shape"] = draw.choice(
                ([], [0], [2**62], [2**32, 2**32], [-1], [1] * 100, [True], header[name]["shape"][::-1])
            )
    elif kind == 2:
        values = np.frombuffer(body[: len(body) // 8 * 8], "<f8").copy()
        if values.size:
            values[draw.randrange(values.size)] = draw.choice((np.nan, np.inf, -np.inf, 1e308, -1.0))
            body = values.tobytes() + body[len(values) * 8 :]
    else:
        name = draw.choice(list(header))
        header[str(nasty(draw))[:50]] = header.pop(name)
    text = json_text(header, draw)
    size = len(text) if draw.random() < 0.9 else draw.choice((0, 1, 2**31, 2**63, 100_000_001))
    return struct.pack("<Q", size & _MASK) + text + body


def change_of(name: str) -> Callable[[bytes, random.Random], bytes]:
    """Return how a file is changed, by its suffix."""
    known = {".json": on_json, ".safetensors": on_safetensors, ".secret": on_safetensors}
    return known.get(Path(name).suffix, mutated_bytes)


def on_text(data: bytes, draw: random.Random) -> bytes:
    """Change a text file line by line."""
    if draw.random() < 0.4:
        return mutated_bytes(data, draw)
    lines = data.decode().splitlines()
    for _ in range(draw.choice((1, 1, 3))):
        place = draw.randrange(len(lines) + 1)
        new = draw.choice(
            (
                "", " ", "-1", "1.5", "1e3", "9" * 5000, "one", "nan", "0x1", "1_0", "\x00", '"', "a,b,c,d,e",
                '"a\nb",0,train',
                "../../etc/passwd,0", "/etc/passwd,1,test", "x" * 200_000, "," * 50_000, "[/red],\x1b[31m",
                "\uff11", "true",
            )
        )  # fmt: skip
        lines[place : place + draw.randrange(2)] = [new] * draw.choice((1, 1, 1, 1000))
    return draw.choice(("\n", "\n", "\r\n", "\r")).join(lines).encode()


# ------------------------------------------------------------------------------------------------------ what is read


@dataclass(frozen=True)
class Format:
    """Valid files by name, how each is changed, who reads the folder, and how many shares of the inputs it gets."""

    files: dict[str, bytes]
    change: dict[str, Callable[[bytes, random.Random], bytes]]
    read: Callable[[Path], object]
    shares: float = 4
    sealed: str = ""
    """Where entry.json must be made anew after a change, so that digests are right."""


def _written(write: Callable[[Path], object]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _entry(key: str, files: dict[str, bytes]) -> dict[str, bytes]:
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return {**files, "entry.json": json.dumps({"key": key, "files": digests}).encode()}


def _row(accuracy: float, access: str) -> dict[str, Any]:
    percents = ("test_accuracy", "remain_accuracy", "forget_accuracy", "mia", "agreement")
    others = (
        "distance",
        "mia_std",
        "forget_kl",
        "retain_gradient_norm",
        "seconds",
        "peak_memory_mb",
        "test_gap",
        "mia_gap",
    )
    return {
        **dict.fromkeys(percents, accuracy), **dict.fromkeys(others, 0.5), "access": access, "applied": True,
        "tuning": None,
        "details": {"rho": 1e-3, "solver_status": "converged"}, "note": "a note",
    }  # fmt: skip


METRICS: dict[str, Any] = {
    "schema": 1,
    "run": {
        "name": "digits", "sfu_version": "0.1.0", "versions": {"python": "3.11.7"}, "device": "cpu", "dtype": "float64",
        "seconds": 12.3, "overrides": ["head.l2=5e-4"], "published": None, "seeds": {"seed": 0, "split": 1},
        "data": {"name": "digits", "path": None, "n_train": 1437, "n_forget": 144, "n_classes": 10,
        "backbone": {"name": "x"}},
        "forget": {"kind": "classes", "fraction": None, "classes": [3, "cat"]},
        "head": {"l2": 5e-4, "bias": True, "loss": {"name": "softmax", "class_weights": None}}, "threads": 2,
    },
    "rows": {"original": _row(73.8, "none"), "retrained": _row(70.0, "retained"), "jit": _row(71.0, "forget")},
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "dataset": {"name": "digits", "path": None}, "backbone": {"name": "none"}, "head": {"l2": 5e-4, "bias": False},
    "loss": {"name": "quadratic"}, "forget": {"fraction": 0.1, "classes": [1, 2]}, "methods": ["original", "jit"],
    "seed": 0,
}  # fmt: skip
STATUS: dict[str, Any] = {
    "state": "finished", "started": "2026-11-27T23:08:00+00:00", "overrides": ["seed=0", "+head.l2=1"], "job": 0,
    "host": "here", "pid": 5, "seconds": 3.0, "error": None,
}  # fmt: skip


def _runs() -> Format:
    from rich.console import Console

    from sfu.reporting.report.build import build_report
    from sfu.reporting.report.page import html_page
    from sfu.reporting.report.write import TEXTS, print_report

    def read(folder: Path) -> object:
        report = build_report([folder])
        assert any(run.folder.name == "good" for run in report.finished)
        with redirect_stdout(io.StringIO()):
            print_report(report, Console(width=100, file=io.StringIO()))
        for text in TEXTS.values():
            text(report)
        html_page(report, [([], [])] * len(report.sections))
        if (bad := [run for run in report.troubled if run.folder.name == "bad"]) and bad[0].metrics is None:
            raise SfuError(bad[0].problem)
        return report

    whole = {
        "status.json": json.dumps(STATUS).encode(), "metrics.json": json.dumps(METRICS).encode(),
        "config.yaml": yaml.safe_dump(CONFIG).encode(),
    }  # fmt: skip
    files = {f"{name}/{file}": content for name in ("good", "bad") for file, content in whole.items()}
    change = {"bad/status.json": on_json, "bad/metrics.json": on_json, "bad/config.yaml": on_yaml}
    return Format(files, change, read, 0.6)


def _metrics() -> Format:
    from sfu.results.artifacts import read_metrics

    files = {"metrics.json": json.dumps(METRICS).encode()}
    return Format(files, {"metrics.json": on_json}, lambda folder: read_metrics(folder / "metrics.json"), 8)


def _yaml() -> Format:
    from sfu.results.run_folder import read_run

    files = {"config.yaml": yaml.safe_dump(CONFIG).encode(), "metrics.json": json.dumps(METRICS).encode()}

    def read(folder: Path) -> object:
        run = read_run(folder, with_config=True)
        if run.config is None:
            raise SfuError(run.problem)
        return None

    return Format(files, {"config.yaml": on_yaml}, read)


def _steps() -> Format:
    from sfu.reporting.pictures.trade_off import read_steps

    steps = {"jit": {"test_accuracy": [1.0, 2.0], "forget_accuracy": [3.0, 4.0]}}
    files = {"trade_off.json": json.dumps(steps).encode()}
    return Format(files, {"trade_off.json": on_json}, lambda folder: read_steps(folder / "trade_off.json"), 1)


def _head() -> Any:
    from sfu.heads.certificate import Certificate
    from sfu.heads.kept import Kept
    from sfu.heads.linear import LinearHead
    from sfu.heads.projections import DIRECTIONS
    from sfu.heads.settings import SketchKind
    from sfu.heads.sketch import Sketch

    torch.manual_seed(0)
    drawn = torch.randn(3, 5, dtype=torch.float64)
    certificate = Certificate(0.5, drawn.clone(), 0.1, True)
    hessian = torch.eye(5).double()
    sketch = Sketch.encode(hessian, SketchKind.cholesky)
    projected = torch.ones(2, DIRECTIONS).double()
    kept = Kept(
        1.0, torch.tensor([0.2, 0.3, 0.5]).double(), drawn[0], sketch, hessian, projected_2K=projected
    )  # fmt: skip
    return LinearHead(drawn, drawn / 9, 0.01, 77, kept=kept, certificate=certificate)


def _heads() -> Format:
    from sfu.heads.files import load_head

    files = _written(lambda folder: _head().save(folder / "head"))
    change = {name: change_of(name) for name in files}
    return Format(files, change, lambda folder: load_head(folder / "head"), 12)


def _linearised() -> Format:
    from sfu.data.settings import BackboneSettings
    from sfu.heads.cores.network import build_network
    from sfu.heads.files import load_head
    from sfu.heads.linearised import LinearisedHead
    from sfu.heads.settings import LinearisedSettings

    backbone = BackboneSettings(name="shufflenet_v2_x0_5", weights="none", size=32)
    network = build_network(backbone, LinearisedSettings(layers=1), 3)
    core = network.core(torch.randn(4, 3, 32, 32), torch.device("cpu"))
    parameters = torch.randn(1, core.n_parameters).double()
    files = _written(lambda folder: LinearisedHead(parameters, parameters, 1e-3, 50, core=core).save(folder / "head"))
    change = {name: change_of(name) for name in files}
    change["head.json "] = change["head.json"]  # drawn twice as often
    return Format(files, change, lambda folder: load_head(folder / "head"), 0.3)


def _arrays(coded: bool) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    features, labels = draw.normal(size=(40, 4)).astype(np.float32), np.arange(40) % 3
    codes = {}
    if coded:
        codes = {"offset": features.min(0), "scale": np.full(4, 0.02, np.float32)}
        features = ((features - codes["offset"]) / codes["scale"]).round().clip(0, 255).astype(np.uint8)
    return {
        **codes,
        "train_features": features,
        "train_labels": labels,
        "test_features": features[:9],
        "test_labels": labels[:9],
    }


def _features(suffix: str, coded: bool = False) -> Format:
    import sklearn.model_selection  # noqa: F401  a valid file with a test part does not import it
    from safetensors.numpy import save_file

    from sfu.data.datasets.base import Dataset
    from sfu.data.load import load_dataset

    def write(folder: Path) -> None:
        if suffix == ".npz":
            np.savez_compressed(folder / "a.npz", **_arrays(coded), train_groups=np.array(["ann", "zoë"] * 20))
        else:
            save_file(_arrays(coded) | {"train_groups": np.arange(40) % 2}, folder / "a.safetensors")

    files = _written(write)
    return Format(
        files, {f"a{suffix}": on_zip if suffix == ".npz" else on_safetensors},
        lambda folder: load_dataset(Dataset.make(name="features", path=str(folder / f"a{suffix}")), 0), 8,
    )  # fmt: skip


def _table(suffix: str, **options: Any) -> Format:
    import pyarrow
    from pyarrow import feather, ipc, parquet

    from sfu.data.tables import read_rows

    arrays = _arrays(False)
    names = pyarrow.array(["ant", "bee", "cow", "dog"] * 10)
    columns = {"features": pyarrow.array(list(arrays["train_features"])), "label": names, "weights": np.ones(40)}
    table = pyarrow.table(columns | ({} if suffix == ".parquet" else {"label": names.dictionary_encode()}))

    def write(folder: Path) -> None:
        path = folder / f"a{suffix}"
        if suffix == ".parquet":
            parquet.write_table(table, path, row_group_size=15, **options)
        elif suffix == ".feather":
            feather.write_feather(table, path, chunksize=15, **options)
        else:
            with ipc.new_stream(path, table.schema, options=ipc.IpcWriteOptions(**options)) as stream:
                stream.write_table(table, 15)

    def read(folder: Path) -> object:
        return read_rows(folder / f"a{suffix}", ("features", "labels", "weights"), "FORGET")

    return Format(_written(write), {f"a{suffix}": mutated_bytes}, read, 3)


def _indices(suffix: str) -> Format:
    from sfu.data.settings import ForgetSettings
    from sfu.data.split import make_split

    rows = np.arange(0, 40, 3)
    texts = {
        ".npy": npy_of(rows),
        ".json": json.dumps(rows.tolist()).encode(),
        ".txt": "\n".join(map(str, rows)).encode(),
    }
    change = {".npy": on_npy, ".json": on_json, ".txt": on_text}[suffix]
    labels = torch.arange(40) % 4
    return Format(
        {f"a{suffix}": texts[suffix]}, {f"a{suffix}": change},
        lambda folder: make_split(ForgetSettings(indices=str(folder / f"a{suffix}")), labels, 4, 0), 3,
    )  # fmt: skip


def _forget_files() -> Format:
    from sfu.data.settings import ForgetSettings
    from sfu.data.split import make_split

    names = [f"/data/{label}/{n:04}.jpg" for n in range(10) for label in ("cat", "dog")]
    text = "".join(f"{name}\n" for name in (names[0], "dog/0003.jpg", names[4])).encode()
    return Format(
        {"a.txt": text}, {"a.txt": on_text},
        lambda folder: make_split(ForgetSettings(files=str(folder / "a.txt")), torch.arange(20) % 2, 2, 0, (),
        names), 2,
    )  # fmt: skip


def _labels() -> Format:
    from sfu.data.images.labels_csv import read_labels_csv

    images = {f"images/{part}/{n}.png": b"" for part in ("train", "test") for n in range(4)}
    lines = [f"{name.removeprefix('images/')},{n % 2},{name.split('/')[1]}" for n, name in enumerate(images)]
    files = {"labels.csv": "\n".join(["file,label,split,group", *(f"{one},ann" for one in lines)]).encode(), **images}
    return Format(
        files, {"labels.csv": on_text},
        lambda folder: read_labels_csv(folder / "labels.csv", folder / "images", None), 4,
    )  # fmt: skip


def _weights(suffix: str, zipped: bool = True) -> Format:
    from safetensors.torch import save_file

    from sfu.data.backbones.weights import read_state_dict

    tensors = {"module.fc.weight": torch.randn(4, 3), "module.fc.bias": torch.randn(4)}

    def write(folder: Path) -> None:
        if suffix == ".safetensors":
            save_file(tensors, folder / "a.safetensors")
        else:
            torch.save({"state_dict": tensors, "epoch": 3}, folder / "a.pt", _use_new_zipfile_serialization=zipped)

    change = on_safetensors if suffix == ".safetensors" else on_zip if zipped else mutated_bytes
    return Format(_written(write), {f"a{suffix}": change}, lambda folder: read_state_dict(folder / f"a{suffix}"), 2)


def _checkpoint(suffix: str) -> Format:
    from safetensors.torch import save_file

    from sfu.heads.checkpoint import read_layer, write_layer

    tensors = {"body": torch.randn(3), "fc.weight": torch.randn(4, 3), "fc.bias": torch.randn(4)}

    def write(folder: Path) -> None:
        if suffix == ".safetensors":
            save_file(tensors, folder / "a.safetensors")
        else:
            torch.save({"state_dict": tensors, "epoch": 3}, folder / "a.pt")

    def read(folder: Path) -> object:
        path = folder / f"a{suffix}"
        write_layer(path, "fc", read_layer(path, "fc"), folder / f"b{suffix}")
        return None

    change = on_safetensors if suffix == ".safetensors" else on_zip
    return Format(_written(write), {f"a{suffix}": change}, read, 2)


def _deletion() -> Format:
    from sfu.records.record import as_text, hash_of, read_deletion_record

    digest, files = "0" * 64, dict.fromkeys(("tensors", "settings", "secret", "model"))
    content = {
        "schema": 1, "number": 2, "previous": digest, "time": "2026-11-27T23:08:00Z", "sfu": "0.1", "torch": "2.9",
        "before": files, "after": files,
        "event": "request", "layer": "fc", "undone": None, "purged": None,
        "asked": {
            "kind": "random", "files": 1, "rows": 5, "unlabelled": [7], "seed": 0, "copies": False,
            "on_doubt": "withhold",
        },
        "done": {
            "verdict": "applied", "reasons": [], "method": "m", "note": None, "rows": 5, "row_digests": ["0" * 32],
            "n_train": [9, 4], "earlier_requests": 0, "kept": False, "rounded": 0.1,
        },
        "estimated": {
            "share": 0.5, "share_interval": [0.4, 0.6], "distance": 0.7, "l2": 1e-3, "l2_interval": None,
        },
        "not_touched": ["x"], "text": digest,
    }  # fmt: skip
    body = as_text({**content, "hash": hash_of(content)}).encode()
    return Format({"a.json": body}, {"a.json": on_json}, lambda folder: read_deletion_record(folder / "a.json"), 4)


def _training_file() -> Format:
    from sfu.records.training import read_training

    loss = {"name": "softmax", "label_smoothing": 0.1}
    body = json.dumps({"n_train": 9, "loss": loss, "l2": "estimate", "class_counts": [4, 5]}).encode()
    layer = torch.nn.Linear(3, 2)
    return Format(
        {"a.json": body}, {"a.json": on_json}, lambda folder: read_training(folder / "a.json").head(layer), 3
    )  # fmt: skip


_KEY = "0" * 32


def _chunks() -> Format:
    from sfu.data.features.store import Features, FeatureStore

    record = {"backbone": "tiny", "transform": {"crop": 8}}

    def store(folder: Path) -> FeatureStore:
        return FeatureStore(folder, record, 6)

    def write(folder: Path) -> None:
        rows = torch.tensor([0, 1, 3, 4, 5])
        made = store(folder)
        made.begin({"dataset": "cats"})
        made.write(0, Features(torch.randn(5, 3), rows, {2: "cut short"}))

    files = {name: content for name, content in _written(write).items() if not name.endswith(".lock")}

    def read(folder: Path) -> object:
        from sfu.cli.features import main

        with redirect_stdout(io.StringIO()):
            main(["ls", "--cache", str(folder)])
            main(["forget", "--dry-run", "--digest", "0" * 64, "--cache", str(folder)])
            found = store(folder).load()
            if found is None:
                raise SfuError("made again")
            main(["rm", "--all", "--cache", str(folder)])
        return found

    change = {name: change_of(name) for name in files}
    return Format(files, change, read, 6, sealed=next(name for name in files if name.endswith("damaged.json")))


def _rows() -> Format:
    from sfu.experiment.cache import StageCache
    from sfu.experiment.context import RowResult
    from sfu.experiment.resources import Usage
    from sfu.experiment.result_store import result_store
    from sfu.experiment.row_files import read_row, write_row
    from sfu.unlearning.base import UnlearningResult

    head = _head()
    trial = UnlearningResult(head, details={"lr": 0.1})
    result = UnlearningResult(head, True, 0.5, {"rho": 1e-3}, "n", (head.parameters_CE, head.parameters_CE), (trial,))
    made = RowResult(Usage(1.0, 100.0), result)
    files = {f"{_KEY}/{k}": v for k, v in _entry(_KEY, _written(lambda folder: write_row(made, folder))).items()}

    def read(folder: Path) -> object:
        from sfu.cli.results import main

        with redirect_stdout(io.StringIO()):
            main(["ls", "--cache", str(folder)])
        cache: Any = StageCache(result_store(folder), None)  # type: ignore[arg-type]
        found = cache.store.read(_KEY, lambda entry: read_row(entry, None, torch.device("cpu")))
        if found is None:
            raise SfuError("made again")
        return found

    change = {name: change_of(name) for name in files}
    return Format(files, change, read, 8, sealed=f"{_KEY}/row.json")


def _whole_runs() -> Format:
    from sfu.experiment.cache import StageCache
    from sfu.experiment.result_store import result_store

    files = {f"{_KEY}/{k}": v for k, v in _entry(_KEY, {"metrics.json": json.dumps(METRICS).encode()}).items()}
    keys: Any = SimpleNamespace(examples=_KEY, run=_KEY, head=_KEY, rows=dict.fromkeys(METRICS["rows"], _KEY))

    def read(folder: Path) -> object:
        found = StageCache(result_store(folder), keys).restore_run(folder / "run")
        if found is None:
            raise SfuError("made again")
        return found

    return Format(files, dict.fromkeys(files, on_json), read, 4, sealed=f"{_KEY}/metrics.json")


def _training() -> Format:
    from sfu.heads.normal_equations import Checkpoint
    from sfu.store import Store

    like = torch.ones(2, 3, dtype=torch.float64)
    files = _written(lambda folder: Store(folder).write_tensors(_KEY, {"parameters": like}))
    files = {name: content for name, content in files.items() if not name.endswith(".lock")}

    def read(folder: Path) -> object:
        found = Checkpoint(_KEY, Store(folder)).read(like)
        if found is None:
            raise SfuError("made again")
        return found

    change = {name: change_of(name) for name in files}
    return Format(files, change, read, 2, sealed=f"{_KEY}/tensors.safetensors")


def _memo() -> Format:
    from sfu.data.backbones import memo

    record = {
        "backbone": "x", "weights": "0" * 64, "transform": {"crop": 8, "mean": [0.5], "antialias": True},
        "dtype": "float32",
        "pooling": "avg",
    }  # fmt: skip
    files = {"record.json": json.dumps(record).encode()}
    return Format(files, {"record.json": on_json}, memo._read, 1)


def _dogs() -> Format:
    from scipy.io import savemat

    from sfu.data.datasets.stanford_dogs import _read_list

    names = np.array([f"n1-cat/{n}.jpg" for n in range(5)], dtype=object)[:, None]
    labels = np.arange(1, 6)[:, None]

    def write(folder: Path) -> None:
        savemat(folder / "plain.mat", {"file_list": names, "labels": labels})
        savemat(folder / "small.mat", {"file_list": names, "labels": labels}, do_compression=True)

    def read(folder: Path) -> object:
        _read_list(folder / "plain.mat")
        return _read_list(folder / "small.mat")

    return Format(_written(write), {"plain.mat": mutated_bytes, "small.mat": mutated_bytes}, read, 2)


def _tar() -> Format:
    from sfu.data.archive import extract

    body = {}
    for name, mode in (("a.tar", "w"), ("b.tar.gz", "w:gz")):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode=mode) as tar:  # type: ignore[call-overload]
            for member in ("Images/a/1.jpg", "Images/b/2.jpg"):
                info = tarfile.TarInfo(member)
                info.size = 700
                tar.addfile(info, io.BytesIO(bytes(range(100)) * 7))
        body[name] = file.getvalue()

    def read(folder: Path) -> object:
        for name in body:
            (folder / f"{name}-out").mkdir()
            extract(folder / name, ["Images"], folder / f"{name}-out")
        return None

    return Format(body, dict.fromkeys(body, mutated_bytes), read, 2)


def _images() -> Format:
    from PIL import Image

    from sfu.data.images.decode import decode_image

    pixels = np.random.default_rng(0).integers(0, 255, (24, 20, 3), dtype=np.uint8)
    files = {}
    for kind in ("png", "jpeg", "gif", "bmp", "tiff", "webp", "ppm"):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, kind)
        files[f"a.{kind}"] = file.getvalue()

    def read(folder: Path) -> object:
        return [decode_image((folder / name).read_bytes()) for name in files]

    return Format(files, dict.fromkeys(files, mutated_bytes), read, 10)


FORMATS: dict[str, Callable[[], Format]] = {
    "runs": _runs, "metrics": _metrics, "yaml": _yaml, "trade_off": _steps, "head": _heads, "linearised": _linearised,
    "npz": lambda: _features(".npz"), "safetensors": lambda: _features(".safetensors"),
    "npz_coded": lambda: _features(".npz", True), "safetensors_coded": lambda: _features(".safetensors", True),
    "parquet": lambda: _table(".parquet"), "feather": lambda: _table(".feather", compression="uncompressed"),
    "feather_zstd": lambda: _table(".feather", compression="zstd"),
    "arrow_lz4": lambda: _table(".arrow", compression="lz4"), "arrow": lambda: _table(".arrow"),
    "indices_npy": lambda: _indices(".npy"), "indices_json": lambda: _indices(".json"),
    "indices_txt": lambda: _indices(".txt"), "forget_files": _forget_files, "labels_csv": _labels,
    "weights_safetensors": lambda: _weights(".safetensors"), "weights_torch": lambda: _weights(".pt"),
    "weights_legacy": lambda: _weights(".pt", zipped=False), "features": _chunks, "rows": _rows,
    "whole_runs": _whole_runs, "checkpoint_safetensors": lambda: _checkpoint(".safetensors"),
    "checkpoint_torch": lambda: _checkpoint(".pt"), "deletion_record": _deletion, "training_file": _training_file,
    "training": _training, "memo": _memo, "mat": _dogs, "tar": _tar, "images": _images,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------- one input


def write_input(made: Format, folder: Path, name: str, number: int) -> None:
    """Write input ``number`` of a format into an empty folder."""
    draw = random.Random(f"{name} {number}")
    files = dict(made.files)
    chosen = draw.choice(sorted(made.change))
    changed = chosen.strip()
    files[changed] = made.change[chosen](files[changed], draw)
    if made.sealed:
        home = made.sealed.rpartition("/")[0]
        entry = f"{home}/entry.json"
        if changed != entry:
            inside = {
                n.rpartition("/")[2]: content for n, content in files.items() if n.startswith(f"{home}/") and n != entry
            }
            about = json.loads(files[entry])
            about["files"] = {n: hashlib.sha256(content).hexdigest() for n, content in inside.items()}
            files[entry] = json.dumps(about).encode()
    write_files(folder, files)


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write files by name into a folder."""
    for file, content in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def declared(folder: Path) -> int:
    """Return the bytes that the files have, or say they unpack to, as far as that is believed."""
    total = 0
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        size = path.stat().st_size
        if path.suffix in (".npz", ".pt"):
            try:
                with zipfile.ZipFile(path) as archive:
                    said = sum(info.file_size for info in archive.infolist())
                size = max(size, said if said <= max(MEMORY, 100 * size) else 0)
            except Exception:
                pass
        elif (
            path.parent == folder
            and path.stem == "a"
            and path.suffix[1:] in ("png", "jpeg", "gif", "bmp", "tiff", "webp", "ppm")
        ):
            from PIL import Image

            try:
                with Image.open(path) as image:
                    size = max(size, 3 * image.width * image.height)
            except Exception:
                pass
        total += size
    return total


def _resident(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return 0


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of this process's work, however busy the machine is
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def outcome_of(made: Format, folder: Path) -> tuple[str, str]:
    """Read an input; return ``read``, the name of the SfuError, or ``FAILED ...``, and a traceback."""
    allowed = MEMORY + 2 * declared(folder)
    tracemalloc.start()
    Path("/proc/self/clear_refs").write_text("5")
    resident, trace = _resident("VmRSS"), ""
    try:
        with _time_limit(SECONDS):
            made.read(folder)
            outcome = "read"
    except SfuError as error:
        outcome = type(error).__name__
    except _TooSlow:
        outcome, trace = "FAILED hang", traceback.format_exc()
    except (Exception, SystemExit) as error:
        outcome, trace = f"FAILED {type(error).__name__}", traceback.format_exc()
    used = max(tracemalloc.get_traced_memory()[1], _resident("VmHWM") - resident)
    tracemalloc.stop()
    if used > allowed:
        outcome, trace = "FAILED memory", f"{trace}\n{used / 2**20:.0f} MiB used, {allowed / 2**20:.0f} allowed"
    return outcome, trace


def _work(name: str, made: Format, numbers: range, root: Path, out: int) -> None:
    """Read some inputs, and write a line of JSON for each; in a process of its own, which may be killed."""
    valid = root / f"{name}-valid"
    write_files(valid, made.files)
    made.read(valid)  # what is imported on the way is no input's memory
    shutil.rmtree(valid)
    for number in numbers:
        folder = root / f"{name}-{number}"
        write_input(made, folder, name, number)
        outcome, trace = outcome_of(made, folder)
        if not trace:
            shutil.rmtree(folder, ignore_errors=True)
        os.write(out, (json.dumps([number, outcome, trace[-4000:]]) + "\n").encode())


def fuzz(name: str, numbers: range, root: Path) -> Iterator[tuple[int, str, str]]:
    """Yield number, outcome and traceback of inputs; those that failed stay in ``root``."""
    made = FORMATS[name]()
    while numbers:
        batch = numbers[:_BATCH]
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(ours)
                devnull = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull, 1)
                os.dup2(devnull, 2)
                _work(name, made, batch, root, theirs)
            finally:
                os._exit(0)
        os.close(theirs)
        done, buffer = batch.start, b""
        while True:
            ready, _, _ = select.select([ours], [], [], _LOST)
            piece = os.read(ours, 1 << 16) if ready else b""
            if not piece:
                break
            *lines, buffer = (buffer + piece).split(b"\n")
            for line in lines:
                number, outcome, trace = json.loads(line)
                done = number + 1
                yield number, outcome, trace
        os.close(ours)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if done < batch.stop:
            ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"code {os.WEXITSTATUS(status)}"
            yield done, "FAILED crash", f"the process ended with {ended}"
            done += 1
        numbers = range(done, numbers.stop)


def main(arguments: list[str] | None = None) -> int:
    """Fuzz, print counts, and return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=2000, help="in all (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first input of each format")
    parser.add_argument("--formats", nargs="+", choices=sorted(FORMATS), default=list(FORMATS))
    parser.add_argument("--out", type=Path, default=Path("fuzz-failures"), help="folder of inputs that fail")
    parser.add_argument("--replay", type=Path, help="read one saved input again, with its traceback")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.replay is not None:
        print(FORMATS[given.replay.name.rpartition("-")[0]]().read(given.replay))
        return 0
    shares = {name: FORMATS[name]().shares for name in given.formats}
    counts: dict[str, Counter[str]] = {name: Counter() for name in shares}
    failed, started = 0, time.perf_counter()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as temporary:
        for name, share in shares.items():
            n_inputs = math.ceil(given.inputs * share / sum(shares.values()))
            clock = time.perf_counter()
            for number, outcome, trace in fuzz(name, range(given.first, given.first + n_inputs), Path(temporary)):
                counts[name][outcome] += 1
                if outcome.startswith("FAILED"):
                    failed += 1
                    saved, kept = given.out / f"{name}-{number}", Path(temporary) / f"{name}-{number}"
                    if counts[name][outcome] <= 5 and kept.is_dir():
                        shutil.rmtree(saved, ignore_errors=True)
                        shutil.copytree(kept, saved)
                        print(f"{saved}: {outcome}\n{trace}", flush=True)
                    shutil.rmtree(kept, ignore_errors=True)
            told = ", ".join(f"{outcome} {count:,}" for outcome, count in sorted(counts[name].items()))
            print(f"{name:<20} {n_inputs:>7,} in {time.perf_counter() - clock:6.1f} s: {told}", flush=True)
    total = sum((counter for counter in counts.values()), Counter())
    told = ", ".join(f"{outcome} {count:,}" for outcome, count in sorted(total.items()))
    print(f"{sum(total.values()):,} inputs in {time.perf_counter() - started:.0f} s: {told}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
