"""Start processes as torchrun does, with the same environment, but quickly.

They are forks of one process that has imported what they need.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SECONDS = 60


def run_ranks(size: int, work: Callable[[int], Iterator[Any]], folder: Path) -> list[list[Any]]:
    """Return what ``work(rank)`` yields in each of so many processes, in a folder; one that dies yields no more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", work.__module__])
    pipes, processes = [], []
    for rank in range(size):
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_one, args=(rank, size, port, work, folder, sending), daemon=True)
        process.start()
        sending.close()
        pipes.append(receiving)
        processes.append(process)
    found: list[list[Any]] = [[] for _ in pipes]
    for items, receiving in zip(found, pipes, strict=True):
        try:
            while receiving.poll(SECONDS):
                items.append(receiving.recv())
        except EOFError:
            pass
    for process in processes:
        process.join(5)
        process.kill()
    return found


def _one(rank: int, size: int, port: int, work: Callable[[int], Iterator[Any]], folder: Path, sending: Any) -> None:
    import torch

    torch.set_num_threads(1)
    os.chdir(folder)
    about = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in about.items()}
    try:
        for item in work(rank):
            sending.send(item)
    except BaseException:
        traceback.print_exc()
    sending.close()
    os._exit(0)  # without waiting for the threads of the group
