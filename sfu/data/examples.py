"""Which examples a cached entry was made from, so that it can be found when one of them is to be forgotten.

An example is known by digests: the SHA-256 of an image file (as ``sha256sum`` prints it), of the pixels of an image in
memory, or of a feature row as 64-bit floats; and, for files, that of the path, by which a file is found that is gone.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sfu.errors import ArtifactError
from sfu.files import replacing
from sfu.readers import require_regular
from sfu.store import Entry, Store

if TYPE_CHECKING:
    from sfu.data.images.images import Images

EXAMPLES = "examples.bin"
"""File of the digests of all examples that an entry was made of."""
RUN_EXAMPLES = "examples.secret"
"""The same in a run folder, for its owner alone."""
DIGEST_BYTES = hashlib.sha256().digest_size
_KEY = re.compile(r"[0-9a-f]{32}")


def path_digest(path: str | Path) -> bytes:
    """Return the digest by which a file is known although its content may be gone."""
    return hashlib.sha256(b"path\0" + os.fsencode(os.path.abspath(path))).digest()


def row_digests(features_ND: np.ndarray) -> list[bytes]:
    """Return the digests of feature rows, whatever number type they are stored in."""
    if features_ND.ndim != 2 or features_ND.dtype.kind not in "fiub":
        return []  # refused when it is loaded
    return [hashlib.sha256(np.ascontiguousarray(row, dtype="<f8").tobytes()).digest() for row in features_ND]


def image_digests(images: Images) -> list[list[bytes]]:
    """Return the digests of each image: that of its content and, if it is a file, that of its path."""
    paths = images.paths
    digests = [[digest] for digest in images.digests()]
    return [[*one, path_digest(path)] for one, path in zip(digests, paths, strict=True)] if paths else digests


def write_digests(path: Path, digests: Iterable[bytes]) -> None:
    """Write digests one after the other, 32 bytes each."""
    path.write_bytes(b"".join(sorted(set(digests))))


def write_run_examples(folder: Path, digests: Iterable[bytes]) -> None:
    """Write the digests of the examples of a run to its folder, where its owner alone can read them."""
    with replacing(folder / RUN_EXAMPLES) as temporary:
        temporary.touch(0o600)
        write_digests(temporary, digests)


def read_digests(path: Path) -> frozenset[bytes] | None:
    """Return the digests in a file; ``None`` if it is missing or no list of digests."""
    try:
        require_regular(path)
        body = path.read_bytes()
    except (OSError, ValueError):
        return None
    if not body or len(body) % DIGEST_BYTES:
        return None
    return frozenset(body[start : start + DIGEST_BYTES] for start in range(0, len(body), DIGEST_BYTES))


def note_examples(store: Store, key: str, digests: Callable[[], Iterable[bytes]]) -> dict[str, object]:
    """Make an entry of the digests of examples, unless it is there, and return what the entries made of them say.

    If it cannot be written, those entries go whenever any example is forgotten.
    """
    if not store.touch(key):
        with suppress(ArtifactError):
            store.put(key, lambda folder: write_digests(folder / EXAMPLES, digests()))
    return {"examples": key}


@dataclass(frozen=True)
class Purge:
    """What is to go from a cache so that nothing made of some examples is left.

    Attributes:
        made_of_them: Entries whose data held one of the examples, and the lists of such data.
        unknown: Entries that do not say what they were made of: of an earlier version, damaged, or without their list.
        found: Numbers of the examples that some entry was made of.
    """

    made_of_them: list[Entry]
    unknown: list[Entry]
    found: set[int]


def find_entries(entries: Iterable[Entry], examples: Sequence[frozenset[bytes]], list_file: str = EXAMPLES) -> Purge:
    """Find the entries of a cache that are to go with some examples, each given by all digests that it is known by.

    An entry has its list of digests in the file ``list_file``, or names another entry that has it.
    """
    purge = Purge([], [], set())
    lists: dict[Path, set[int] | None] = {}
    for entry in entries:
        path = entry.folder / list_file
        named = entry.about.get("examples")
        if not path.exists() and isinstance(named, str) and _KEY.fullmatch(named):
            path = entry.folder.parent / named / list_file
        if path not in lists:
            digests = read_digests(path)
            lists[path] = (
                digests
                if digests is None
                else {number for number, example in enumerate(examples) if not example.isdisjoint(digests)}
            )
        found = lists[path]
        if found is None:
            purge.unknown.append(entry)
        elif found:
            purge.made_of_them.append(entry)
            purge.found.update(found)
    return purge
