"""Methods that reach for what they must not see, change what others use, or misbehave in other ways.

They stand in a module of their own, because a row's process imports the method it runs.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import io
import json
import mmap
import os
import re
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from sfu.data.datasets.base import Dataset
from sfu.data.load import load_dataset
from sfu.request import ForgetRequest, MethodContext, Retained
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.result import UnlearningResult


def _dir_fd(path: Path) -> bytes:
    folder = os.open(path.parent, os.O_RDONLY)
    return os.read(os.open(path.name, os.O_RDONLY, dir_fd=folder), 10)


def _through_a_link(make: Callable[[Path, str], None]) -> Callable[[Path], bytes]:
    def reach(path: Path) -> bytes:
        link = Path(tempfile.gettempdir(), "link")
        make(path, str(link))
        return link.read_bytes()

    return reach


def _libc(path: Path) -> bytes:
    handle = ctypes.CDLL(None, use_errno=True).open(os.fsencode(path), os.O_RDONLY)
    if handle < 0:
        raise PermissionError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return os.read(handle, 10)


def _mapped(path: Path) -> bytes:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        return view[:10]


def _torchvision(path: Path) -> Any:
    from torchvision.io import read_file

    return read_file(str(path))


def _image_op(path: Path) -> Any:
    import torchvision  # noqa: F401  registers the operator

    return torch.ops.image.read_file(str(path))


def _forked(path: Path) -> bytes:
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, path.read_bytes()[:10])
        os._exit(0)
    os.close(writing)
    return os.read(reading, 10)


def _run(*command: str) -> bytes:
    return subprocess.run(command, capture_output=True, check=True).stdout


def _sqlite(path: Path) -> Any:
    return sqlite3.connect(path).execute("select * from sqlite_master").fetchall()


FILES: dict[str, Callable[[Path], Any]] = {
    "pathlib": Path.read_bytes,
    "file_io": lambda path: io.FileIO(path).read(10),
    "opener": lambda path: open(path, "rb", opener=os.open).read(10),  # noqa: SIM115
    "os_open": lambda path: os.read(os.open(path, os.O_RDONLY), 10),
    "dir_fd": _dir_fd,
    "libc": _libc,
    "mmap": _mapped,
    "numpy": np.load,
    "memmap": lambda path: np.memmap(path, mode="r")[:10],
    "from_file": lambda path: torch.from_file(str(path), size=10, dtype=torch.uint8),
    "torch_load": torch.load,
    "safe_open": lambda path: safe_open(path, "pt"),
    "torchvision": _torchvision,
    "image_op": _image_op,
    "sqlite": _sqlite,
    "symbolic_link": _through_a_link(os.symlink),
    "hard_link": _through_a_link(os.link),
    "rename": _through_a_link(os.rename),
    "copy": _through_a_link(shutil.copy),
    "cat": lambda path: _run("cat", str(path)),
    "python": lambda path: _run(sys.executable, "-c", f"print(open({str(path)!r}, 'rb').read(10))"),
    "fork": _forked,
    "own_root": lambda path: Path(f"/proc/self/root{path}").read_bytes(),
    "write": lambda path: path.write_bytes(b"wrong"),
    "append": lambda path: path.open("ab").write(b"wrong"),
    "remove": Path.unlink,
    "list": lambda path: os.listdir(path.parent),
    "loader": lambda path: load_dataset(Dataset.make(name="features", path=str(path)), 0),
}
"""Ways to read, change or find the file at a path."""


def _memory(pid: int) -> bytes:
    with open(f"/proc/{pid}/mem", "rb") as memory:
        memory.seek(int(Path(f"/proc/{pid}/maps").read_text().partition("-")[0], 16))
        return memory.read(10)


def _vm_read(pid: int) -> Any:
    class Vector(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

    here = Vector(ctypes.addressof(ctypes.create_string_buffer(8)), 8)
    there = Vector(id(None), 8)
    found = ctypes.CDLL(None, use_errno=True).process_vm_readv(
        pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0
    )  # fmt: skip
    if found < 0:
        raise PermissionError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def _limit(pid: int) -> Any:
    return resource.prlimit(pid, resource.RLIMIT_CORE)


def _send_datagram(pid: int) -> Any:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return ends[0].sendto(b"row", "/dev/log")


def _type_into_terminal(pid: int) -> Any:
    try:
        return fcntl.ioctl(2, termios.TIOCSTI, b"x")
    except OSError as error:
        if error.errno == errno.EACCES:  # it was refused, and did not fail for want of a terminal
            raise
        return error


def _attach(pid: int) -> Any:
    found = ctypes.CDLL(None, use_errno=True).ptrace(16, pid, 0, 0)
    if found < 0:
        raise PermissionError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


PROCESSES: dict[str, Callable[[int], Any]] = {
    "memory": _memory,
    "vm_read": _vm_read,
    "ptrace": _attach,
    "signal": lambda pid: os.kill(pid, 0),
    "limit": _limit,
    "priority": lambda pid: os.setpriority(os.PRIO_PROCESS, pid, 5),
    "datagram": _send_datagram,
    "type": _type_into_terminal,
    "environment": lambda pid: Path(f"/proc/{pid}/environ").read_bytes(),
    "descriptors": lambda pid: os.listdir(f"/proc/{pid}/fd"),
}
"""Ways to reach another process."""


def _send_to(address: tuple[str, int]) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        return end.sendto(b"row", address)


NETWORK: dict[str, Callable[[tuple[str, int]], Any]] = {
    "tcp": lambda address: socket.create_connection(address, 5),
    "udp": _send_to,
    "unix": lambda address: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
}
"""Ways to send something to an address."""


@dataclass(frozen=True)
class Reaches(UnlearningMethod):
    """Fails unless the attack works."""

    how: str
    target: Any

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        found = {**FILES, **PROCESSES, **NETWORK}[self.how](self.target)
        return UnlearningResult(request.head, note=f"reached {found!r}"[:200])


@dataclass(frozen=True)
class FindsFiles(UnlearningMethod):
    """Reports every file below some folders that it can read."""

    folders: tuple[Path, ...]

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        found = []
        for path in self.folders:
            for folder, _, names in os.walk(path):
                for name in names:
                    try:
                        found.append(str(len(Path(folder, name).read_bytes())))
                    except OSError:
                        continue
        return UnlearningResult(request.head, note=f"read {len(found)} files")


@dataclass(frozen=True)
class SearchesMemory(UnlearningMethod):
    """Counts the rows in this process's memory whose first number is ``marker`` (float32); the second tells them apart.

    The marker is given inverted, so that its own bytes are in no memory before the search.
    """

    inverted: bytes

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        return UnlearningResult(request.head, details={"rows": len(marked_rows(self.inverted))})


def marked_rows(inverted: bytes) -> set[bytes]:
    """Return the second numbers of all rows in memory that begin with the marker."""
    marker = re.compile(re.escape(bytes(255 - byte for byte in inverted)) + b"(.{4})", re.S)
    found: set[bytes] = set()
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, access, *_ = line.split()
            start, end = (int(part, 16) for part in span.split("-"))
            if not access.startswith("rw"):  # libraries
                continue
            try:
                memory.seek(start)
                found |= set(marker.findall(memory.read(end - start)))
            except (OSError, OverflowError, ValueError):
                continue
    return {number for number in found if 1 <= np.frombuffer(number, np.float32)[0] <= 1e6}


@dataclass(frozen=True)
class Careless(UnlearningMethod):
    """Changes in place what it was given."""

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        rows = request.features_FD
        rows -= rows.mean(0)
        request.labels_F.zero_()
        request.head.parameters_CE.mul_(1.5)
        request.head.gradient_CE.add_(1.0)
        context.seeds.clear()
        return UnlearningResult(request.head)


@dataclass(frozen=True)
class Patches(UnlearningMethod):
    """Replaces functions that every other method uses."""

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        def wrong(*arguments: Any, **options: Any) -> Any:
            raise RuntimeError("patched")

        torch.linalg.eigh = torch.linalg.solve = torch.linalg.cholesky_ex = wrong
        ForgetRequest.forget_gradient = wrong  # type: ignore[method-assign]
        torch.set_default_dtype(torch.float16)
        os.environ["SFU_CACHE"] = "/nowhere"
        os.chdir("/")
        return UnlearningResult(request.head)


@dataclass(frozen=True)
class HandsBackLinks(UnlearningMethod):
    """Has the caller read another head in place of the row's own: through links, or a link in place of the folder."""

    other: Path
    folder: bool = False

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        result = Path(tempfile.gettempdir()).with_name("result")
        if self.folder:
            result.rmdir()
            result.symlink_to(self.other.parent)
        for suffix in (".safetensors", ".json"):
            (result / f"head{suffix}").symlink_to(self.other.with_suffix(suffix))
        frame = json.dumps({"error": None, "seconds": 1.0, "peak_memory_mb": 1.0}).encode()
        about = {"seconds": 1.0, "peak_memory_mb": 1.0, "isolation": None, "applied": True, "note": None}
        about |= {"predicted_distance_gain": None, "details": {}, "trials": []}
        (result / "row.json").write_text(json.dumps(about))
        socket.socket(fileno=3).sendall(len(frame).to_bytes(8, "big") + frame)
        os._exit(0)


