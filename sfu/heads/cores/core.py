r"""The tangent of a network's last layers at fixed weights :math:`w_c`: products with its Jacobian, not the Jacobian.

.. math:: f(x) = f_c(x) + J_c(x)\, w, \qquad J_c(x) = \partial f / \partial w \,|_{w_c}

:math:`J v` is forward-mode, :math:`J^T b` reverse-mode differentiation, a batch at a time, in a dtype of its own. Only
w is unlearned, so the weights w_c must have been trained without user data.

Source: Golatkar et al., Mixed-privacy forgetting in deep networks, 2021.
Shapes: N examples, D numbers of an activation, C classes, p parameters; vectors ``[..., 1, p]``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp

from sfu.data.backbones.weights import weights_digest
from sfu.errors import ConfigError, DataError
from sfu.heads.cores.small_maps import use_small_maps

BATCH = 256
_PARITY = 1e-3


@dataclass(frozen=True)
class Core:
    """The last layers of a network at w_c, in evaluation mode.

    Attributes:
        shape: Shape of one activation.
        digest: SHA-256 of the layers' weights.
        batch_size: Examples of one pass.
        components: Names of the layers' components, the last first.
        small_maps: Whether :func:`~sfu.heads.cores.small_maps.use_small_maps` was applied.
        source: How to build the network again, for files (:func:`sfu.heads.cores.network.load_core`).
        whole: All weights of the network, trunk included, for files.
    """

    top: nn.Module
    shape: tuple[int, ...]
    n_classes: int
    digest: str
    batch_size: int = BATCH
    components: tuple[str, ...] = ()
    small_maps: bool = False
    source: dict[str, Any] = field(default_factory=dict)
    whole: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, top: nn.Module, example: Tensor, **about: Any) -> Core:
        """Return the core of a copy of ``top``; ``example`` are two activations or more, ``[B, ...]``, on the CPU.

        Raises:
            ConfigError: There is nothing to train, or an example's outputs depend on the others in its batch.
            DataError: Outputs are not ``[B, C]``, or not finite.
        """
        top = copy.deepcopy(top).eval().requires_grad_(False)
        with torch.no_grad():
            together = top(example)
            if together.ndim != 2 or not torch.isfinite(together).all():
                raise DataError(f"the last layers give outputs {list(together.shape)}. They must be [B, C] and finite.")
            alone = torch.cat([top(row[None]) for row in example])
        if not torch.allclose(together, alone, rtol=_PARITY, atol=_PARITY * float(together.abs().max())):
            raise ConfigError(
                "an example's outputs depend on the others in its batch, even in evaluation mode (a normalisation by "
                "batch statistics?), so the network cannot be linearised. Choose another backbone.name."
            )
        if not any(True for _ in top.parameters()):
            raise ConfigError("the last layers have no parameters. Raise head.layers.")
        return cls(top, tuple(example.shape[1:]), together.shape[1], weights_digest(top), **about)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """w_c by name."""
        return {name: tensor.detach() for name, tensor in self.top.named_parameters()}

    @property
    def sizes(self) -> list[int]:
        """Number of values of each parameter tensor."""
        return [tensor.numel() for tensor in self.top.parameters()]

    @property
    def n_parameters(self) -> int:
        """p."""
        return sum(self.sizes)

    @property
    def n_features(self) -> int:
        """D."""
        return int(torch.Size(self.shape).numel())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the passes."""
        return next(self.top.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Device of the passes."""
        return next(self.top.parameters()).device

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Core:
        """Return the core on another device or in another dtype; on a CPU, with small maps as matrix products."""
        wanted = dtype or self.dtype
        small = self.small_maps or device.type == "cpu"
        if (self.device, self.dtype, self.small_maps) == (device, wanted, small):
            return self
        top = copy.deepcopy(self.top).to(device, wanted)
        if small and not self.small_maps:
            use_small_maps(top, torch.zeros(2, *self.shape, device=device, dtype=wanted))
        return replace(self, top=top, small_maps=small)

    def unflatten(self, vector_P: Tensor) -> dict[str, Tensor]:
        """Return a vector as tensors by name, in the passes' dtype."""
        parts = vector_P.to(self.device, self.dtype).split(self.sizes)
        return {name: part.view_as(like) for (name, like), part in zip(self.parameters.items(), parts, strict=True)}

    def _function(self, features_BD: Tensor) -> Callable[[dict[str, Tensor]], Tensor]:
        activations = features_BD.to(self.device, self.dtype).unflatten(1, self.shape)

        def outputs(parameters: dict[str, Tensor]) -> Tensor:
            found: Tensor = functional_call(self.top, parameters, (activations,))
            return found

        return outputs

    def push(self, features_ND: Tensor, vectors: Tensor, *, affine: bool = False) -> Tensor:
        """Return ``J v`` (``affine``: ``f_c + J v``) of vectors ``[..., 1, p]``: ``[N, ..., C]`` in their dtype."""
        flat_MP = vectors.reshape(-1, vectors.shape[-1])
        found = []
        for vector_P in flat_MP:
            tangent, batches = self.unflatten(vector_P), []
            for batch in features_ND.split(self.batch_size):
                at_core, along, *_ = jvp(self._function(batch), (self.parameters,), (tangent,))
                batches.append((at_core.to(vectors) + along.to(vectors)) if affine else along.to(vectors))
            found.append(torch.cat(batches))
        return torch.stack(found, 1).unflatten(1, vectors.shape[:-1]).squeeze(-2)

    def pull(self, features_ND: Tensor, cotangent: Tensor) -> Tensor:
        """Return ``sum_i J_i^T b_i`` of ``[N, ..., C]``: ``[..., 1, p]`` in b's dtype, summed in the passes' dtype."""
        flat_NMC = cotangent.reshape(cotangent.shape[0], -1, cotangent.shape[-1])
        n_vectors, totals = flat_NMC.shape[1], list[dict[str, Tensor]]()
        batches = zip(features_ND.split(self.batch_size), flat_NMC.split(self.batch_size), strict=True)
        for batch, cotangent_BMC in batches:
            outputs, back, *_ = vjp(self._function(batch), self.parameters)
            for index in range(n_vectors):
                (found,) = back(cotangent_BMC[:, index].to(outputs), retain_graph=index + 1 < n_vectors)
                if index == len(totals):
                    totals.append(found)
                else:
                    for name, part in found.items():
                        totals[index][name].add_(part)
        flat_MP = torch.stack([torch.cat([part.reshape(-1) for part in total.values()]) for total in totals])
        return flat_MP.to(cotangent).reshape(*cotangent.shape[1:-1], 1, -1)
