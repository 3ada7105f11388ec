"""Run a source-free row in a process of its own, which is given its request and can reach nothing else.

The process is forked by a server that has never seen any data (:mod:`sfu.isolation.server`). Before it reads the
request, the kernel closes to it every file but Python's packages and an empty folder for the result, and the network
(:mod:`sfu.isolation.sandbox`). Plug-ins are imported inside. The result comes back as the files that the cache of rows
has, and is checked as they are.
"""

from __future__ import annotations

import glob
import importlib
import json
import logging
import os
import pickle
import shutil
import site
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter

from sfu.config_files import config_dir
from sfu.data.seal import sealed
from sfu.experiment.config import RunConfig
from sfu.experiment.context import RowResult
from sfu.experiment.resources import Usage
from sfu.experiment.row_files import described, read_row, run_method, write_row
from sfu.heads.cores.core import Core
from sfu.isolation.sandbox import protections, restrict
from sfu.isolation.server import LONGEST_REPLY, Channel, ChildDied, serve, server_of
from sfu.progress import Tick
from sfu.readers import Count, Record, Size
from sfu.registry import member_modules, use_members
from sfu.request import ForgetRequest, MethodContext
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.rows import RowSpec, make_method

log = logging.getLogger(__name__)

ROW_PROCESS = __name__
"""The module whose server forks the processes of rows."""
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/etc/localtime",
           "/usr/share/zoneinfo", "/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys/devices/system",
           "/sys/fs/cgroup", "/dev/urandom", "/dev/zero")  # fmt: skip
_CUDA = ("/usr/local/cuda", "/opt/cuda", "/proc/driver/nvidia", "/sys/bus/pci", "/sys/class", "/sys/devices")
_RESULT = "result"  # folder
_LONGEST_TEXT = 10_000  # characters of an error or a log record
_PRELOADED = ("scipy.linalg", "scipy.optimize", "sfu.curvature.cross_validation", "sfu.curvature.psd_fit.solve",
              "sfu.curvature.subspace", "sfu.heads.linear", "sfu.heads.linearised", "sfu.heads.train",
              "sfu.losses.softmax", "sfu.unlearning.descent", "sfu.unlearning.further_steps")  # fmt: skip
"""It is quicker to import them once than in every row."""
_LIBRARIES = (f"{sys.base_prefix}/lib", "/usr/lib", "/usr/local/lib")
_OTHERS_DATA = "*/datasets/data"
"""Datasets that packages bring along, such as scikit-learn's, from a folder of packages."""


@dataclass(frozen=True)
class RowTask:
    """What a row's process is given.

    Attributes:
        method: The method itself, or the settings of a row of the configuration, which is built inside.
        config: The run's configuration, to build the method from.
        sealed: Files and folders to refuse with a friendly message.
    """

    name: str
    method: UnlearningMethod | RowSpec
    config: RunConfig
    request: ForgetRequest
    context: MethodContext
    sealed: Sequence[Path]


def packed(task: RowTask) -> bytes | None:
    """Return a task as bytes; ``None`` if another process cannot import its method or head."""
    try:
        payload = pickle.dumps(replace(task, context=replace(task.context, progress=None)))
        return None if b"__main__" in payload else payload  # a script or notebook is not imported again
    except Exception as error:  # pickling calls any class's own code
        log.debug("%s cannot be sent to a process of its own: %s", task.name, error)
        return None


