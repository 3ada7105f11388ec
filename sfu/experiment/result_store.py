"""The cache of results: heads, rows and whole runs, each an entry of its own.

Each entry names one more, the digests of the examples that its data held, by which it is found when one of them is to
be forgotten.
"""

from __future__ import annotations

from pathlib import Path

from sfu.data.examples import EXAMPLES
from sfu.store import Entry, Store, cache_dir

GRAM, ROW, RUN = "gram.safetensors", "row.json", "metrics.json"
KINDS = {"gram": GRAM, "head": "", "row": ROW, "run": RUN, "examples": EXAMPLES}
"""Each kind of result and the file that only its entries hold; a head's has any name. sfu 0.1 cached Gram matrices."""


def result_store(root: Path | None = None) -> Store:
    """Return the store in ``root``, by default ``results`` in sfu's cache folder.

    A large file (the core of linearised heads) is stored once for all entries that hold it.
    """
    advice = "Free some space, set SFU_CACHE to a folder you can write to, or set reuse=never."
    return Store(root or cache_dir("results"), advice=advice, share_large_files=True)


def kind_of(entry: Entry) -> str:
    """Return ``gram``, ``head``, ``row``, ``run`` or ``examples``."""
    return next((kind for kind, name in KINDS.items() if name and (entry.folder / name).is_file()), "head")
