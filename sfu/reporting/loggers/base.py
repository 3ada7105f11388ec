"""The interface of an experiment logger, and the promise that logging never costs a run its result.

Use one as a context manager around the whole run::

    with TensorBoardLogger() as logger:
        logger.start(config, {"name": folder.name, "folder": str(folder)})
        ...
        logger.log_result(metrics, folder / "figure.png")
        logger.log_files(folder)

Leaving the block closes it with exit code 0, 130 after Ctrl-C, 143 after SIGTERM, and 1 after any other error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from sfu.processes import exit_code_of
from sfu.registry import add_modules
from sfu.reporting.loggers.content import public_metrics
from sfu.schema import Choice, setting

log = logging.getLogger(__name__)


@dataclass
class RunLogger(Choice, kind="logger"):
    """Receives what happens in one run; its fields are the keys of the group ``logger``.

    Only :meth:`start` may raise, and then only ``ConfigError``, before any work is lost. After it, a failure of the
    logger is a warning and the run goes on. Subclasses override what they record of ``_start``, ``_log_stage``,
    ``_log_result``, ``_log_files`` and ``_finish``.
    """

    prefix: ClassVar[str] = "logger"

    name: str = setting("", "Kind of logger.")
    _open: bool = field(default=False, init=False, repr=False)

    def start(self, config: Mapping[str, Any], run_info: Mapping[str, Any] | None = None) -> None:
        """Open the log, with the public part of the configuration as plain containers.

        ``run_info`` says what is known of the run: its ``name``, and the ``group``, ``job_type`` and ``tags`` by which
        it can be found. Its ``folder`` is for files of the logger's own and is not recorded.

        Raises:
            ConfigError: The logger cannot be used as it is configured.
        """
        self._start(config, run_info or {})
        self._open = True

    def log_stage(self, name: str, seconds: float) -> None:
        """Record that a stage took so many seconds."""
        self._attempt("log a stage", lambda: self._log_stage(name, seconds))

    def log_result(self, metrics: Mapping[str, Any], picture_path: str | Path | None = None) -> None:
        """Record the metrics, of which the logger is given the public part, and the picture of the run."""
        picture = Path(picture_path) if picture_path else None
        self._attempt("log the result", lambda: self._log_result(public_metrics(metrics), picture))

    def log_files(self, folder: str | Path) -> None:
        """Store files of the run's folder, where the logger has a place for them and is set to."""
        self._attempt("store the files", lambda: self._log_files(Path(folder)))

    def finish(self, exit_code: int = 0) -> None:
        """Close the log; a second call does nothing."""
        if self._open:
            self._attempt("finish", lambda: self._finish(exit_code))
            self._open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(exit_code_of(error))

    def _attempt(self, what: str, action: Callable[[], None]) -> None:
        """Run an action of an open logger; an ordinary error becomes a warning."""
        if not self._open:
            return
        try:
            action()
        except Exception as error:
            log.warning(
                "logger=%s could not %s (%s: %s); the run goes on", self.name, what, type(error).__name__, error
            )

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


add_modules(RunLogger, "sfu.reporting.loggers")


@dataclass
class NullLogger(RunLogger, name="none"):
    """``logger=none``: nothing is recorded beyond the run's folder."""
