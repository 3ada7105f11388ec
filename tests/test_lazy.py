from __future__ import annotations

import subprocess
import sys

_IMPORTS = """
import gc, sys, types
from sfu.lazy import first_imports

class Left:
    def __init__(self):
        self.itself = self

    def __del__(self):
        print("collected")

with first_imports():
    assert not gc.isenabled()
    import email.message
spared = gc.get_freeze_count()
assert gc.isenabled() and spared > 1000
Left()
sys.modules["torch"] = types.ModuleType("torch")
with first_imports():
    assert gc.isenabled()
assert gc.get_freeze_count() == spared
print("used")
"""


def test_imports_are_spared_collections_and_what_is_left_at_the_end_is_collected():
    """Only the first ones are spared: later there may be garbage that holds data."""
    done = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout == "used\ncollected\n"
