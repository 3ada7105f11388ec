"""The first page and its notebook have the same code, which does what they say; the notebook holds no outputs."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
NOTEBOOK = json.loads((DOCS / "notebooks" / "ten_minutes.ipynb").read_text("utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
SOURCES = ["".join(cell["source"]) for cell in CODE]


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does: return the value of its last line, if that is an expression."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def test_the_ten_minutes_are_what_they_say(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    shown = [run_cell(source, names) for source in SOURCES]
    result, audit = names["result"], names["audit"]
    table = shown[SOURCES.index("result")]._repr_html_()
    assert f"{result.predicted_share:.0%} of the squared distance to Retrained" in table
    assert shown[SOURCES.index("result.predicted_distance, audit.distance")] == (
        result.predicted_distance,
        audit.distance,
    )
    low, high = result.predicted_share_interval
    assert low <= 1 - audit.distance**2 <= high
    told = capsys.readouterr().out
    assert told.startswith("verdict: applied\n")
    assert "188 rows in 2 requests" in told


def test_its_code_is_that_of_the_page():
    blocks = re.findall(r"```python\n(.*?)\n```", (DOCS / "index.md").read_text("utf-8"), re.S)
    assert [source for source in SOURCES if "\n" in source] == blocks


def test_outputs_are_not_kept():
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)
    assert NOTEBOOK["nbformat"] == 4
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
