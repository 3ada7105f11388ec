"""How processes of sfu end: on a signal, together with their parent, and how others know that they have ended.

Wrap what a command does in :func:`signals_as_exceptions`, and exit with :func:`exit_code_of` what it raises::

    try:
        with signals_as_exceptions():
            work()
    except KeyboardInterrupt as stop:  # Ctrl-C, or a Stopped
        sys.exit(exit_code_of(stop))

Call :func:`die_with_parent` first thing in a child, while it has a single thread. Write :func:`birth_of` this process
beside its number wherever a process is recorded, so that :func:`is_gone` can tell it from a later one with that number.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

POLL_SECONDS = 0.5
"""How often a child looks for its parent where the kernel does not watch it."""
_PR_SET_PDEATHSIG = 1
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
_STOPPING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP. Whatever tidies up after Ctrl-C tidies up after them, too.

    Attributes:
        signum: The number of the signal.
    """

    def __init__(self, signum: int = signal.SIGTERM) -> None:
        super().__init__(int(signum))
        self.signum = int(signum)


def exit_code_of(error: BaseException | None) -> int:
    """Return the exit code of a process that ended with ``error``.

    It is 0 for none, 128 and the signal's number for a signal (130 for Ctrl-C), a SystemExit's own, and else 1.
    """
    if error is None or (isinstance(error, SystemExit) and error.code is None):
        return 0
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return 128 + (error.signum if isinstance(error, Stopped) else signal.SIGINT)
    return 1


@contextmanager
def signals_as_exceptions(first: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Raise :class:`Stopped` on SIGTERM and SIGHUP in this block, and :class:`KeyboardInterrupt` on SIGINT.

    A signal that is ignored (``nohup``) or has another handler already keeps it. Once one has come, further SIGTERM and
    SIGHUP are ignored until the block ends, so that they do not disturb the tidying up. A second Ctrl-C does. Outside
    the main thread, which alone receives signals, the block changes nothing.

    Args:
        first: Called before the exception is raised.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        for number in before:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_IGN)
        first()
        raise KeyboardInterrupt if signum == signal.SIGINT else Stopped(signum)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *_STOPPING)}
    before = {number: it for number, it in before.items() if it in (signal.SIG_DFL, signal.default_int_handler)}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with_parent(parent: int | None = None) -> None:
    """Make this child process die at once when its parent does, even by SIGKILL, and leave Ctrl-C to the parent.

    Call it in the main thread. SIGTERM ends the child again, whatever handler it has inherited. On Linux the kernel
    sends SIGKILL when the parent's *thread* that started the child ends, so start children from a thread that lasts,
    such as the main one. Elsewhere a thread of the child looks for the parent every :data:`POLL_SECONDS`.

    Args:
        parent: The parent's process number, where the caller knows it; the child ends at once if that has died
            already. By default, the present parent's.
    """
    parent = os.getppid() if parent is None else parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal
    for number in _STOPPING:
        signal.signal(number, signal.SIG_DFL)
    if not _ask_kernel():
        threading.Thread(target=_watch, args=(parent,), daemon=True, name="parent watch").start()
    if os.getppid() != parent:
        os._exit(exit_code_of(Stopped(_KILL)))


def birth_of(pid: int) -> str | None:
    """Return a text that tells a running process from earlier and later ones of its number; ``None`` if none is known.

    On Linux it counts from the machine's start, so setting the clock does not change it.
    """
    stat = _proc_stat(pid)
    if stat is not None:
        return f"{_boot_id()} {_namespace()} {stat[19]}"
    return None if sys.platform == "linux" else _birth_by_ps(pid)


def is_gone(pid: int, birth: str | None) -> bool:
    """Return whether a process of this machine is known to have ended; never on Windows, where asking would end it.

    Args:
        pid: Its number.
        birth: What :func:`birth_of` returned for it; ``None`` if that was not recorded.
    """
    boot, namespace = [*(birth or "").split(), "", ""][:2]
    if birth is not None and sys.platform == "linux" and boot == _boot_id() and namespace != _namespace():
        return False  # it is of another container, whose processes cannot be seen from here
    if sys.platform == "win32":
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        pass  # another user's
    stat = _proc_stat(pid)
    if stat is not None and stat[0] in "ZX":
        return True  # killed, and its parent has not taken notice
    now = birth_of(pid)
    return None not in (birth, now) and now != birth


def _ask_kernel() -> bool:
    if sys.platform != "linux":
        return False
    import ctypes

    with suppress(OSError, AttributeError):
        return ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _KILL, 0, 0, 0) == 0
    return False


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), _KILL)


def _proc_stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; ``None`` without /proc or process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name before it may hold anything
    except OSError:
        return None


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "?"


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "?"


def _birth_by_ps(pid: int) -> str | None:
    import subprocess

    try:
        done = subprocess.run(
            ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, timeout=5,
            env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
