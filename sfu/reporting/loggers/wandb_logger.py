"""``logger=wandb``: record a run with Weights & Biases, offline by default.

The run's history and summary hold the scalars, under the names of :mod:`sfu.reporting.loggers.content`; its media hold
the table ``results`` and the image ``figure``. Its artifacts are ``result-<run id>`` (the public part of metrics.json)
and, with ``logger.heads=true``, ``heads-<run id>`` (every head, without its secrets).
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from sfu.errors import ConfigError
from sfu.names import visible, warn_once
from sfu.reporting.columns import tidy_table
from sfu.reporting.loggers.base import RunLogger
from sfu.reporting.loggers.content import heads_of, stage_name, summary_of
from sfu.results.rows import is_number
from sfu.schema import setting

_replaced: dict[str, str] = {}
"""Folders of W&B by the variable that names them, of which this process has found that they cannot be written."""
_LONGEST, _LONGEST_TAG = 128, 64  # characters that the server takes
REMEDY = "Use `logger.mode=offline` to record in the run's folder without account or network, or `logger=none`."


@dataclass
class WandbLogger(RunLogger, name="wandb"):
    """Records one run with W&B, in the run's folder."""

    mode: str = setting(
        "offline", "offline (no account, no network), online or disabled.", choices=("offline", "online", "disabled")
    )
    project: str = setting("sfu", "Project.")
    entity: str | None = setting(None, "Account or team; online only.")
    group: str | None = setting(None, "What ties runs together; null: the sweep's name.")
    tags: list[str] = setting([], "Words to find the run by, besides dataset, loss and backbone.")
    heads: bool = setting(False, "Upload the heads, too: two of them give back, roughly, a row that one has forgotten.")
    init_timeout: float = setting(30.0, "Seconds to wait for the server; online only.", above=0)
    _run: Any = field(default=None, init=False, repr=False)

    def check_settings(self) -> None:
        """Check the names that W&B's server would refuse, which an offline run would only learn when it is synced."""
        _check("logger.project", self.project, _LONGEST, "/\\#?%:")
        for key, text in (("logger.entity", self.entity), ("logger.group", self.group)):
            if text is not None:
                _check(key, text, _LONGEST)
        for tag in self.tags:
            _check("logger.tags", tag, _LONGEST_TAG)

    @property
    def run_dir(self) -> Path | None:
        """The folder that W&B writes this run to, once started; ``wandb sync`` takes it."""
        return Path(self._run.dir).parent if self._run is not None and self.mode != "disabled" else None

    def _refuse(self, why: str) -> ConfigError:
        return ConfigError(f"logger=wandb with logger.mode={self.mode} cannot start: {why}. {REMEDY}")

    def _start(self, config: Mapping[str, Any], run_info: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"logger=wandb with logger.mode={self.mode} needs the wandb package ({error}). "
                "Install it with `pip install wandb`, or use `logger=none`."
            ) from error
        mode: Any = self.mode
        folder = Path(run_info.get("folder", ".")).absolute()
        if self.mode != "disabled":
            _choose_folders(folder / "wandb")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.mode == "online" and not wandb.login(prompt=False):
                raise self._refuse("there is no W&B login on this machine, which `wandb login` makes")
            self._run = wandb.init(
                project=self.project,
                entity=self.entity,
                dir=str(folder),
                group=self.group or _label(run_info.get("group"), _LONGEST),
                job_type=_label(run_info.get("job_type"), _LONGEST_TAG),
                tags=[*self.tags, *(str(_label(tag, _LONGEST_TAG)) for tag in run_info.get("tags") or ())],
                name=_label(run_info.get("name"), _LONGEST),
                config=dict(config),
                mode=mode,
                reinit="finish_previous",
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    save_code=False,
                    disable_git=True,
                    init_timeout=self.init_timeout,
                    host="",
                    x_disable_meta=True,  # else W&B records host, user, command line and paths
                ),
            )
        except ConfigError:
            raise
        except Exception as error:
            raise self._refuse(f"W&B did not start ({type(error).__name__}: {error})") from error

    def _log_stage(self, name: str, seconds: float) -> None:
        self._run.log({stage_name(name): float(seconds)})

    def _log_result(self, metrics: Mapping[str, Any], picture_path: Path | None) -> None:
        import wandb

        found = summary_of(metrics)
        self._run.log({key: value for key, value in found.items() if is_number(value)})  # panels read the history
        self._run.summary.update({key: value for key, value in found.items() if not is_number(value)})
        header, data = tidy_table(metrics)
        if data:
            # W&B never removes a table's temporary folder, and Python says so when the process ends
            warnings.filterwarnings("ignore", "Implicitly cleaning up <TemporaryDirectory", ResourceWarning)
            self._run.log({"results": wandb.Table(columns=[*header], data=data, allow_mixed_types=True)})
        artifact = wandb.Artifact(f"result-{self._run.id}", type="result")
        with tempfile.TemporaryDirectory() as folder:  # `new_file` would leave its own to the end of the process
            path = Path(folder, "metrics.json")
            path.write_text(json.dumps(metrics, indent=2), encoding="utf-8")
            artifact.add_file(str(path))
        self._run.log_artifact(artifact)
        if picture_path is not None:
            self._run.log({"figure": wandb.Image(str(picture_path))})

    def _log_files(self, folder: Path) -> None:
        import wandb

        if not self.heads:
            return
        artifact = wandb.Artifact(f"heads-{self._run.id}", type="heads")
        for path in heads_of(folder):
            artifact.add_file(str(path), policy="immutable")  # no second copy: nothing changes them
        self._run.log_artifact(artifact)

    def _finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


def _choose_folders(place: Path) -> None:
    """Have W&B keep its caches and staged artifacts in the run's folder if it cannot write to those of the user.

    Otherwise its service prints a log of its own, and artifacts fail.
    """
    defaults = {
        "WANDB_CACHE_DIR": platformdirs.user_cache_dir("wandb"),
        "WANDB_DATA_DIR": platformdirs.user_data_dir("wandb"),
        "WANDB_CONFIG_DIR": "~/.config/wandb",
    }
    closed = {}
    for variable, default in defaults.items():
        theirs = Path(_replaced.get(variable) or os.environ.get(variable) or default).expanduser()
        if not _can_write(theirs):
            _replaced[variable] = closed[variable] = str(theirs)
            os.environ[variable] = str(place / "home")
    if closed:
        warn_once(
            __name__,
            f"logger=wandb: {' and '.join(closed.values())} cannot be written, so W&B keeps its files in the run's "
            f"folder. Set {' and '.join(closed)} to choose another place.",
        )


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _label(text: str | None, longest: int) -> str | None:
    """A name of a folder or an experiment, as the server takes it."""
    return None if not text else visible(text)[-longest:].strip()


def _check(key: str, text: str, longest: int, forbidden: str = "") -> None:
    shown = visible(text)
    if not text.strip() or shown != text or len(text) > longest or any(character in text for character in forbidden):
        without = f" without any of {' '.join(forbidden)}" if forbidden else ""
        raise ConfigError(
            f"{key}={shown} is no name that W&B takes. Give 1 to {longest} characters{without}, and no control "
            "characters."
        )
