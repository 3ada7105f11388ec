"""Run a source-free row in a process of its own, which is given its request and can reach nothing else.

The process is forked by a server that has never seen any data (:mod:`sfu.isolation.server`). Before it reads the
request, the kernel closes to it every file but Python's packages and an empty folder for the result, and the network
(:mod:`sfu.isolation.sandbox`, :mod:`sfu.experiment.row_sandbox`). Plug-ins are imported inside. The result comes back
as the files that the cache of rows has, and is checked as they are.

The shadows of an attack (:mod:`sfu.experiment.shadows`) are unlearned in a few such processes for each row, one thread
in each, which share the requests: most of a step does not use a second thread.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from sfu.data.seal import sealed
from sfu.errors import SfuError
from sfu.experiment.config import RunConfig
from sfu.experiment.context import RowResult
from sfu.experiment.resources import Usage
from sfu.experiment.row_files import described, read_row, run_method, write_row
from sfu.experiment.row_sandbox import KnownModules, places
from sfu.files import write_tensors
from sfu.heads.cores.core import Core
from sfu.isolation.sandbox import protections, restrict
from sfu.isolation.server import LONGEST_REPLY, Channel, ChildDied, serve, server_of
from sfu.progress import Tick
from sfu.readers import Count, Record, Size, floats, read_tensors
from sfu.registry import use_members
from sfu.request import ForgetRequest, MethodContext
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.rows import RowSpec, make_method

log = logging.getLogger(__name__)

ROW_PROCESS = __name__
"""The module whose server forks the processes of rows."""
_RESULT, _SHADOWS = "result", "shadows.safetensors"  # a folder, and a file in it
_NO_MORE = b""  # follows the last request of a shadow
_LONGEST_TEXT = 10_000  # characters of an error or a log record
_MOST_PROCESSES = 8  # of the shadows of a row
_PRELOADED = ("scipy.linalg", "scipy.optimize", "sfu.curvature.cross_validation", "sfu.curvature.psd_fit.solve",
              "sfu.curvature.subspace", "sfu.heads.linear", "sfu.heads.linearised", "sfu.heads.train",
              "sfu.losses.softmax", "sfu.unlearning.descent", "sfu.unlearning.further_steps")  # fmt: skip
"""It is quicker to import them once than in every row."""


@dataclass(frozen=True)
class RowTask:
    """What a row's process is given.

    Attributes:
        method: The method itself, or the settings of a row of the configuration, which is built inside.
        config: The run's configuration, to build the method from.
        request: The request; ``None`` if shadows' requests follow, each with a context of its own.
        sealed: Files and folders to refuse with a friendly message.
    """

    name: str
    method: UnlearningMethod | RowSpec
    config: RunConfig
    request: ForgetRequest | None
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
    with _scratch_folder() as scratch:
        try:
            with server_of(ROW_PROCESS).task() as channel:
                channel.send(json.dumps(places(scratch, device=device.type, files=files, closed=closed)).encode())
                channel.send(payload)
                about = _follow(channel, tick)
            if not isinstance(about, _Ended):
                raise ChildDied("its process ended without a result")
            usage, error = Usage(about.seconds, about.peak_memory_mb), about.error
            result = None if error is not None else read_back(Path(scratch, _RESULT), core, device)
        except ChildDied as died:
            return RowResult(Usage(), None, str(died), kept_from)
        except Exception as wrong:  # whatever else a process sends or writes is its row's failure
            return RowResult(Usage(), None, f"its result cannot be read ({type(wrong).__name__}: {wrong})", kept_from)
        return RowResult(usage, None, str(error), kept_from) if result is None else replace(result, isolation=kept_from)


def steps_in_process(
    payload: bytes, requests: Iterator[tuple[ForgetRequest, MethodContext]], total: int, *, device: torch.device,
    files: Sequence[str], closed: Sequence[Path],
) -> Tensor:  # fmt: skip
    """Serve several requests, of shadows, by the method of a row; return all parameters ``[S, C, E]``.

    Each process is given one request after the other, each when it has served the last one.

    Args:
        payload: The task, :func:`packed`.
        requests: The requests, and what the method may use besides.
        total: Number of requests, at least one.
        device: Where the method computes.
        files: Files that it may read.
        closed: Files and folders that it must not read.

    Raises:
        SfuError: A request was not served, or the process ended; the message says why.
    """
    threads = torch.get_num_threads()
    count = min(threads, total, _MOST_PROCESSES) if device.type == "cpu" else 1
    shape = torch.Size()
    with ExitStack() as folders:
        scratches = [folders.enter_context(_scratch_folder()) for _ in range(count)]
        try:
            with ExitStack() as processes:
                channels = []
                for scratch in scratches:
                    channels.append(processes.enter_context(server_of(ROW_PROCESS).task()))
                    about = places(scratch, device=device.type, files=files, closed=closed)
                    channels[-1].send(json.dumps(about | {"threads": threads // count}).encode())
                    channels[-1].send(payload)
                for number, (request, context) in enumerate(requests):
                    channel, shape = channels[number % count], request.head.parameters_CE.shape
                    if number >= count:
                        _expect(channel, number - count)
                    channel.send(pickle.dumps((request, replace(context, progress=None))))
                for first, channel in enumerate(channels):
                    last = range(first, total, count)[-1]
                    _expect(channel, last)
                    channel.send(_NO_MORE)
                    _expect(channel, last)
            parts = [
                _heads_of(Path(scratch, _RESULT), len(range(first, total, count)), shape)
                for first, scratch in enumerate(scratches)
            ]
            found = parts[0].new_empty(total, *shape)
            for first, part in enumerate(parts):
                found[first::count] = part
        except (SfuError, KeyboardInterrupt):
            raise
        except Exception as wrong:
            raise SfuError(f"shadows could not be unlearned ({type(wrong).__name__}: {wrong})") from wrong
    return found.to(device)


def _expect(channel: Channel, number: int) -> None:
    about = _follow(channel, lambda done, total: None)
    if not isinstance(about, _Served) or about.error is not None:
        why = "its process ended" if about is None else about.error
        raise SfuError(f"shadow {number} was not unlearned: {why}")


def _heads_of(folder: Path, count: int, shape: torch.Size) -> Tensor:
    """Return the parameters that the process of some shadows has left."""
    check_plain_files(folder)
    found = floats(read_tensors(folder / _SHADOWS, "Run again."), "parameters", 3)
    if found.shape != (count, *shape):
        raise ValueError(f"its heads are {list(found.shape)}, not {[count, *shape]}")
    return found


def read_back(folder: Path, core: Core | None, device: torch.device) -> RowResult:
    """Read a row's result from the folder it has left.

    Raises:
        ValueError: Something there is a link, which may lead to what only this process can read, or no file.
        ArtifactError: A file is missing or damaged.
    """
    check_plain_files(folder)
    return read_row(folder, core, device)


def check_plain_files(folder: Path) -> None:
    """Raise :class:`ValueError` unless a folder is one, and holds nothing but files."""
    if folder.is_symlink():
        raise ValueError(f"{folder.name} is no folder")
    for entry in os.scandir(folder):
        if not entry.is_file(follow_symlinks=False):
            raise ValueError(f"{entry.name} is no regular file")


def serve_children(control: int) -> None:
    """Be the server: import what every row needs, but none of the modules that register methods, and fork."""
    for name in _PRELOADED:
        importlib.import_module(name)
    serve(control, _child)


def _child(channel: Channel) -> None:
    """Be the process of one row."""
    where, payload = channel.receive(), channel.receive()
    if where is None or payload is None:
        return
    about: dict[str, Any] = json.loads(where)
    scratch = Path(about["scratch"])
    os.chdir(about["folder"])
    tempfile.tempdir = str(scratch / "tmp")
    for name in ("tmp", _RESULT):
        (scratch / name).mkdir()
    os.environ["JOBLIB_MULTIPROCESSING"] = "0"  # it would warn that it may make no semaphores
    sys.meta_path.insert(0, KnownModules(about["modules"]))
    restrict(map(Path, about["read"]), closed=map(Path, about["closed"]), write=map(Path, about["write"]))
    use_members(about["members"])
    torch.set_num_threads(about["threads"])
    torch.set_float32_matmul_precision("highest")
    _send_log_records(channel)
    try:
        task: RowTask = pickle.loads(payload)
    except BaseException as error:
        channel.send(_ended(RowResult(Usage(), None, described(error))))
        return
    if task.request is None:
        _serve_shadows(task, channel, scratch / _RESULT)
        return
    result = _run_task(task, channel)
    if result.unlearned is not None:
        try:
            write_row(result, scratch / _RESULT)
        except Exception as error:
            result = RowResult(result.usage, None, f"its result cannot be sent ({type(error).__name__}: {error})")
    channel.send(_ended(result))


def _ended(result: RowResult) -> bytes:
    said = None if result.error is None else result.error[:_LONGEST_TEXT]
    return json.dumps({"error": said, **asdict(result.usage)}).encode()


def _serve_shadows(task: RowTask, channel: Channel, folder: Path) -> None:
    """Be a process of a row's shadows: serve requests as they come, and write all heads in the end."""
    found: list[Tensor] = []

    def served(error: str | None = None) -> None:
        channel.send(json.dumps({"served": len(found), "error": error and error[:_LONGEST_TEXT]}).encode())

    with suppress(BaseException), sealed(task.sealed):  # what is wrong with it is told of the first request
        task = replace(task, method=_made(task))
    while frame := channel.receive():
        request, context = pickle.loads(frame)
        result = _run_task(replace(task, request=request, context=context), channel, silent=True)
        if result.unlearned is None:
            served(result.error)
            return
        found.append(result.unlearned.head.parameters_CE.cpu())
        served()
    if frame == _NO_MORE:
        try:
            write_tensors(folder / _SHADOWS, {"parameters": torch.stack(found)})
            served()
        except Exception as wrong:
            served(described(wrong))


