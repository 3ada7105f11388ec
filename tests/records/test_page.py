"""docs/records.md: its snippet makes the files that its commands need, and these do what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import sfu
from sfu.data.tables import read_rows
from sfu.records.record import Asked, DeletionRecord, Done, Estimated, FileDigests, Searched
from sfu.records.training import TrainingFile
from tests.records.cases import run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "records.md").read_text("utf-8")


def test_the_walk_through_can_be_walked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    snippet = re.search(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    assert snippet is not None
    exec(snippet[1], {})
    commands = re.findall(r"^    sfu-unlearn (.*)$", PAGE, re.M)
    assert len(commands) == 6
    shown: list[str] = []
    for command in commands:
        last = re.findall(r"[0-9a-f]{64}", shown[-1]) if "HASH" in command else [""]
        assert run(*shlex.split(command.replace("HASH", last[-1]))) == 0, command
        shown.append(capsys.readouterr().out)
    dry, applied, later, again, verified, expected = shown
    assert "would be applied" in dry
    assert "Wrote forgotten with record 1." in applied
    assert "Wrote forgotten with record 2." in later
    assert "There is nothing left to do." in " ".join(again.split())
    assert verified.startswith("record 1")
    assert "Verified." in verified
    assert "Verified." in expected
    head = sfu.load_head("forgotten/head")
    assert (head.n_train, head.forgotten.rows) == (1750, 250)
    named = {path.name.replace("2", "1") for path in Path("forgotten").iterdir()}
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
    for kind in (TrainingFile, DeletionRecord, FileDigests, Asked, Done, Estimated, Searched):
        for name, about in kind.model_fields.items():
            assert f"`{about.alias or name}`" in PAGE, name
