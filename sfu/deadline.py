"""A time limit for a block of code, which its loops obey by calling :func:`check_time`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from sfu.errors import TimeLimitError

_LIMIT: ContextVar[tuple[float, float] | None] = ContextVar("limit", default=None)


@contextmanager
def limit_time(seconds: float | None) -> Iterator[None]:
    """Let :func:`check_time` raise once the block has taken so many seconds of wall time; ``None`` sets no limit."""
    token = _LIMIT.set(None if seconds is None else (seconds, time.monotonic() + seconds))
    try:
        yield
    finally:
        _LIMIT.reset(token)


def check_time() -> None:
    """Raise :class:`TimeLimitError` if the time limit of this block is over."""
    limit = _LIMIT.get()
    if limit is not None and time.monotonic() > limit[1]:
        raise TimeLimitError(
            f"time_limit={limit[0]:g} seconds are over, and the step is not ready. Nothing was changed. Give more "
            "time, or fewer rows."
        )