def _run_task(task: RowTask, channel: Channel, *, silent: bool = False) -> RowResult:
    """Build the method and run it. What it reaches for is refused in words before the kernel refuses it."""

    def tick(done: int, total: int) -> None:
        channel.send(json.dumps({"done": done, "total": total}).encode())

    try:
        assert task.request is not None
        with sealed(task.sealed):
            context = task.context if silent else replace(task.context, progress=tick)
            return run_method(task.name, _made(task), task.request, context, None, task.config.forget.parts)
    except BaseException as error:  # an exit or an interrupt of the method's own ends its row, too
        return RowResult(Usage(), None, described(error))


def _made(task: RowTask) -> UnlearningMethod:
    given = task.method
    return make_method(task.config, task.name, given) if isinstance(given, RowSpec) else given


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


class _Served(Record):
    served: Count
    error: str | None


_FRAMES: TypeAdapter[_Progress | _Logged | _Ended | _Served] = TypeAdapter(_Progress | _Logged | _Ended | _Served)


def _follow(channel: Channel, tick: Tick) -> _Ended | _Served | None:
    """Show progress and log records until a request is served or the row has ended; return the frame that says so.

    It is ``None`` if the process has ended without one.

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


def _send_log_records(channel: Channel) -> None:
    class Sender(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = f"{record.name}: {self.format(record)}"[:_LONGEST_TEXT]
            channel.send(json.dumps({"level": min(record.levelno, logging.CRITICAL), "message": message}).encode())

    logging.captureWarnings(True)
    logging.getLogger().addHandler(Sender())
