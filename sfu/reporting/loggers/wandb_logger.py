"""``logger=wandb``: record a run with Weights & Biases, offline by default.

The run's history and summary hold the scalars, under the names of :mod:`sfu.reporting.loggers.content`; its media hold
the table ``results`` and the image ``figure``. Its artifacts are ``heads-<run id>`` (every head) and
``result-<run id>`` (metrics.json, config.yaml).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sfu.errors import ConfigError
from sfu.reporting.columns import tidy_table
from sfu.reporting.loggers.base import RunLogger
from sfu.reporting.loggers.content import files_of, stage_name, summary_of
from sfu.results.rows import is_number

MODES = ("offline", "online", "disabled")
REMEDY = "Use `logger.mode=offline` to record in the run's folder without account or network, or `logger=none`."
PICTURES = (".png", ".jpg", ".jpeg")


class WandbLogger(RunLogger):
    """Records one run with W&B.

    Args:
        dir: Where W&B keeps its files; the run's folder. Defaults to ``run_info["folder"]``, then the current folder.
        mode: ``offline`` (no account, no network), ``online`` or ``disabled``.
        project, entity: The project, and the account or team (online only).
        group, job_type, tags: What W&B groups, sorts and finds runs by.
        name: The run's name; defaults to ``run_info["name"]``.
        init_timeout: Seconds to wait for the server, online only.

    Raises:
        ConfigError: If ``mode`` is not one of the three.
    """

    name = "wandb"

    def __init__(
        self,
        dir: str | Path | None = None,
        mode: str = "offline",
        project: str = "sfu",
        entity: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        tags: Sequence[str] = (),
        name: str | None = None,
        init_timeout: float = 30.0,
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise ConfigError(f"logger.mode={mode} is not a mode of W&B. Choose one of {', '.join(MODES)}.")
        self.dir, self.mode, self.project, self.entity = dir, mode, project, entity
        self.group, self.job_type, self.tags, self.run_name = group, job_type, tuple(tags or ()), name
        self.init_timeout = init_timeout
        self._run: Any = None

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
        folder = Path(self.dir or run_info.get("folder") or ".").absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.mode == "online" and not wandb.login(prompt=False):
                raise self._refuse("there is no W&B login on this machine, which `wandb login` makes")
            self._run = wandb.init(
                project=self.project,
                entity=self.entity,
                dir=str(folder),
                group=self.group,
                job_type=self.job_type,
                tags=list(self.tags),
                name=self.run_name or run_info.get("name"),
                config={**config, "run_info": dict(run_info)} if run_info else dict(config),
                mode=mode,
                reinit="finish_previous",
                settings=wandb.Settings(
                    silent=True, console="off", save_code=False, disable_git=True, init_timeout=self.init_timeout
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
            self._run.log({"results": wandb.Table(columns=[*header], data=data, allow_mixed_types=True)})
        if picture_path is not None and picture_path.suffix.lower() in PICTURES:
            self._run.log({"figure": wandb.Image(str(picture_path))})

    def _log_files(self, folder: Path) -> None:
        import wandb

        for kind, paths in files_of(folder).items():
            artifact = wandb.Artifact(f"{kind}-{self._run.id}", type=kind)
            for path in paths:
                artifact.add_file(str(path), policy="immutable")  # no second copy: nothing changes them
            self._run.log_artifact(artifact)

    def _finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)