@dataclass(frozen=True)
class Odd(UnlearningMethod):
    """Behaves as no method should, or as few do."""

    how: str

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        head = request.head
        if self.how == "shape":
            return UnlearningResult(
                replace(head, parameters_CE=head.parameters_CE[:, 1:], gradient_CE=head.gradient_CE[:, 1:])
            )
        if self.how == "interrupt":
            raise KeyboardInterrupt
        if self.how == "exit":
            raise SystemExit("a good reason")
        if self.how == "long":
            raise RuntimeError("x" * 50_000_000)
        if self.how == "fine" and not gc.isenabled():
            raise RuntimeError("what a row leaves is not collected")
        if self.how == "closed":
            sys.stdout.close()
        if self.how == "threads":
            threads = [threading.Thread(target=lambda: [context.report(n, 100) for n in range(100)]) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self.how == "deep":
            folder = tempfile.gettempdir()
            os.chdir(folder)
            for _ in range(3000):
                os.mkdir("d")
                os.chdir("d")
        return UnlearningResult(head)


@dataclass(frozen=True)
class Stays(UnlearningMethod):
    """Asks not to die with its parent, sends junk, and stays."""

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        ctypes.CDLL(None).prctl(1, 0)
        socket.socket(fileno=3).sendall(b"\xff" * 64)
        time.sleep(600)
        return UnlearningResult(request.head)


@dataclass(frozen=True)
class Dies(UnlearningMethod):
    """Ends its process without a word."""

    how: str

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        if self.how == "exit":
            os._exit(3)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "crash":
            ctypes.string_at(0)
        if self.how == "junk":
            socket.socket(fileno=3).sendall(b"\xff" * 64)
        if self.how == "pickle":
            frame = b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94."
            socket.socket(fileno=3).sendall(len(frame).to_bytes(8, "big") + frame)
        os._exit(0)
