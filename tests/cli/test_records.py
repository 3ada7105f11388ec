"""``sfu-unlearn`` with several files, ``--keep-old`` and ``undo``; and signatures of records."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import sfu
from sfu.records.chain import verify
from sfu.records.record import read_deletion_record
from tests.records.cases import everything, message_of, run, write_head, write_model, write_rows, write_training
from tests.unlearning.cases import rows, trained


@pytest.fixture
def served(tmp_path) -> Path:
    """The folder of a checkpoint's first request, for 40 rows."""
    model, training = write_model(tmp_path / "m.safetensors"), write_training(tmp_path / "t.json")
    first, new = write_rows(tmp_path / "a.npz"), tmp_path / "new"
    assert run(model, first, "--layer", "fc", "--training", training, "--out", str(new), "--apply") == 0
    return new


def test_several_files_are_one_request(tmp_path, capsys):
    head, features, labels = write_head(tmp_path), *rows()
    files = [write_rows(tmp_path / f"{start}.npz", start, start + 20) for start in (0, 20, 40)]
    assert run(head, *files, "--out", str(tmp_path / "new"), "--apply") == 0
    shown = capsys.readouterr().out.replace("\n           ", "")
    assert re.search(r"^forget .*0\.npz,.*20\.npz,.*40\.npz: ?60 rows", shown, re.M)
    wanted = sfu.unlearn(trained(), features[:60], labels[:60])
    made = sfu.load_head(tmp_path / "new" / "head")
    assert torch.equal(made.parameters_CE, wanted.head.parameters_CE)
    record = read_deletion_record(tmp_path / "new" / "record-1.json")
    assert (record.asked.files, record.asked.rows, record.done.rows) == (3, 60, 60)
    assert made.forgotten.requests == 1
    assert "came in 3 files, and were served as one request" in (tmp_path / "new" / "record-1.md").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": np.ones(20)}, r"one of FORGET=\S+a\.npz and \S+b\.npz has 'weights', and the other has not"),
        (
            {"features": np.ones((20, 3))},
            r"b\.npz has features \[20, 3\] of type float64, but \S+ has \[20, 12\]",
        ),
        ({"labels": np.array(["x"] * 20)}, r"b\.npz"),
        ({"labels": np.array(3)}, r"b\.npz: labels is a single number"),
        ({"labels": None}, r"b\.npz has no 'labels'"),
    ],
)
def test_files_that_do_not_fit_together_are_refused(tmp_path, capsys, changes, message):
    first, second = write_rows(tmp_path / "a.npz", 0, 20), write_rows(tmp_path / "b.npz", 20, 40, **changes)
    assert run(write_head(tmp_path), first, second) == 2
    assert re.search(message, message_of(capsys))


def test_undo_puts_back_every_byte_and_records_it(served, tmp_path, capsys):
    second, third = write_rows(tmp_path / "b.npz", 40, 80), write_rows(tmp_path / "c.npz", 80, 100)
    before = {name: content for name, content in everything(served).items() if "record" not in name}
    assert run(str(served), second, "--in-place", "--apply", "--keep-old") == 0
    kept = everything(served / "before")
    assert kept == before
    assert (served / "before" / "head.secret").stat().st_mode & 0o777 == 0o600
    assert read_deletion_record(served / "record-2.json").done.kept
    assert "kept in the folder `before`" in (served / "record-2.md").read_text()
    assert not verify([served]).problems
    capsys.readouterr()
    assert run("undo", str(served)) == 0
    assert "before record 2 are back" in capsys.readouterr().out
    assert {name: content for name, content in everything(served).items() if "record" not in name} == before
    record = read_deletion_record(served / "record-3.json")
    assert (record.event, record.undone, record.after) == (
        "undo",
        2,
        read_deletion_record(served / "record-1.json").after,
    )
    assert "The step of record 2 was taken back." in (served / "record-3.md").read_text()
    assert not verify([served]).problems
    # these rows can be forgotten again, and the head counts the requests that stand
    assert run(str(served), second, third, "--in-place", "--apply") == 0
    record = read_deletion_record(served / "record-4.json")
    assert (record.done.n_train, record.done.earlier_requests, record.done.kept) == ((360, 300), 0, False)
    assert not (served / "before").exists()


def test_only_the_last_request_can_be_undone_and_only_once(served, tmp_path, capsys):
    files = [write_rows(tmp_path / f"{start}.npz", start, start + 40) for start in (40, 80)]
    assert run("undo", str(served)) == 2
    assert "does not hold the head before its last request" in message_of(capsys)
    assert run(str(served), files[0], "--in-place", "--apply", "--keep-old") == 0
    assert run(str(served), files[1], "--in-place", "--apply") == 0
    assert run("undo", str(served)) == 2
    assert run(str(served), files[1], "--out", str(tmp_path / "x"), "--apply", "--keep-old") == 2
    assert "--keep-old is for --in-place" in message_of(capsys)
    assert run("undo", str(tmp_path)) == 2
    assert "is no folder that sfu-unlearn wrote" in message_of(capsys)


def test_an_old_head_that_was_altered_is_found_and_not_put_back(served, tmp_path, capsys):
    assert run(str(served), write_rows(tmp_path / "b.npz", 40, 80), "--in-place", "--apply", "--keep-old") == 0
    tensors = served / "before" / "head.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(bytes(content))
    assert verify([served]).problems == [f"{served / 'before'} is not the head before record 2, which was kept."]
    state = everything(served)
    assert run("undo", str(served)) == 2
    assert "is not as sfu-unlearn left it" in message_of(capsys)
    assert everything(served) == state
    shutil.rmtree(served / "before")
    assert len(verify([served]).problems) == 1
    shutil.copytree(served, served / "before")
    assert len(verify([served]).problems) == 1


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs OpenSSH")
def test_openssh_signs_records_as_the_page_says(served, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "records.md").read_text("utf-8")
    sign, check = re.findall(r"^    (ssh-keygen .*)$", page, re.M)
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    (tmp_path / "allowed_signers").write_text(f"you@example.org {key.with_suffix('.pub').read_text()}")
    sign = sign.replace("~/.ssh/id_ed25519", str(key)).replace("forgotten", str(served))
    check = check.replace("forgotten", str(served))
    subprocess.run(sign, shell=True, check=True, cwd=tmp_path, capture_output=True)
    good = subprocess.run(check, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert (good.returncode, good.stdout[:9]) == (0, 'Good "sfu')
    record = served / "record-1.json"
    record.write_text(record.read_text() + " ")
    assert subprocess.run(check, shell=True, cwd=tmp_path, capture_output=True).returncode != 0
