"""A small server process that forks a child for each task, so that a child inherits nothing of the caller.

A process that has used PyTorch's threads cannot fork one that uses them again, and its memory may hold training rows.
The server is a fresh Python that has imported what tasks need and done nothing else.

The caller and a child talk through a pair of sockets, in frames of a length and as many bytes. What the caller sends
may be pickled. What a child sends is never unpickled: a child may run anybody's code.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sfu.processes import die_with_parent

_LENGTH = struct.Struct("!Q")
_STATUS = struct.Struct("!i")
_PATIENCE = 5.0  # seconds
_SERVER_GONE = "the process that starts rows has ended"
LONGEST_REPLY = 1 << 24
"""Longest frame, in bytes, that a child may send."""


class ChildDied(Exception):
    """A child ended without an answer."""


class Channel:
    """One end of a pair of sockets, for frames of bytes."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._sending = end, threading.Lock()

    def send(self, frame: bytes) -> None:
        """Send a frame, from any thread; raise :class:`OSError` if the other end is closed."""
        with self._sending:
            self._end.sendall(_LENGTH.pack(len(frame)))
            if frame:  # the other end may be gone once it has all of an empty one
                self._end.sendall(frame)

    def receive(self, longest: int | None = None) -> bytes | None:
        """Return the next frame, or ``None`` if the other end is closed.

        Raises:
            ValueError: The frame is longer than ``longest`` bytes.
        """
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if longest is not None and length > longest:
            raise ValueError(f"a frame of {length:,} bytes, where {longest:,} is the limit")
        return self._read(length)

    def _read(self, count: int) -> bytes | None:
        found = bytearray(count)
        view, done = memoryview(found), 0
        while done < count:
            n_read = self._end.recv_into(view[done:])
            if not n_read:
                return None
            done += n_read
        return bytes(found)


class Server:
    """Starts the server process at once, and has it fork a child for each :meth:`task`.

    One thread at a time has tasks, as many as it likes.
    """

    def __init__(self, module: str) -> None:
        """Start ``serve_children`` of a module, which imports what children need and calls :func:`serve`."""
        ours, theirs = socket.socketpair()
        # by the kernel's signal the server also ends while it still imports; it is tied to the thread that started it
        lasts = threading.current_thread() is threading.main_thread()
        tied = f"from sfu.processes import die_with_parent; die_with_parent({os.getpid()}); " if lasts else ""
        serving = f"import {module} as m; m.serve_children({theirs.fileno()})"
        code = f"import gc, sys; gc.disable(); sys.path[:] = {sys.path!r}; {tied}{serving}"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        self._control, self._busy, self._used = ours, threading.RLock(), False

    @property
    def alive(self) -> bool:
        """Whether the server can be asked for children."""
        return self._process.poll() is None

    @contextmanager
    def task(self) -> Iterator[Channel]:
        """Fork a child, and yield the channel to it.

        A child that is left before its end is killed, with the server and all other children.

        Raises:
            ChildDied: The child did not end by itself with status 0, or the server is gone; the message says why.
        """
        with self._busy:
            try:
                self._used, broken = True, False
                (ours, theirs), (told, telling) = socket.socketpair(), socket.socketpair()
                with told:
                    with ours:
                        with theirs, telling:
                            socket.send_fds(self._control, [b"fork"], [theirs.fileno(), telling.fileno()])
                        try:
                            yield Channel(ours)
                        except ConnectionError:
                            broken = True
                    status = told.recv(_STATUS.size)
            except BaseException as error:
                self.stop()
                if isinstance(error, ConnectionError):
                    raise ChildDied(_SERVER_GONE) from error
                raise
            if len(status) < _STATUS.size:
                self.stop()
                raise ChildDied(_SERVER_GONE)
            (code,) = _STATUS.unpack(status)
            if code or broken:
                raise ChildDied(_how_it_ended(code))

    def stop(self) -> None:
        """End the server and the children it has. The server also ends by itself when this process does."""
        self._control.close()
        if self._used:  # it kills its children and ends
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE)
        self._process.kill()
        self._process.wait()


_servers: dict[str, Server] = {}
_starting = threading.Lock()


def server_of(module: str) -> Server:
    """Return this process's server for a module, and start it if there is none.

    It takes two seconds to be ready for :meth:`Server.task`, so ask for it early.
    """
    with _starting:
        server = _servers.get(module)
        if server is None or not server.alive:
            server = _servers[module] = Server(module)
            atexit.register(server.stop)
        return server


def serve(control: int, child: Callable[[Channel], None]) -> None:
    """Fork children on request until the caller closes its end or dies; then kill those that are left. Never returns.

    With each request come the child's end of its channel, and a socket that is told how the child ended.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group, and it is the caller that decides
        signal.signal(number, signal.SIG_IGN)
    server = os.getpid()
    gc.freeze()  # a collection in a child need not copy the pages of what is imported
    gc.enable()  # collections would only have slowed down the imports
    running: dict[int, tuple[int, int]] = {}  # process number and socket of each child, by a handle of its process
    poll = select.poll()
    with socket.socket(fileno=control) as connection:
        poll.register(connection, select.POLLIN | select.POLLHUP)
        while True:
            for handle in dict(poll.poll()):
                if handle in running:
                    poll.unregister(handle)
                    _report(handle, *running.pop(handle))
                    continue
                handles = _request(connection)
                if not handles:
                    for pid, _ in running.values():
                        os.kill(pid, signal.SIGKILL)
                    os._exit(0)
                end, telling = handles
                pid = os.fork()
                if pid == 0:
                    _run(child, end, server)
                os.close(end)
                process = os.pidfd_open(pid)
                running[process] = pid, telling
                poll.register(process, select.POLLIN)


def _request(connection: socket.socket) -> list[int]:
    """Return the handles that came with a request; none if the caller has gone."""
    try:
        return socket.recv_fds(connection, 16, 2)[1]
    except OSError:
        return []


def _report(process: int, pid: int, telling: int) -> None:
    """Say how a child ended, if anyone still wants to know."""
    os.close(process)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with socket.socket(fileno=telling) as told, contextlib.suppress(OSError):
        told.sendall(_STATUS.pack(code))


def _run(child: Callable[[Channel], None], handle: int, parent: int) -> None:
    """Be the child: keep the channel and the standard streams, and nothing else that was open."""
    code = 1
    try:
        die_with_parent(parent)
        os.setsid()
        os.dup2(handle, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        with socket.socket(fileno=3) as end:
            child(Channel(end))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"its process ended with status {code}"
    what = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = "; the machine may have run out of memory" if -code == signal.SIGKILL else ""
    return f"its process was killed ({what}{hint})"
