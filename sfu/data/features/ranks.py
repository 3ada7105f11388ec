"""Several processes that share one extraction, as torchrun starts them; each writes its chunks to a shared disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_LONG = timedelta(days=7)  # a rank may wait for another's last chunk far longer than the default timeout


@dataclass(frozen=True)
class Ranks:
    """The place of this process among all that share an extraction."""

    rank: int = 0
    size: int = 1

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            import torch.distributed

            torch.distributed.barrier()

    def gathered(self, mine: str) -> list[str]:
        """Return the strings of all processes, this one's being ``mine``."""
        answers = [mine] * self.size
        if self.size > 1:
            import torch.distributed

            torch.distributed.all_gather_object(answers, mine)
        return answers


def launched_by_torchrun() -> bool:
    """Return whether this is one of several processes started by torchrun, or like it."""
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def local_share() -> int:
    """Return how many cores there are for each process on this machine."""
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """Join the process group that torchrun describes (nccl for CUDA, gloo otherwise), if there is one."""
    if not launched_by_torchrun():
        yield Ranks()
        return
    import torch.distributed

    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, timeout=_LONG, device_id=device if device.type == "cuda" else None)
    try:
        yield Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size())
    finally:
        torch.distributed.destroy_process_group()


def local_device(device: torch.device) -> torch.device:
    """Return the device of this process: ``cuda`` becomes the GPU of its local rank."""
    if device.type == "cuda" and device.index is None and launched_by_torchrun():
        import torch

        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    return device
