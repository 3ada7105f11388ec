"""Experiment loggers: ``none``, ``wandb`` and ``tensorboard``, behind one small interface."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from sfu.errors import ConfigError
from sfu.reporting.loggers.base import RunLogger, exit_code_of
from sfu.reporting.loggers.null import NullLogger
from sfu.reporting.loggers.tensorboard_logger import TensorBoardLogger
from sfu.reporting.loggers.wandb_logger import WandbLogger

__all__ = ["LOGGERS", "NullLogger", "RunLogger", "TensorBoardLogger", "WandbLogger", "exit_code_of", "make_logger"]

LOGGERS: dict[str, type[RunLogger]] = {"none": NullLogger, "wandb": WandbLogger, "tensorboard": TensorBoardLogger}


def make_logger(logger: str | None, offered: Mapping[str, Any] | None = None, **settings: Any) -> RunLogger:
    """Builds a logger by its name.

    Args:
        logger: ``none`` (or None), ``wandb`` or ``tensorboard``.
        offered: Settings for the loggers that take them, such as a group; given ones come before them.
        **settings: What the logger's class takes; ``none`` ignores them.

    Returns:
        The logger, not yet started.

    Raises:
        ConfigError: If the name or a setting is unknown, or a setting has a value the logger does not accept.
    """
    kind = LOGGERS.get(logger or "none")
    if kind is None:
        raise ConfigError(f"logger is {logger!r}; accepted are {', '.join(LOGGERS)}")
    accepted = inspect.signature(kind).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    unknown = [] if takes_any else [key for key in settings if key not in accepted]
    if unknown:
        raise ConfigError(f"logger={logger} has no setting {', '.join(unknown)}; accepted are {', '.join(accepted)}")
    taken = {key: value for key, value in (offered or {}).items() if takes_any or key in accepted}
    return kind(**{**taken, **settings})
