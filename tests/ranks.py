"""Start processes that share a group of torch.distributed: forks of one process that has imported what they need."""

from __future__ import annotations

import datetime
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 120


def run_ranks(size: int, work: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """Return what ``work(rank, *arguments)`` returns in each of so many processes; ``None`` for one that has died."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "sfu.heads.fit", "sfu.heads.train", "sfu.unlearning.unlearn"])
    pipes, processes = [], []
    for rank in range(size):
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_one, args=(rank, size, work, folder, sending, *arguments), daemon=True)
        process.start()
        sending.close()
        pipes.append(receiving)
        processes.append(process)
    found = []
    for receiving in pipes:
        try:
            found.append(receiving.recv() if receiving.poll(SECONDS) else None)
        except EOFError:
            found.append(None)
    for process in processes:
        process.join(5)
        process.kill()
    return found


def _one(rank: int, size: int, work: Callable[..., Any], folder: Path, sending: Any, *arguments: Any) -> None:
    import torch
    import torch.distributed as distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size,
        timeout=datetime.timedelta(seconds=30),
    )  # fmt: skip
    sending.send(work(rank, *arguments))
    sending.close()
