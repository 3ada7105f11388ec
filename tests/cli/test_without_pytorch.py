"""What composes and checks a configuration imports no PyTorch, in this process or in one that it starts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

COMMANDS = [
    (["--cfg", "job"], "methods:"),
    (["--info", "defaults"], "sfu_schema"),
    (["--hydra-help"], "Hydra"),
    (["--shell-completion", "query=bash"], "dataset=digits"),
    (["--dry-run"], "would run training, original,"),
    (["-m", "seed=0,1", "--dry-run"], "2 jobs: 0 cached"),
    (["method=scrub"], "methods=[original,retrained,scrub]"),
    (["forget.fracton=0.1"], "Did you mean forget.fraction?"),
    (["head.l2=abc"], "head.l2=abc is not a number."),
    (["forget.fraction=2"], "forget.fraction=2.0. Give a finite number"),
    (["methods=[original,scrubb]"], "Did you mean scrub?"),
    (["methods=[a]", "+variants.a={base:scrub,settings:{lr:-1}}"], "lr=-1.0. Give a finite number above 0."),
    (["device=gpu"], "device=gpu is unknown."),
]
_RUN_ALL = """
import contextlib, io, json, os, sys
from hydra.core.global_hydra import GlobalHydra
from sfu.cli.run import main
found = []
for arguments in json.loads(sys.stdin.read()):
    os.environ.pop("HYDRA_FULL_ERROR", None)
    GlobalHydra.instance().clear()
    sys.argv, shown = ["sfu", *arguments], io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown), contextlib.suppress(SystemExit):
        main()
    found.append([shown.getvalue(), "torch" in sys.modules])
print(json.dumps(found))
"""


def test_commands_that_run_nothing_import_no_pytorch(tmp_path):
    """Neither does a process that they start: all processes list their imports on standard error."""
    environment = {
        **os.environ, "PYTHONPROFILEIMPORTTIME": "1", "SFU_CACHE": str(tmp_path), "COMP_LINE": "sfu dataset=",
        "COMP_POINT": "12",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", _RUN_ALL], input=json.dumps([arguments for arguments, _ in COMMANDS]),
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for (arguments, expected), (shown, imported) in zip(COMMANDS, json.loads(done.stdout), strict=True):
        assert expected in shown, arguments
        assert not imported, arguments
    assert re.search(r"^import time:.*\| +sfu.cli.run$", done.stderr, re.M) is not None
    assert re.search(r"^import time:.*\| +torch$", done.stderr, re.M) is None


def test_a_dry_run_says_what_would_be_downloaded_and_downloads_nothing(tmp_path, monkeypatch, capsys):
    import socket

    from tests.experiment.cases import sfu

    def refuse(*address: object) -> None:
        raise AssertionError("a dry run opens no connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("SFU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    assert sfu(monkeypatch, "dataset=cifar10,stanford_dogs", "-m", "--dry-run") == 0
    shown = capsys.readouterr().out
    for line in (
        "would download https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz (162.6 MiB)",
        "would download http://vision.stanford.edu/aditya86/ImageNetDogs/images.tar (756.8 MiB)",
        "would download https://download.pytorch.org/models/resnet18-f37072fd.pth (44.7 MiB)",
        "2 jobs: 0 cached, 2 to run; 0 of 12 rows are cached. Nothing was run or downloaded.",
    ):
        assert shown.count(line) == 1, shown
    assert not Path(tmp_path / "torch").exists()
    assert not list(tmp_path.rglob("*.tar*"))
