"""How the cores are shared out: a few lanes, each of which decodes a batch and then runs the network on it.

While one lane decodes (in Python, one thread at a time) another keeps the cores at the network. Two lanes with half of
the cores each lose less than one after the other with all of them, and batches do not depend on which lane took them.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sfu.data.features.ranks import local_share


@dataclass(frozen=True)
class ThreadPools:
    """Threads at work.

    Attributes:
        batches: Its threads take a batch each.
        decoders: Its threads decode shares of a batch.
        workers: In how many shares a batch is decoded.
    """

    batches: ThreadPoolExecutor
    decoders: ThreadPoolExecutor
    workers: int


@contextmanager
def thread_pools(device: torch.device, workers: int | None) -> Iterator[ThreadPools]:
    """Open the lanes for a device; ``workers`` threads decode in all (``None``: one for each core of this process)."""
    threads = torch.get_num_threads()
    count = 3 if device.type == "cuda" else min(2, threads)
    workers = local_share() if workers is None else workers
    try:
        with (
            ThreadPoolExecutor(count, "lane", torch.set_num_threads, (max(1, threads // count),)) as batches,
            ThreadPoolExecutor(workers, "decode", torch.set_num_threads, (1,)) as decoders,
        ):
            yield ThreadPools(batches, decoders, max(1, workers // count))
    finally:
        torch.set_num_threads(threads)  # some libraries take the lanes' number for everybody's
