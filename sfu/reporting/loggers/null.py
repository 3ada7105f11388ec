"""``logger=none``: nothing is recorded beyond the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sfu.reporting.loggers.base import RunLogger


class NullLogger(RunLogger):
    """A logger that keeps nothing. It accepts and ignores the settings that other loggers share (folder, group...)."""

    name = "none"

    def __init__(self, **settings: Any) -> None:
        super().__init__()

    def _start(self, config: Mapping[str, Any], run_info: Mapping[str, Any]) -> None:
        pass

    def _log_stage(self, name: str, seconds: float) -> None:
        pass

    def _log_result(self, metrics: Mapping[str, Any], picture_path: Path | None) -> None:
        pass

    def _log_files(self, folder: Path) -> None:
        pass

    def _finish(self, exit_code: int) -> None:
        pass
