"""Sums over rows that are spread over the processes of ``torch.distributed``, and errors that reach all of them.

Every process of the group, called a rank, holds some of the rows. All ranks run the same code, each on its own rows,
and :meth:`Ranks.add_up` replaces the sum over the rows of one rank by that over all rows. What the code decides, it
decides from such sums, so all ranks decide alike.

Before each sum the ranks tell one another what they are about to do. A rank that raises an error tells that instead, so
the others raise :class:`RankError` with its message, and none waits for it. A rank that dies breaks the connection, or
is missed after the time limit of the group (``torch.distributed.init_process_group(timeout=...)``).

Shapes: R ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from sfu.errors import ConfigError, RankError
from sfu.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

WORLD = "world"
"""Stands for the group of all processes."""
_FAILED, _ENDED, _SUM, _TEXT = "has failed", "has ended", "is at a sum", "is at an exchange of settings"
_SMALL = 8192  # numbers of a sum that travel with the announcement
_ACTIONS = (_FAILED, _ENDED, _SUM, _TEXT)


class Ranks:
    """The processes of a group, as one of them sees them.

    Attributes:
        rank: The number of this process in the group.
        size: How many processes there are.
        device: Where tensors are sent from: the current GPU for NCCL, else the CPU.
    """

    def __init__(self, group: ProcessGroup | str) -> None:
        """Find this process in a group, or in the group of all processes for ``"world"``.

        Raises:
            ConfigError: There is no such group, or this process is not in it.
        """
        import torch.distributed as distributed

        if not (distributed.is_available() and distributed.is_initialized()):
            raise ConfigError(
                "group= needs torch.distributed, which has not been started in this process. Call "
                "torch.distributed.init_process_group() first, and start the processes with torchrun."
            )
        if isinstance(group, str) and group != WORLD:
            raise ConfigError(f"group={group!r} is unknown. Give '{WORLD}' or a group of torch.distributed.")
        found = distributed.group.WORLD if isinstance(group, str) else group
        if not isinstance(found, distributed.ProcessGroup) or distributed.get_rank(found) < 0:
            raise ConfigError(
                f"group={group!r} is no group of torch.distributed that this process belongs to. Call this only in the "
                "processes of the group."
            )
        self._group, self._distributed = found, distributed
        self.rank, self.size = distributed.get_rank(found), distributed.get_world_size(found)
        backend = distributed.get_backend(found)  # it may be "cpu:gloo,cuda:nccl"
        on_gpu = "nccl" in backend and "gloo" not in backend
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def add_up(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, the same bits on each; it is added in float64.

        Raises:
            RankError: Another rank has failed, died or gone another way.
        """
        own = tensor.to(self.device, torch.float64).flatten()
        small = len(own) <= _SMALL
        _, total = self._meet(_SUM, len(own), own if small else None)
        if not small:
            total = self._sum(own.clone())
        return total.reshape(tensor.shape).to(tensor)

    def everywhere(self, flag: bool) -> bool:
        """Return whether all ranks say so."""
        return int(self.add_up(torch.tensor(int(flag)))) == self.size

    def exchange(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return what each rank says of itself, in the order of the ranks; values that JSON lacks become texts."""
        own = json.dumps(facts, default=str).encode()
        sizes, _ = self._meet(_TEXT, len(own))
        return [json.loads(text) for text in self._texts(own, sizes)]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block in which an error of one rank ends the block on all ranks.

        Raises:
            RankError: Another rank has failed, died or gone another way.
        """
        try:
            yield
            self._meet(_ENDED)
        except RankError:
            raise
        except Exception as error:
            text = str(error) or type(error).__name__
            with suppress(RankError):  # the ranks that have failed themselves raise their own errors
                self._meet(_FAILED, text=text)
            raise

    def _meet(
        self, action: str, size: int = 0, payload: Tensor | None = None, *, text: str = ""
    ) -> tuple[list[int], Tensor]:
        """Tell all ranks what this one does next; return the sizes that they give, and the sum of small payloads.

        All ranks send the same number of numbers whatever they do, so those that do different things can meet.
        """
        own = text.encode(errors="replace")
        numbers = torch.zeros(2 * self.size + _SMALL, dtype=torch.float64, device=self.device)
        numbers[self.rank], numbers[self.size + self.rank] = _ACTIONS.index(action), len(own) if own else size
        if payload is not None:
            numbers[2 * self.size :][: len(payload)] = payload
        self._sum(numbers)
        told = [int(one) for one in numbers[: 2 * self.size].tolist()]
        actions, sizes = [_ACTIONS[one] for one in told[: self.size]], told[self.size :]
        if _FAILED in actions:
            widths = [size if one == _FAILED else 0 for one, size in zip(actions, sizes, strict=True)]
            texts, rank = self._texts(own, widths), actions.index(_FAILED)
            raise RankError(f"rank {rank} of {self.size} has failed, so all of them stop: {texts[rank]}")
        places = [one if one != _SUM else f"{one} of {size} numbers" for one, size in zip(actions, sizes, strict=True)]
        if len(set(places)) > 1:
            other = next(rank for rank, place in enumerate(places) if place != places[0])
            raise RankError(
                f"the ranks do not run in step: rank 0 {places[0]}, and rank {other} {places[other]}. Give all ranks "
                "the same calls and settings, and the same kind of machine."
            )
        return sizes, numbers[2 * self.size :][:size]

    def _texts(self, own: bytes, widths: list[int]) -> list[str]:
        """Return the texts of all ranks, whose lengths in bytes are known."""
        stacked = torch.zeros(self.size, max(widths), dtype=torch.uint8, device=self.device)
        stacked[self.rank, : len(own)] = torch.tensor(list(own), dtype=torch.uint8, device=self.device)
        rows = self._sum(stacked).tolist()
        return [bytes(row[:width]).decode() for row, width in zip(rows, widths, strict=True)]

    def _sum(self, tensor: Tensor) -> Tensor:
        """Add a tensor up over all ranks, in place, and return it."""
        try:
            self._distributed.all_reduce(tensor, group=self._group)
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} of {self.size} has lost the others: one has died, or has not answered within the "
                "time limit of the group. Its own output says why. Start all of them again."
            ) from error
        return tensor
