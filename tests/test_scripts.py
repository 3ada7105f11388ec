"""The scripts that documents name can be imported, and say what they do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reporting.scripts import load_script

SCRIPTS = sorted(path.stem for path in (Path(__file__).resolve().parents[1] / "scripts").glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_can_be_imported_and_is_described(name):
    script = load_script(name)
    assert callable(script.main)
    assert script.__doc__


def test_the_cost_of_a_step_is_held_against_a_limit(monkeypatch, capsys):
    script = load_script("bench_cost")
    more = script.Case("softmax", 3, 8, 400, 40, views=2, unlabelled=50)
    monkeypatch.setattr(script, "QUICK", [script.Case("quadratic", 2, 40, 400, 20), more])
    assert script.main(["--quick", "--limit", "1e9"]) == 0
    printed = capsys.readouterr().out
    assert "in 22 features" in printed
    assert "2 views, 50 unlabelled" in printed
    assert "SLOWER" not in printed
    assert script.main(["--quick", "--limit", "0", "--least", "0", "--only", "1"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("SLOWER") == 1
    assert "1 of the steps took longer" in printed
