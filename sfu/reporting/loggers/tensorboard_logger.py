"""``logger=tensorboard``: record a run as TensorBoard events.

They go to ``tensorboard/`` in the run's folder: ``tensorboard --logdir outputs`` shows all runs side by side. Scalars
carry the names of :mod:`sfu.reporting.loggers.content`; the table ``results`` and the ``config`` are texts, the picture
is the image ``figure``, and the hyperparameters tab compares runs by their settings. TensorBoard keeps scalars in
float32 and has no place for files: metrics.json and the heads are in the run's folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sfu.errors import ConfigError
from sfu.reporting.columns import PRINTED
from sfu.reporting.loggers.base import RunLogger
from sfu.reporting.loggers.content import stage_name, summary_of
from sfu.reporting.text_tables import run_markdown
from sfu.results.rows import flat_items, is_number

FOLDER = "tensorboard"


@dataclass
class TensorBoardLogger(RunLogger, name="tensorboard"):
    """Records one run for TensorBoard, in the run's folder."""

    _writer: Any = field(default=None, init=False, repr=False)
    _settings: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def _start(self, config: Mapping[str, Any], run_info: Mapping[str, Any]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"logger=tensorboard needs the tensorboard package ({error}). Install it with "
                "`pip install 'sfu[tensorboard]'`, or use `logger=none`."
            ) from error
        folder = Path(run_info.get("folder", ".")).absolute() / FOLDER
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("events.out.tfevents.*"):  # of an earlier run in the same folder
                old.unlink()
            self._writer = SummaryWriter(str(folder))
        except OSError as error:
            raise ConfigError(
                f"logger=tensorboard cannot write to {folder} ({error}). Choose another folder."
            ) from error
        self._settings = {
            key: value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
            for key, value in flat_items(config)
            if value not in (None, {})
        }
        self._writer.add_text("config", _code(config))

    def _log_stage(self, name: str, seconds: float) -> None:
        self._writer.add_scalar(stage_name(name), float(seconds), 0)

    def _log_result(self, metrics: Mapping[str, Any], picture_path: Path | None) -> None:
        numbers = {key: value for key, value in summary_of(metrics).items() if is_number(value)}
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, 0)
        self._writer.add_text("results", run_markdown(metrics))
        compared = [key for key in numbers if key.startswith("rows/") and key.split("/")[-1] in PRINTED]
        self._writer.add_hparams(self._settings, {f"hparam/{key}": numbers[key] for key in compared}, run_name=".")
        if picture_path is not None:
            self._writer.add_image("figure", _pixels(picture_path), dataformats="HWC")

    def _finish(self, exit_code: int) -> None:
        self._writer.add_scalar("run/exit_code", exit_code, 0)
        self._writer.close()


def _code(value: Mapping[str, Any]) -> str:
    """JSON as a Markdown code block."""
    return "\n".join(f"    {line}" for line in json.dumps(value, indent=2, default=str).splitlines())


def _pixels(path: Path) -> Any:
    import numpy as np
    from PIL import Image

    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))
