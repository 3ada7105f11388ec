"""Estimate what a linearised head will need before long work: memory by counting, time by one measured product.

Shapes: N rows, B examples of a batch, p parameters.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import functional_call

from sfu.errors import ConfigError
from sfu.heads.cores.core import Core
from sfu.operators.plan import available_memory

_LARGEST = {"cpu": 512, "cuda": 1024}
_SHARE = 8  # of the memory goes to one pass
_PASS = 3  # a product needs so many times what a reverse pass saves
_VECTORS = 8  # of conjugate gradients, float64
_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True)
class Preflight:
    """Estimated memory of a pass, of vectors and of all activations, and seconds of one Hessian product."""

    n_parameters: int
    batch_size: int
    pass_bytes: int
    vector_bytes: int
    row_bytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.n_parameters:,} linearised parameters in batches of {self.batch_size}: about "
            f"{self.pass_bytes / _MIB:.0f} MiB for a pass, {self.vector_bytes / _MIB:.0f} MiB for vectors, "
            f"{self.row_bytes / _MIB:.0f} MiB of activations; one Hessian product takes about {self.seconds:.1f} s, "
            "and training tens to hundreds of them"
        )


def bytes_per_example(core: Core) -> int:
    """Count what a reverse pass saves for each further example."""
    few, more = 2, 6
    return max(1, (_saved_bytes(core, more) - _saved_bytes(core, few)) // (more - few))


def _saved_bytes(core: Core, examples: int) -> int:
    saved: dict[int, tuple[Tensor, int]] = {}  # holding the tensor prevents another from getting its address

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = (tensor, storage.nbytes())
        return tensor

    activations = torch.zeros(examples, *core.shape, device=core.device, dtype=core.dtype)
    parameters = {name: tensor.clone().requires_grad_() for name, tensor in core.parameters.items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        functional_call(core.top, parameters, (activations,))
    return sum(size for _, size in saved.values())


def with_batch_size(core: Core, batch_size: int | str, memory: int | None = None) -> Core:
    """Return the core with ``head.batch_size``; ``auto`` is what fits ``memory`` bytes, by default the device's."""
    if isinstance(batch_size, str):
        fits = (memory or available_memory(core.device)) // _SHARE // (_PASS * bytes_per_example(core))
        batch_size = max(1, min(_LARGEST[core.device.type], int(fits)))
    return replace(core, batch_size=batch_size)


def preflight(core: Core, n_rows: int, memory: int | None = None) -> Preflight:
    """Estimate what training on ``n_rows`` needs.

    Raises:
        ConfigError: It does not fit ``memory`` bytes, by default the device's.
    """
    some = min(core.batch_size, n_rows)
    features = torch.zeros(some, core.n_features, device=core.device, dtype=core.dtype)
    vector = torch.zeros(1, core.n_parameters, device=core.device, dtype=torch.float64)
    core.pull(features[:1], core.push(features[:1], vector))
    start = time.perf_counter()
    core.pull(features, core.push(features, vector)).sum().item()
    seconds = (time.perf_counter() - start) * n_rows / some
    found = Preflight(
        core.n_parameters, core.batch_size, _PASS * bytes_per_example(core) * some,
        8 * _VECTORS * core.n_parameters, 4 * n_rows * core.n_features, seconds,
    )  # fmt: skip
    memory = memory or available_memory(core.device)
    need = found.pass_bytes + found.vector_bytes
    if need > 0.9 * memory:
        raise ConfigError(
            f"head.layers linearises {core.n_parameters:,} parameters, which need about {need / _GIB:.1f} GiB in "
            f"batches of {core.batch_size}, but the device has {memory / _GIB:.1f} GiB. Lower head.batch_size or "
            "head.layers."
        )
    return found
