"""Values that Hydra's grammar does not take: the message proposes what bash and Hydra read as meant."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from sfu.experiment.quoting import unreadable
from tests.data.image_samples import write_classes
from tests.experiment.cases import sfu

PATHS = (
    "/tmp/a=b", "/tmp/a#b (1)", "/tmp/O'Brien", "/tmp/Zo\u00eb/\u00e4 b", "/tmp/[x]", "/tmp/{x}", "~/x", "/tmp/100%!&",
    '/tmp/a "b"', "C:\\\u00dcser\\", "/tmp/a,b", "/tmp/`id`=$HOME",
)  # fmt: skip
CLASSES = {
    "[S\u00e3o Paulo,Rio]": ["S\u00e3o Paulo", "Rio"],
    "S\u00e3o Paulo": ["S\u00e3o Paulo"],
    "[a=b, 3,ok]": ["a=b", 3, "ok"],
    "[Caf\u00e9 (x)": ["Caf\u00e9 (x)"],
    "ant,bee": ["ant", "bee"],
}


def through_bash(proposals: list[str]) -> list[str]:
    """The arguments that a command gets of proposals pasted into bash."""
    script = f"printf '%s\\0' {' '.join(proposals)}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def test_what_the_message_proposes_reaches_sfu_as_it_was_meant():
    given = [*(f"dataset.path={path}" for path in PATHS), *(f"forget.classes={value}" for value in CLASSES)]
    said = [unreadable([text]) for text in given]
    assert all(message.startswith(text) for message, text in zip(said, given, strict=True))
    settings = through_bash([message.rpartition("rite ")[2] for message in said])
    assert [unreadable([text]) for text in settings] == [None] * len(given)
    read = [OverridesParser.create().parse_override(text).value() for text in settings]
    assert read == [*PATHS, *CLASSES.values()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dataset.path=/My", "Photos", "(1)", "seed=1"], "put all of it in quotes: 'dataset.path=\"/My Photos (1)\"'"),
        (["seed=0,1"], "which only a sweep takes. For a sweep, add -m; otherwise, give one value."),
        (["forget.classes=[10"], "because the brackets of a list must match. Write 'forget.classes=[10]'"),
        (["dataset.path=/a=b"], "because '=' in a value must be quoted. Write 'dataset.path=\"/a=b\"'"),
        (["dataset.path=", "photos"], "put all of it in quotes: 'dataset.path=\"photos\"'"),  # Skype-line/X-Avatar#21
        (["seed=1\r"], r"with those of Linux (sed -i 's/\r$//' SCRIPT)."),  # facebookresearch/PointContrast#16
        (["seed=1", "\\", "device=cpu"], "cmd.exe takes ^ and PowerShell takes ` instead."),  # SysCV/sam-pt#12
        (["dataset.path=\u201c/my photos\u201d"], "Write 'dataset.path=\"/my photos\"'"),
        (["-m", "seed=0,1"], None),
        (["dataset=digits", "~variants", "methods=[original]", "--cfg", "job"], None),
    ],
)
def test_what_is_said_of_settings(arguments, message):
    said = unreadable(arguments)
    assert said is message or said.endswith(message)


def test_a_run_on_a_folder_with_an_odd_name(tmp_path, monkeypatch, capsys):
    folder = write_classes(tmp_path / "Zo\u00eb's photos (a=b, #1)", ("S\u00e3o Paulo", "x=1", "10"))
    start = ["dataset=image_folder", "backbone=pixels", "backbone.size=8", "logger=none", "methods=[original]"]
    odd = [f"dataset.path={folder}", "forget.classes=[S\u00e3o Paulo,x=1]"]
    for place in range(2):
        assert sfu(monkeypatch, *start, *odd, f"hydra.run.dir={tmp_path}/run") == 1
        message = capsys.readouterr().err
        assert message.startswith(f"sfu: {odd[place]} cannot be read, because")
        (odd[place],) = through_bash([message.rpartition("Write ")[2].strip()])
    assert sfu(monkeypatch, *start, *odd, "isolate=false", f"hydra.run.dir={tmp_path}/run") == 0
    forgotten = (tmp_path / "run" / "forget_files.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert {Path(path).parent.name for path in forgotten} == {"S\u00e3o Paulo", "x=1"}


@pytest.mark.parametrize(
    ("subdir", "seeds"), [(".", ("-m", "seed=0,1")), ("f_${forget.fraction}", ("-m", "seed=0,1")), (".", ("seeds=2",))]
)
def test_a_sweep_of_which_two_jobs_share_a_folder_is_refused_before_the_first(
    tmp_path, monkeypatch, capsys, subdir, seeds
):
    quick = (*seeds, "methods=[original]", "logger=none", f"hydra.sweep.dir={tmp_path}/sweep")
    assert sfu(monkeypatch, *quick, f"hydra.sweep.subdir={subdir}") == 1
    said = capsys.readouterr()
    assert f"hydra.sweep.subdir={subdir} is {tmp_path}/sweep" in said.err
    assert "for job 0 and for job 1, which would replace each other's results. Leave it out" in said.err
    assert not (tmp_path / "sweep").exists()
    (remedy,) = through_bash([said.err.rpartition(": ")[2].strip()])
    assert remedy == f"hydra.sweep.subdir={subdir}/${{hydra.job.num}}"
