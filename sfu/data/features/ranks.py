"""Several processes at one extraction, as torchrun starts them: each its share of the chunks, on one shared disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_LONG = timedelta(days=7)  # the last chunk of one rank may take far longer than the others' wait by default


@dataclass(frozen=True)
class Ranks:
    """This process among all."""

    rank: int = 0
    size: int = 1

    def barrier(self) -> None:
        """Wait for all."""
        if self.size > 1:
            import torch.distributed

            torch.distributed.barrier()

    def gathered(self, mine: str) -> list[str]:
        """What every process has to say."""
        answers = [mine] * self.size
        if self.size > 1:
            import torch.distributed

            torch.distributed.all_gather_object(answers, mine)
        return answers


def launched_by_torchrun() -> bool:
    """Whether this process is one of several started by torchrun, or in its way."""
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def local_share() -> int:
    """How many cores there are for each process of this machine."""
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """Join the group torchrun describes (nccl for CUDA, gloo otherwise); alone, if there is none."""
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
    """The device of this process: ``cuda`` becomes the GPU of its local rank."""
    if device.type == "cuda" and device.index is None and launched_by_torchrun():
        import torch

        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    return device
