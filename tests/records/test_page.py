"""docs/records.md: its snippet makes the files that its commands need, and these do what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import sfu
from sfu.data.tables import read_rows
from sfu.records.record import Asked, DeletionRecord, Done, Estimated, FileDigests, Purged, Removed
from sfu.records.training import TrainingFile
from tests.records.cases import run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "records.md").read_text("utf-8")


def test_the_walk_through_can_be_walked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    snippet = re.search(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    assert snippet is not None
    exec(snippet[1], {})
    commands = re.findall(r"^    sfu-unlearn (.*)$", PAGE, re.M)
    commands = [command for command in commands if "FOLDER" not in command and "photos" not in command]
    assert len(commands) == 9
    shown: list[str] = []
    for command in commands:
        last = re.findall(r"[0-9a-f]{64}", shown[-1]) if "HASH" in command else [""]
        assert run(*shlex.split(command.replace("HASH", last[-1]))) == 0, command
        shown.append(capsys.readouterr().out)
    dry, applied, later, again, undone, together, purged, verified, expected = shown
    assert "would be applied" in dry
    assert "Wrote forgotten with record 1." in applied
    assert "Wrote forgotten with record 2." in later
    assert "There is nothing left to do." in " ".join(again.split())
    assert undone.startswith("The head and the model before record 2 are back in")
    assert "Wrote forgotten with record 4." in together
    assert "This is record 5." in purged
    assert re.findall(r"^record (\d) +\S+ +(.*)$", verified, re.M) == [
        ("1", "200 rows, applied"), ("2", "50 rows, applied with reservations"), ("3", "record 2 undone"),
        ("4", "70 rows, applied with reservations"), ("5", "purge of 270 rows"),
    ]  # fmt: skip
    assert "Verified." in verified
    assert "Verified." in expected
    head = sfu.load_head("forgotten/head")
    assert (head.n_train, head.forgotten.rows) == (1730, 270)
    named = {re.sub(r"-\d", "-1", path.name) for path in Path("forgotten").iterdir()}
    for name in named:
        assert f"`{name}`" in PAGE


def test_a_table_holds_the_same_rows_as_the_arrays(tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    snippet = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)[1]
    arrays = {"features": np.random.default_rng(0).standard_normal((5, 3)), "labels": np.arange(5)}
    np.savez("forget.npz", **arrays)
    exec(snippet, {"np": np})
    read = read_rows(Path("forget.parquet"), ("features", "labels", "weights"), "FORGET")
    assert {key: value.tolist() for key, value in read.items()} == {key: one.tolist() for key, one in arrays.items()}


def test_it_names_every_key():
    for kind in (TrainingFile, DeletionRecord, FileDigests, Asked, Done, Estimated, Purged, Removed):
        for name, about in kind.model_fields.items():
            assert f"`{about.alias or name}`" in PAGE, name
