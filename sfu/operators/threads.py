"""Work too small for several threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sfu.lazy import torch


@contextmanager
def one_thread(when: bool) -> Iterator[None]:
    """Use one thread for PyTorch's CPU work in this block, where handing it out costs more than it saves.

    On busy cores the difference is large: threads wait for each other by spinning.
    """
    before = torch.get_num_threads()
    if not when or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