def run_in_process(
    payload: bytes, *, device: torch.device, files: Sequence[str], closed: Sequence[Path], core: Core | None, tick: Tick
) -> RowResult:
    """Run a row; an error there, or the end of its process, ends the row and not the run.

    Args:
        payload: The task, :func:`packed`.
        device: Where the row computes.
        files: Files that it may read.
        closed: Files and folders that the row must not read even if they lie among Python's packages.
        core: The core of linearised heads, which result files name and do not hold.
        tick: Called with (done, total).
    """
    kept_from = protections(isolate=True)
    readable = _readable(device.type)
    modules = _modules_elsewhere(readable)
    code = [Path(place) for file, folders in modules.values() for place in folders or filter(None, [file])]
    with _scratch_folder() as scratch:
        places = {
            "read": [str(path) for path in (*readable, *code, *map(Path, files))],
            "modules": modules, "members": member_modules(),
            "closed": [str(path) for path in (*closed, *_data_of_packages())],
            "write": [scratch, "/dev/null", *(_nvidia_devices() if device.type == "cuda" else [])],
            "scratch": scratch, "folder": _working_folder(), "threads": torch.get_num_threads(),
        }  # fmt: skip
        try:
            with server_of(ROW_PROCESS).task() as channel:
                channel.send(json.dumps(places).encode())
                channel.send(payload)
                about = _follow(channel, tick)
            if about is None:
                raise ChildDied("its process ended without a result")
            usage, error = Usage(about.seconds, about.peak_memory_mb), about.error
            result = None if error is not None else read_back(Path(scratch, _RESULT), core, device)
        except ChildDied as died:
            return RowResult(Usage(), None, str(died), kept_from)
        except Exception as wrong:  # whatever else a process sends or writes is its row's failure
            return RowResult(Usage(), None, f"its result cannot be read ({type(wrong).__name__}: {wrong})", kept_from)
        return RowResult(usage, None, str(error), kept_from) if result is None else replace(result, isolation=kept_from)


def read_back(folder: Path, core: Core | None, device: torch.device) -> RowResult:
    """Read a row's result from the folder it has left.

    Raises:
        ValueError: Something there is a link, which may lead to what only this process can read, or no file.
        ArtifactError: A file is missing or damaged.
    """
    if folder.is_symlink():
        raise ValueError(f"{folder.name} is no folder")
    for entry in os.scandir(folder):
        if not entry.is_file(follow_symlinks=False):
            raise ValueError(f"{entry.name} is no regular file")
    return read_row(folder, core, device)


def serve_children(control: int) -> None:
    """Be the server: import what every row needs, but none of the modules that register methods, and fork."""
    for name in _PRELOADED:
        importlib.import_module(name)
    serve(control, _child)


def _child(channel: Channel) -> None:
    """Be the process of one row."""
    places, payload = channel.receive(), channel.receive()
    if places is None or payload is None:
        return
    about: dict[str, Any] = json.loads(places)
    scratch = Path(about["scratch"])
    os.chdir(about["folder"])
    tempfile.tempdir = str(scratch / "tmp")
    for name in ("tmp", _RESULT):
        (scratch / name).mkdir()
    os.environ["JOBLIB_MULTIPROCESSING"] = "0"  # it would warn that it may make no semaphores
    sys.meta_path.insert(0, _KnownModules(about["modules"]))
    restrict(map(Path, about["read"]), closed=map(Path, about["closed"]), write=map(Path, about["write"]))
    use_members(about["members"])
    torch.set_num_threads(about["threads"])
    torch.set_float32_matmul_precision("highest")
    _send_log_records(channel)
    result = _run_task(payload, channel)
    if result.unlearned is not None:
        try:
            write_row(result, scratch / _RESULT)
        except Exception as error:
            result = RowResult(result.usage, None, f"its result cannot be sent ({type(error).__name__}: {error})")
    said = None if result.error is None else result.error[:_LONGEST_TEXT]
    channel.send(json.dumps({"error": said, **asdict(result.usage)}).encode())


def _run_task(payload: bytes, channel: Channel) -> RowResult:
    """Build the method and run it. What it reaches for is refused in words before the kernel refuses it."""

    def tick(done: int, total: int) -> None:
        channel.send(json.dumps({"done": done, "total": total}).encode())

    try:
        task: RowTask = pickle.loads(payload)
        with sealed(task.sealed):
            method = task.method
            if isinstance(method, RowSpec):
                method = make_method(task.config, task.name, method)
            context = replace(task.context, progress=tick)
            return run_method(task.name, method, task.request, context, None, task.config.forget.parts)
    except BaseException as error:  # an exit or an interrupt of the method's own ends its row, too
        return RowResult(Usage(), None, described(error))


