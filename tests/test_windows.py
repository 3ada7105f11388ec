"""What Windows lacks is not needed: sfu runs with the modules, functions and signals of Unix taken away.

No Windows is at hand here, so other packages and the standard library are imported before.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

_LIKE_WINDOWS = """
import asyncio, contextlib, ctypes, importlib, multiprocessing, os, signal, socket, subprocess, sys, tempfile
from importlib.abc import MetaPathFinder

import filelock, hydra.main, joblib, matplotlib.figure, numpy, PIL.Image, rich.console, rich.live, rich.progress
import safetensors.torch, scipy.optimize, sklearn.datasets, sklearn.linear_model, sklearn.model_selection, torch
import hydra._internal.core_plugins.basic_launcher, matplotlib.backends.backend_agg, platformdirs, pydantic

HIDDEN = {"resource", "fcntl", "pwd", "grp", "termios", "tty", "pty", "syslog"}


class Hide(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Hide())
for name in HIDDEN & set(sys.modules):
    del sys.modules[name]
for module, names in {
    os: ("sysconf", "fork", "forkpty", "geteuid", "getuid", "getgid", "setsid", "getpgid", "killpg", "pidfd_open",
         "sched_getaffinity", "statvfs", "getloadavg", "mkfifo", "O_PATH", "O_CLOEXEC", "O_NONBLOCK", "O_NOFOLLOW"),
    signal: ("SIGKILL", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGPIPE", "SIGCHLD", "setitimer", "alarm"),
    socket: ("AF_UNIX", "send_fds", "recv_fds", "sendmsg"),
}.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def refuse_to_signal(pid, number):
    raise AssertionError("on Windows, os.kill ends a process whatever the signal")


os.kill = refuse_to_signal
sys.platform = "win32"
"""

_USE = """
import sfu

generator = torch.Generator().manual_seed(0)
features, labels = torch.randn(60, 6, generator=generator), torch.arange(60) % 3
head = sfu.LinearHead.from_module(torch.nn.Linear(6, 3), l2=0.1, n_train=600, loss="softmax")
print("applied:", sfu.unlearn(head, features, labels, curvature={"estimator": "closed_form"}).applied)


def call(main, *arguments):
    sys.argv = ["sfu", *arguments]
    try:
        main()
    except SystemExit as stop:
        print("exit:", stop.code)


from sfu.cli.run import main
call(main, "--help")
call(main, "methods=[original,retrained,closed_form]", "logger=none", "hydra.run.dir=out")

from sfu.cli.report import main
call(main, "out")
"""


@pytest.mark.slow
def test_sfu_runs_without_what_windows_lacks(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _LIKE_WINDOWS + _USE],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for shown in ("applied:", "Choices (group=choice):", "Isolation was not enforced for original, closed_form"):
        assert shown in done.stdout, done.stdout + done.stderr
    assert "exit:" not in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "out" / "metrics.json").is_file()
    assert (tmp_path / "report" / "report.html").is_file()
