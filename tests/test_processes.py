"""Processes end on signals, die with their parent, and are told from others that get their number."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from sfu.processes import Stopped, _birth_by_ps, birth_of, exit_code_of, is_gone, signals_as_exceptions

UNTIL_STOPPED = """
import sys, time
from sfu.processes import exit_code_of, signals_as_exceptions
try:
    with signals_as_exceptions():
        print("ready", flush=True)
        time.sleep(60)
except KeyboardInterrupt as stop:
    print("tidied up", flush=True)
    sys.exit(exit_code_of(stop))
"""
PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import os
from sfu.processes import die_with_parent
die_with_parent(int(os.environ["PARENT"]))
print(os.getpid(), flush=True)
while True: pass
'''], env={**os.environ, "PARENT": str(os.getpid())})
time.sleep(60)
"""
STOPS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


def start(code: str, **options: Any) -> subprocess.Popen[str]:
    """Start a program that heeds signals, also where the suite ignores them because it runs in the background."""
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, preexec_fn=heed_signals, **options
    )


def heed_signals() -> None:
    for signum, _ in STOPS:
        signal.signal(signum, signal.SIG_DFL)


def wait_until(true: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not after {seconds} s"
        time.sleep(0.02)


@pytest.mark.parametrize(("signum", "code"), STOPS)
def test_a_signal_becomes_an_exception_and_its_exit_code(signum, code):
    process = start(UNTIL_STOPPED)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signum)
    assert process.communicate(timeout=20)[0] == "tidied up\n"
    assert process.returncode == code


def test_a_second_sigterm_does_not_disturb_the_tidying_up():
    seen = []

    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            seen.append("tidied up")

    with signals_as_exceptions(), pytest.raises(Stopped):
        work()
    assert seen
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_handlers_of_others_and_ignored_signals_stay():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with signals_as_exceptions():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_exit_codes():
    assert [exit_code_of(error) for error in (None, SystemExit(), SystemExit(3), ValueError())] == [0, 0, 3, 1]
    assert exit_code_of(KeyboardInterrupt()) == 130
    assert exit_code_of(pickle.loads(pickle.dumps(Stopped(signal.SIGTERM)))) == 143


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_dies_with_its_parent(signum):
    parent = start(PARENT)
    child = int(parent.stdout.readline())
    born = birth_of(child)
    parent.send_signal(signum)
    parent.wait()
    wait_until(lambda: is_gone(child, born), 5)


def test_a_child_dies_with_its_parent_where_the_kernel_does_not_watch():
    code = PARENT.replace("die_with_parent(int", "sfu.processes._ask_kernel = lambda: False\ndie_with_parent(int")
    parent = start(code.replace("import os\nfrom", "import os, sfu.processes\nfrom"))
    child = int(parent.stdout.readline())
    born = birth_of(child)
    parent.kill()
    parent.wait()
    wait_until(lambda: is_gone(child, born), 5)


def test_a_child_whose_parent_has_died_before_ends():
    code = "from sfu.processes import die_with_parent\ndie_with_parent(1 << 22)\nprint('lives')"
    process = start(code)
    assert process.communicate(timeout=20)[0] == ""
    assert process.returncode == 137


def test_a_process_that_took_over_the_number_of_another_is_not_that_one():
    here = os.getpid()
    assert not is_gone(here, birth_of(here))
    assert not is_gone(here, None)
    boot, namespace, ticks = birth_of(here).split()
    assert is_gone(here, f"{boot} {namespace} {int(ticks) - 1}")
    assert is_gone(here, f"another-boot {namespace} {ticks}")
    assert not is_gone(1 << 22, f"{boot} pid:[1] {ticks}")  # another container's
    assert is_gone(1 << 22, None)


def test_a_killed_process_that_nobody_has_taken_notice_of_is_gone():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    born = birth_of(process.pid)
    process.kill()
    wait_until(lambda: is_gone(process.pid, born), 5)
    assert process.wait() == -signal.SIGKILL


def test_births_by_ps():
    assert _birth_by_ps(os.getpid()) == _birth_by_ps(os.getpid())
    assert _birth_by_ps(1 << 22) is None
