"""One process at a time: the others wait until the first has finished."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sfu.errors import ArtifactError
from sfu.files import acquire_lock

log = logging.getLogger(__name__)


@contextmanager
def alone(target: Path) -> Iterator[None]:
    """Hold the lock of ``target`` (a hidden file beside it, freed by the system if the process dies).

    Raises:
        ArtifactError: Its folder cannot be written.
    """
    try:
        lock = acquire_lock(
            target.with_name(f".{target.name}.lock"),
            lambda: log.info("waiting for another process that is getting %s", target),
        )
    except OSError as error:
        raise ArtifactError(
            f"cannot write in {target.parent} ({error.strerror or error}); choose another folder by dataset.root."
        ) from error
    try:
        yield
    finally:
        lock.release()
