"""Wall time and peak memory of a block."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_RESET_PEAK = "5"  # see proc(5), clear_refs
_MB = 1024.0 * 1024.0


@dataclass
class Usage:
    """What a block used; set when the block ends.

    Attributes:
        seconds: Wall time.
        peak_memory_mb: Peak memory in MiB while the block ran: memory allocated on the GPU for CUDA, otherwise resident
            memory of the whole process, Python and PyTorch included. Only Linux can reset this peak; elsewhere it is
            the peak of the process so far. ``None`` on Windows, where Python cannot tell.
    """

    seconds: float = 0.0
    peak_memory_mb: float | None = 0.0


@contextmanager
def measured(device: torch.device) -> Iterator[Usage]:
    """Measure a block, and wait for the work that it queued on a GPU."""
    usage = Usage()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _reset_resident_peak()
    start = time.perf_counter()
    try:
        yield usage
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        usage.seconds = time.perf_counter() - start
        usage.peak_memory_mb = (
            torch.cuda.max_memory_allocated(device) / _MB if device.type == "cuda" else _resident_peak_mb()
        )


def _reset_resident_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return


def _resident_peak_mb() -> float | None:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024.0
    except OSError:
        pass
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / _MB if sys.platform == "darwin" else peak / 1024.0
