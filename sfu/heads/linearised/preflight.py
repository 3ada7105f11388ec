"""What a linearised head will need, before long work: memory by counting, time by one measured product.

Shapes: N rows, B examples of a batch, p parameters.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import functional_call

from sfu.errors import ConfigError
from sfu.heads.linearised.core import Core
from sfu.operators.plan import available_memory

_LARGEST = {"cpu": 512, "cuda": 1024}
_SHARE = 8  # of the memory goes to one pass
_PASS = 3  # a product holds so many times what a reverse pass keeps
_VECTORS = 8  # of conjugate gradients, float64
_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True)
class Preflight:
    """An estimate.

    Attributes:
        n_parameters: p.
        batch_size: B.
        pass_bytes: Peak of one batch's product: grows with B alone.
        vector_bytes: Of the vectors of conjugate gradients: grows with p alone.
        row_bytes: Of the activations of all rows.
        seconds: Of one Hessian product over all rows.
    """

    n_parameters: int
    batch_size: int
    pass_bytes: int
    vector_bytes: int
    row_bytes: int
    seconds: float

    def __str__(self) -> str:
        """One sentence."""
        return (
            f"{self.n_parameters:,} linearised parameters in batches of {self.batch_size}: about "
            f"{self.pass_bytes / _MIB:.0f} MiB for a pass, {self.vector_bytes / _MIB:.0f} MiB for vectors, "
            f"{self.row_bytes / _MIB:.0f} MiB of activations; one Hessian product takes about {self.seconds:.1f} s, "
            "and training tens to hundreds of them"
        )


def bytes_per_example(core: Core) -> int:
    """What a reverse pass keeps for each further example, counted."""
    few, more = 2, 6
    return max(1, (_kept_bytes(core, more) - _kept_bytes(core, few)) // (more - few))


def _kept_bytes(core: Core, examples: int) -> int:
    kept: dict[int, tuple[Tensor, int]] = {}  # the tensor keeps its address in use

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (tensor, storage.nbytes())
        return tensor

    activations = torch.zeros(examples, *core.shape, device=core.device, dtype=core.dtype)
    parameters = {name: tensor.clone().requires_grad_() for name, tensor in core.parameters.items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        functional_call(core.top, parameters, (activations,))
    return sum(size for _, size in kept.values())


def with_batch_size(core: Core, batch_size: int | str) -> Core:
    """The core with ``head.batch_size``, or with what fits its device (``auto``)."""
    if isinstance(batch_size, str):
        fits = available_memory(core.device) // _SHARE // (_PASS * bytes_per_example(core))
        batch_size = max(1, min(_LARGEST[core.device.type], int(fits)))
    return replace(core, batch_size=batch_size)


def preflight(core: Core, n_rows: int) -> Preflight:
    """Estimate for training on ``n_rows``.

    Raises:
        ConfigError: Vectors and passes do not fit the device.
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
    memory = available_memory(core.device)
    need = found.pass_bytes + found.vector_bytes
    if need > 0.9 * memory:
        raise ConfigError(
            f"head.layers linearises {core.n_parameters:,} parameters, which need about {need / _GIB:.1f} GiB in "
            f"batches of {core.batch_size}, and the device has {memory / _GIB:.1f} GiB; lower "
            "head.batch_size or head.layers."
        )
    return found
