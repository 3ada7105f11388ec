"""Files of a run: whole or absent, cleared from a folder that is used again, refused if they are foreign."""

from __future__ import annotations

import json

import pytest

from sfu.errors import ArtifactError
from sfu.files import replacing, write_text
from sfu.results.artifacts import finite, read_metrics, remove_results, write_json


def test_a_folder_used_again_holds_nothing_stale(tmp_path):
    for name in ("metrics.json", "figure.png", "mine.txt"):
        (tmp_path / name).write_text("old")
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "gone.safetensors").write_text("old")
    remove_results(tmp_path)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["mine.txt"]


def test_json_files_are_whole_or_absent(tmp_path):
    write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(ValueError, match=r"Out of range|not JSON compliant"):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "a.json") as temporary:
        temporary.write_text(f"half {1 / 0}")
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["a.json"]
    with pytest.raises(ArtifactError, match=r"cannot be written .*\. Free some space or choose another folder\."):
        write_text(tmp_path / "a.json" / "b", "x")
    assert finite({"a": [float("inf"), 1.0], "b": (float("nan"),)}) == {"a": [None, 1.0], "b": [None]}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"distance": -5.0}, r"rows\.jit\.distance=-5\.0: Input should be greater than or equal to 0"),
        ({"test_accuracy": 900}, r"rows\.jit\.test_accuracy=900: Input should be less than or equal to 100"),
        ({"mia": -1}, r"rows\.jit\.mia=-1"),
        ({"forget_accuracy": "73"}, r"rows\.jit\.forget_accuracy='73'"),
        ({"applied": "false"}, r"rows\.jit\.applied='false'"),
        ({"applied": 0}, r"rows\.jit\.applied=0"),
        ({"seconds": True}, r"rows\.jit\.seconds=True"),
        ({"access": 3}, r"rows\.jit\.access=3"),
        ({"details": [1]}, r"rows\.jit\.details"),
        ("jit", r"rows\.jit='jit'"),
        ([], r"rows\.jit=\[\]"),
    ],
    ids=str,
)
def test_metrics_out_of_range_or_of_another_type_are_refused(tmp_path, row, why):
    (tmp_path / "metrics.json").write_text(json.dumps({"schema": 1, "run": {}, "rows": {"jit": row}}))
    with pytest.raises(ArtifactError, match=rf"metrics\.json cannot be read \({why}.*\)\. Run again, or"):
        read_metrics(tmp_path / "metrics.json")


@pytest.mark.parametrize(
    "run",
    [
        {"data": {"n_train": 1293.9}},
        {"data": {"n_train": True}},
        {"versions": ["x"]},
        {"seeds": 3},
        {"seconds": -1},
        "x",
    ],
    ids=str,
)
def test_what_is_said_of_the_run_is_checked_too(tmp_path, run):
    (tmp_path / "metrics.json").write_text(json.dumps({"schema": 1, "run": run, "rows": {}}))
    with pytest.raises(ArtifactError, match=r"metrics\.json cannot be read \(run"):
        read_metrics(tmp_path / "metrics.json")


def test_metrics_of_plug_ins_are_kept(tmp_path):
    row = {
        "mine": 3,
        "details": {"deep": {"er": [1]}},
        "forget_accuracy": None,
        "test_accuracy": 100.0,
        "test_gap": -3.5,
    }
    metrics = {"schema": 1, "run": {"name": "a", "more": [1]}, "rows": {"jit": row}}
    write_json(tmp_path / "metrics.json", metrics)
    assert read_metrics(tmp_path / "metrics.json") == metrics


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2}'])
def test_foreign_metrics_are_refused(tmp_path, text):
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"metrics\.json"):
        read_metrics(tmp_path / "metrics.json")
