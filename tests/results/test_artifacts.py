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


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2}'])
def test_foreign_metrics_are_refused(tmp_path, text):
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"metrics\.json"):
        read_metrics(tmp_path / "metrics.json")
