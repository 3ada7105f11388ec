"""Close files and network to this process for good, with Landlock and seccomp (Linux).

Landlock only allows: everything that is not named is closed, by whatever call, link or library it is opened. It does
not hide that a file exists, or its size (``stat``). Both filters bind the calling thread and what it starts, so a
process is restricted while it has one thread.

Source: landlock(7) and seccomp(2) of the Linux manual; ``linux/landlock.h``, ``linux/filter.h``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import stat
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

NOTHING = "none"

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls, the same on every architecture
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All rights over files, by the version of Landlock that first knows them."""
_TCP = 3  # bind and connect, since version 4
_SCOPES = 3  # abstract sockets and signals of processes outside, since version 6

_SPECIAL = sum(1 << bit for bit in (6, 9, 10, 11, 12))  # devices, sockets, pipes and symbolic links are never made

_NO_NEW_PRIVILEGES, _GET_SECCOMP, _SET_SECCOMP, _FILTER, _SET_DEATH_SIGNAL = 38, 21, 22, 2, 1  # of prctl
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # of the filter's machine
_ALLOW, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x00050000 | errno.EACCES, 0x00050000 | errno.ENOSYS
_CALLS = (
    "socket", "socketpair", "clone", "fork", "vfork", "prctl", "ioctl", "kill", "tgkill", "tkill", "prlimit64",
    "setpriority", "unshare", "setns", "shmget", "shmat", "msgget", "semget", "add_key", "request_key", "keyctl",
)  # fmt: skip
_ARCHITECTURES = {
    "x86_64": (
        0xC000003E,
        (41, 53, 56, 57, 58, 157, 16, 62, 234, 200, 302, 141, 272, 308, 29, 30, 68, 64, 248, 249, 250),
    ),
    "aarch64": (
        0xC00000B7,
        (198, 199, 220, 0, 0, 167, 29, 129, 131, 130, 261, 140, 97, 268, 194, 196, 186, 190, 217, 218, 219),
    ),
}
"""The audit number of each architecture, and its numbers of the calls above (0: it has none)."""
_PIDFD_SEND_SIGNAL, _IO_URING_SETUP, _CLONE3, _OTHER_ABI = 424, 425, 435, 0x40000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24  # places in what the filter sees
_THREAD = 0x10000  # of clone's flags
_TYPE_INTO_TERMINAL, _ASK_CONSOLE = 0x5412, 0x541C  # of ioctl
_CAPABILITIES_VERSION, _IGNORE_PERMISSIONS = 0x20080522, 1 << 1


@dataclass(frozen=True)
class Enforced:
    """What the kernel enforces on a process, whatever its code does.

    Attributes:
        files: Nothing can be opened, made, renamed or linked except what was allowed.
        network: No socket can be made, no further process, and no call that reaches another one.
    """

    files: bool = False
    network: bool = False


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("rights", ctypes.c_uint64), ("folder", ctypes.c_int32)]


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("value", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction))]


def available() -> Enforced:
    """Return what this machine's kernel can enforce."""
    return Enforced(files=landlock_version() > 0, network=_can_filter())


def protections(*, isolate: bool) -> str:
    """Return what protects data from a row here, with commas between: ``process``, ``files``, ``network``, or ``none``.

    Args:
        isolate: Whether rows are to run in processes of their own at all.
    """
    if not (isolate and sys.platform.startswith("linux")):
        return NOTHING
    return ", ".join(["process", *(name for name, closed in asdict(available()).items() if closed)])


