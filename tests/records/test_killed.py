"""A process that is killed while it writes leaves the old folder or the complete new one, and the next call goes on."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest

import sfu
from sfu.errors import ArtifactError
from sfu.files import folder_lock, write_folder
from sfu.records.chain import verify
from tests.records.cases import everything, run, write_head, write_model, write_rows, write_training

WRITING = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree", "shutil.copyfile")


def in_child(arguments: list[str], folder: Path, last: int) -> tuple[int, int]:
    """Run the command in a process that kills itself before its ``last`` event on files, and return how it ended.

    Events count once the process makes the hidden folder beside ``folder``; their number is returned, too.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        seen = 0

        def count(event: str, given: tuple[object, ...]) -> None:
            nonlocal seen
            if (seen and event in WRITING) or (event == "os.mkdir" and given[0] == f"{folder.parent}/.new.unfinished"):
                seen += 1
                if seen == last:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.addaudithook(count)
            code = run(*arguments)
            os.write(theirs, str(seen).encode())
        except BaseException:
            code = 70
        os._exit(code)
    os.close(theirs)
    _, status = os.waitpid(child, 0)
    with os.fdopen(ours) as pipe:
        return status, int(pipe.read() or 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("in_place", [False, True])
def test_a_killed_process_leaves_the_old_state_or_the_complete_new_one(tmp_path, in_place):
    model, training = write_model(tmp_path / "m.pt"), write_training(tmp_path / "t.json")
    first, second = write_rows(tmp_path / "a.npz"), write_rows(tmp_path / "b.npz", 40, 80)
    origin = tmp_path / "origin"
    given = [model, first, "--layer", "fc", "--training", training, "--apply", "--out"]
    assert run(*given, str(origin)) == 0

    def arguments(folder: Path) -> list[str]:
        return [str(folder), second, "--in-place", "--apply", "--keep-old"] if in_place else [*given, str(folder)]

    def fresh(name: str) -> tuple[Path, dict[str, bytes]]:
        place = tmp_path / name
        place.mkdir()
        if in_place:
            shutil.copytree(origin, place / "new")
        return place / "new", everything(place)

    target, _ = fresh("whole")
    status, events = in_child(arguments(target), target, 0)
    assert (status, events > 20) == (0, True)
    last = range(events - 11, events + 1)  # where the new folder takes its place
    moments = [*random.Random(0).sample(range(1, last[0]), 8), *last]
    ended = set()
    for moment in moments:
        target, before = fresh(f"killed-{moment}")
        status, _ = in_child(arguments(target), target, moment)
        assert os.WIFSIGNALED(status), moment
        new = {name: body for name, body in everything(target.parent).items() if not name.startswith(".")}
        ended.add(new == before)
        if new != before:
            found = verify([target])
            assert (found.problems, found.remarks) == ([], []), moment
            assert sfu.load_head(target / "head").n_train == (320 if in_place else 360)
        assert run(*arguments(target)) == 0
        assert verify([target]).problems == []
        assert sfu.load_head(target / "head").n_train == (320 if in_place else 360)
        assert [path.name for path in target.parent.iterdir() if path.suffix == ".unfinished"] == []
    assert ended == {True, False}


def test_a_folder_that_fails_leaves_nothing(tmp_path):
    def fail(folder: Path) -> None:
        (folder / "a").write_text("a")
        raise OSError("full")

    with pytest.raises(ArtifactError, match=r"new cannot be written \(full\)\. Free some space"):
        write_folder(tmp_path / "new", fail)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_replaced_only_if_asked(tmp_path):
    folder = tmp_path / "new"
    write_folder(folder, lambda made: (made / "a").write_text("1"))
    with pytest.raises(ArtifactError, match="exists, and it is not to be replaced"):
        write_folder(folder, lambda made: (made / "a").write_text("2"))
    assert (folder / "a").read_text() == "1"
    write_folder(folder, lambda made: (made / "b").write_text("2"), replace=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "b"]


def test_a_system_that_cannot_swap_folders_says_so(tmp_path, monkeypatch):
    folder = tmp_path / "new"
    write_folder(folder, lambda made: (made / "a").write_text("1"))
    monkeypatch.setattr("ctypes.CDLL", lambda *arguments, **options: object())
    with pytest.raises(ArtifactError, match=r"cannot be replaced in one step, .* Write to a new folder instead\."):
        write_folder(folder, lambda made: (made / "a").write_text("2"), replace=True)
    assert {path.name for path in tmp_path.rglob("*")} == {"new", "a"}
    assert (folder / "a").read_text() == "1"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_every_file_reaches_the_disk_before_the_folder_appears(tmp_path, monkeypatch):
    flushed: list[tuple[Path, bool]] = []

    def note(opened: int) -> None:
        place = Path(os.readlink(f"/proc/self/fd/{opened}"))
        flushed.append((place.relative_to(tmp_path), (tmp_path / "new").exists()))

    def write(made: Path) -> None:
        (made / "sub").mkdir()
        for name in ("a", "sub/b"):
            (made / name).write_text(name)

    monkeypatch.setattr(os, "fsync", note)
    write_folder(tmp_path / "new", write)
    hidden = Path(".new.unfinished")
    before = {place for place, there in flushed if not there}
    assert before == {hidden / "a", hidden / "sub" / "b", hidden / "sub", hidden}
    assert [place for place, there in flushed if there] == [Path()]


def test_two_calls_for_one_folder_wait_for_each_other(tmp_path):
    head, gone, new = write_head(tmp_path), write_rows(tmp_path / "gone.npz"), tmp_path / "new"
    codes: list[int] = []
    other = threading.Thread(target=lambda: codes.append(run(head, gone, "--out", str(new), "--apply")))
    with folder_lock(new):
        other.start()
        other.join(0.5)
        assert other.is_alive()
        assert not new.exists()
    other.join(60)
    assert codes == [0]
    assert new.exists()