class _Progress(Record):
    done: Count
    total: Count


class _Logged(Record):
    level: Annotated[int, Field(ge=0, le=logging.CRITICAL)]
    message: str


class _Ended(Record):
    seconds: Size
    peak_memory_mb: Size | None
    error: str | None


_FRAMES: TypeAdapter[_Progress | _Logged | _Ended] = TypeAdapter(_Progress | _Logged | _Ended)


def _follow(channel: Channel, tick: Tick) -> _Ended | None:
    """Show progress and log records until the row has ended; return its last frame, or ``None`` if there is none.

    Raises:
        ValueError: The process sends something else.
    """
    while (frame := channel.receive(LONGEST_REPLY)) is not None:
        about = _FRAMES.validate_json(frame)
        if isinstance(about, _Progress):
            tick(about.done, about.total)
        elif isinstance(about, _Logged):
            log.log(about.level, "%s", about.message)
        else:
            return about
    return None


@contextmanager
def _scratch_folder() -> Iterator[str]:
    """Yield an empty folder, and remove it with whatever a row has made in it, as far as that can be removed."""
    scratch = tempfile.mkdtemp(prefix="sfu-row-")
    try:
        yield scratch
    finally:
        try:
            shutil.rmtree(scratch)
        except Exception as error:
            log.warning("the temporary folder %s of a row could not be removed: %s", scratch, error)


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return os.sep


def _send_log_records(channel: Channel) -> None:
    class Sender(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = f"{record.name}: {self.format(record)}"[:_LONGEST_TEXT]
            channel.send(json.dumps({"level": min(record.levelno, logging.CRITICAL), "message": message}).encode())

    logging.captureWarnings(True)
    logging.getLogger().addHandler(Sender())


def _readable(device: str) -> list[Path]:
    """Return what imports need of Python, installed packages and the configuration, and what the device needs."""
    roots = [Path(place) for place in (*_SYSTEM, *(_CUDA if device == "cuda" else ()))]
    return [*roots, *_package_folders(), Path(sys.base_prefix) / "lib", config_dir()]


def _modules_elsewhere(readable: Sequence[Path]) -> dict[str, tuple[str | None, list[str]]]:
    """Return file and folders of the modules and packages that are imported already and lie outside of ``readable``."""
    inside = tuple(os.path.realpath(root) + os.sep for root in readable)
    found = {}
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if "." in name or name == "__main__" or not isinstance(spec, ModuleSpec):
            continue
        file, folders = spec.origin if spec.has_location else None, list(spec.submodule_search_locations or ())
        places = folders or ([file] if file else [])
        if places and not os.path.realpath(places[0]).startswith(inside):
            found[name] = file, folders
    return found


class _KnownModules(MetaPathFinder):
    """Finds the modules that the caller has imported, where the folder around them cannot be listed."""

    def __init__(self, modules: Mapping[str, tuple[str | None, list[str]]]) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name not in self._modules:
            return None
        file, folders = self._modules[name]
        if file is not None:
            return spec_from_file_location(name, file, submodule_search_locations=folders or None)
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = folders
        return spec


@cache
def _package_folders() -> list[Path]:
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return [Path(place) for place in (*places, *([site.getusersitepackages()] if site.ENABLE_USER_SITE else []))]


@cache
def _data_of_packages() -> list[Path]:
    folders = [
        *_package_folders(),
        *(Path(place) for root in _LIBRARIES for place in glob.glob(f"{root}/python3*/*-packages")),
    ]
    return [path for folder in folders for path in folder.glob(_OTHERS_DATA)]


def _nvidia_devices() -> list[str]:
    return [str(path) for path in Path("/dev").glob("nvidia*")]
