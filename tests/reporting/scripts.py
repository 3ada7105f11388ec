"""Scripts as modules: they are not part of the package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def load_script(name: str) -> Any:
    known_as = f"script_{name}"  # a script may have the name of a package, such as requests
    spec = importlib.util.spec_from_file_location(known_as, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[known_as] = module
    spec.loader.exec_module(module)
    return module
