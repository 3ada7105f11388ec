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
