"""A progress bar on standard error, shown only on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress
from rich.console import Console

from sfu.names import visible

Tick = Callable[[int, int], None]


class ProgressDisplay:
    """One line at a time: the current stage, its progress, and the time it has taken."""

    def __init__(self, enabled: bool = True) -> None:
        console = Console(stderr=True)
        self._enabled = enabled
        self._bar = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=24),
            progress.TaskProgressColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
            transient=True,
            disable=not (enabled and console.is_terminal),
        )

    def __enter__(self) -> ProgressDisplay:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, sentence: str) -> None:
        """Print a sentence above the bar. Unlike the bar, it is also printed into logs."""
        if self._enabled:
            self._bar.console.print(f"sfu: {visible(sentence)}", markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def stage(self, description: str) -> Iterator[Tick]:
        """Show ``description`` until the block ends, and yield a function of (done, total)."""
        task = self._bar.add_task(visible(description), total=None)

        def tick(done: int, total: int) -> None:
            self._bar.update(task, completed=done, total=total)

        try:
            yield tick
        finally:
            self._bar.remove_task(task)
