"""One process at a time: the others wait until the first has finished."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sfu.errors import ArtifactError

log = logging.getLogger(__name__)


@contextmanager
def alone(target: Path) -> Iterator[None]:
    """Hold the lock of ``target`` (a hidden file beside it, freed by the system if the process dies).

    Raises:
        ArtifactError: Its folder cannot be written.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(target.with_name(f".{target.name}.lock"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.info("waiting for another process that is getting %s", target)
            lock.acquire()
    except OSError as error:
        raise ArtifactError(
            f"cannot write in {target.parent} ({error.strerror or error}); choose another folder by dataset.root."
        ) from error
    try:
        yield
    finally:
        lock.release()
