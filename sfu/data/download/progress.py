"""How far a download or an extraction is: a bar on a terminal, one line in the log elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.errors import LiveError
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

log = logging.getLogger(__name__)

Tick = Callable[[int, int | None], None]


@contextmanager
def byte_progress(description: str) -> Iterator[Tick]:
    """Show ``description`` until the block ends; the value is called with bytes done and, if known, in all."""
    console = Console(stderr=True)
    if not console.is_terminal:
        log.info("%s", description)
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), DownloadColumn(binary_units=True))
    bar = Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console, transient=True)
    task = bar.add_task(description, total=None)
    try:
        bar.start()
    except LiveError:  # something else is drawing on this terminal
        log.info("%s", description)
    try:
        yield lambda done, total: bar.update(task, completed=done, total=total)
    finally:
        bar.stop()