@cache
def landlock_version() -> int:
    """Return the version of Landlock's interface; 0 if the kernel has none, or it is switched off."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, _libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG)))


def restrict(read: Iterable[Path], *, closed: Iterable[Path] = (), write: Iterable[Path] = ()) -> Enforced:
    """Close all files but those that are named, and the network, to this thread and all that it starts. Do it once.

    Files that are open already stay open. Paths that do not exist are passed over.

    Args:
        read: Files, and folders with all below them, that may be read and executed.
        closed: What is closed all the same, with all below it. The names in a folder around it can still be listed.
        write: Where files and folders may be made, changed and removed.

    Returns:
        What is enforced from now on.

    Raises:
        OSError: The kernel has the filter and refuses it.
    """
    can = available()
    if can.files or can.network:
        _check(_libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        _drop_capabilities()
    if can.files:
        _close_files(read, closed, write)
    if can.network:
        _close_network()
    return can


def split_around(roots: Iterable[Path], closed: Iterable[Path]) -> tuple[list[str], list[str]]:
    """Return paths that together cover what is below ``roots`` and not ``closed``, and the folders that were split."""
    shut = {os.path.realpath(path) for path in closed}
    around = {str(parent) for path in shut for parent in Path(path).parents}
    whole: list[str] = []
    split: list[str] = []
    for root in map(os.path.realpath, roots):
        todo = [] if shut.intersection(map(str, Path(root).parents)) else [root]
        while todo:
            path = todo.pop()
            if path in around and os.path.isdir(path):
                split.append(path)
                todo += [entry.path for entry in os.scandir(path) if not entry.is_symlink()]
            elif path not in shut:
                whole.append(path)
    return whole, split


def _close_files(read: Iterable[Path], closed: Iterable[Path], write: Iterable[Path]) -> None:
    whole, split = split_around(read, closed)
    version = landlock_version()
    rights = next(_RIGHTS[known] for known in sorted(_RIGHTS, reverse=True) if known <= version)
    attributes = _Ruleset(rights, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = _check(_libc().syscall(_CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(size), 0))
    try:
        for paths, wanted in (
            (whole, _EXECUTE | _READ_FILE | _READ_DIR),
            (split, _READ_DIR),
            (write, rights & ~_SPECIAL),
        ):
            for path in paths:
                _allow(rules, path, wanted & rights)
        _check(_libc().syscall(_RESTRICT_SELF, rules, 0))
    finally:
        os.close(rules)


def _allow(rules: int, path: str | Path, rights: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            rights &= _OF_FILES
        _check(_libc().syscall(_ADD_RULE, rules, _PATH_BENEATH, ctypes.byref(_Beneath(rights, handle)), 0))
    finally:
        os.close(handle)


def _can_filter() -> bool:
    known = sys.platform.startswith("linux") and platform.machine() in _ARCHITECTURES
    return known and _libc().prctl(_GET_SECCOMP, 0, 0, 0, 0) >= 0


def _close_network() -> None:
    """Refuse new sockets and processes, and calls that reach other processes; threads can be started.

    ``clone3`` hides its flags from a filter. It is made unknown, so that the C library falls back to ``clone``.
    """
    architecture, numbers = _ARCHITECTURES[platform.machine()]
    calls, own = dict(zip(_CALLS, numbers, strict=True)), os.getpid()
    examined: dict[str, tuple[int, list[tuple[int, int, str, str]]]] = {
        "clone": (_FIRST_ARGUMENT, [(_ANY_BIT, _THREAD, "allow", "refuse")]),
        "prctl": (_FIRST_ARGUMENT, [(_EQUAL, _SET_DEATH_SIGNAL, "refuse", "allow")]),
        "kill": (_FIRST_ARGUMENT, [(_EQUAL, own, "allow", "refuse")]),
        "tgkill": (_FIRST_ARGUMENT, [(_EQUAL, own, "allow", "refuse")]),
        "prlimit64": (_FIRST_ARGUMENT, [(_EQUAL, 0, "allow", ""), (_EQUAL, own, "allow", "refuse")]),
        "ioctl": (_SECOND_ARGUMENT, [
            (_EQUAL, _TYPE_INTO_TERMINAL, "refuse", ""), (_EQUAL, _ASK_CONSOLE, "refuse", "allow"),
        ]),
    }  # fmt: skip
    refused = [number for name, number in calls.items() if number and name not in examined]
    lines: list[tuple[int, int, str | int, str | int]] = [
        (_LOAD, _ARCHITECTURE, 0, 0),
        (_EQUAL, architecture, 0, "refuse"),
        (_LOAD, _NUMBER, 0, 0),
        (_AT_LEAST, _OTHER_ABI, "refuse", 0),
        *((_EQUAL, number, "refuse", 0) for number in (*refused, _PIDFD_SEND_SIGNAL, _IO_URING_SETUP)),
        (_EQUAL, _CLONE3, "unknown", 0),
    ]
    for name, (place, tests) in examined.items():
        lines += [(_EQUAL, calls[name], 0, 1 + len(tests)), (_LOAD, place, 0, 0)]
        lines += [(kind, value, yes or 0, no or 0) for kind, value, yes, no in tests]
    ends = {"allow": _ALLOW, "refuse": _REFUSE, "unknown": _UNKNOWN}
    places = {end: len(lines) + index for index, end in enumerate(ends)}
    code = [
        _Instruction(kind, *(places[to] - index - 1 if isinstance(to, str) else to for to in (yes, no)), value)
        for index, (kind, value, yes, no) in enumerate(lines)
    ] + [_Instruction(_RETURN, 0, 0, end) for end in ends.values()]
    program = _Program(len(code), (_Instruction * len(code))(*code))
    _check(_libc().prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0))


def _drop_capabilities() -> None:
    """Give up what root may do beyond its files, for good; it may go on reading packages of other users."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()
    _check(_libc().capget(header, sets))
    keep = sets[0] & _IGNORE_PERMISSIONS
    _check(_libc().capset(header, (ctypes.c_uint32 * 6)(keep, keep)))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the kernel refuses the sandbox: {os.strerror(number)}")
    return result
