from __future__ import annotations

import subprocess
import sys

HEAVY = ("matplotlib", "wandb", "torch", "sklearn", "numpy")


def test_importing_the_reports_is_quick() -> None:
    """matplotlib and wandb are imported when they are used, not before; nothing uses pyplot's global state."""
    code = (
        "import sys\n"
        "import sfu.reporting.published, sfu.reporting.pictures.choose, sfu.reporting.loggers\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_pictures_leave_pyplot_alone(tmp_path: object) -> None:
    code = (
        "import sys\n"
        "from sfu.reporting.pictures.gaps import save_gap_plot\n"
        f"save_gap_plot({{'rows': {{'x': {{'test_accuracy': 1.0}}}}}}, {str(tmp_path)!r} + '/x.png')\n"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
