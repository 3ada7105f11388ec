"""The head of a linearised network: parameters w that multiply the Jacobian of its last layers.

Shapes: N rows, D numbers of an activation, C classes, p parameters; parameters are ``[1, p]``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from sfu.errors import DataError
from sfu.heads.base import Head
from sfu.heads.linearised.core import Core
from sfu.heads.linearised.rows import TangentRows
from sfu.losses import Layout, Rows


@dataclass(frozen=True)
class LinearisedHead(Head):
    """``f(x) = f_c(x) + J_c(x) w``; everything in w is regularised, the layers' biases too.

    Attributes:
        core: The network at w_c, which saw no user data.
    """

    core: Core = field(kw_only=True)

    def _check(self) -> None:
        if self.parameters_CE.shape != (1, self.core.n_parameters):
            raise DataError(
                f"the head's parameters are {list(self.parameters_CE.shape)}; the linearised layers have "
                f"[1, {self.core.n_parameters}]."
            )
        if self.bias or self.data_hessian is not None or self.certificate is not None:
            raise DataError("a linearised head has no bias of its own, no stored curvature and no certificate.")

    @property
    def n_classes(self) -> int:
        """C."""
        return self.core.n_classes

    @property
    def n_features(self) -> int:
        """D."""
        return self.core.n_features

    @property
    def layout(self) -> Layout:
        """The classes share all parameters, of which there are too many for a matrix."""
        return Layout.products

    def rows(self, features_ND: Tensor, labels_N: Tensor, weights_N: Tensor | None = None, **options: Any) -> Rows:
        """Labelled activations."""
        like = self.parameters_CE
        return TangentRows(
            features_ND, labels_N, self.loss, self.core, device=like.device, dtype=like.dtype,
            sample_weights_N=weights_N, **options,
        )  # fmt: skip

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Self:
        """Parameters to the device and dtype, the core to the device: its dtype stays."""
        return replace(super().to(device, dtype), core=self.core.to(device))

    def outputs(self, features_ND: Tensor, parameters_CE: Tensor) -> Tensor:
        """``f_c + J w``; its gradient is one reverse pass."""
        if features_ND.requires_grad:
            return self.core.push(features_ND, parameters_CE, affine=True)
        found: Tensor = _Push.apply(parameters_CE, features_ND, self.core, True)
        return found

    def save(self, stem: Path) -> list[Path]:
        """Write the parameters, and beside them the core, once for all heads of a folder."""
        from sfu.heads.linearised.files import save_head

        return save_head(self, stem)


class _Push(torch.autograd.Function):
    """``J v`` or ``f_c + J v``, whose gradient in v is :class:`_Pull`: neither is taped operation by operation."""

    @staticmethod
    def forward(context: Any, vector_1P: Tensor, features_ND: Tensor, core: Core, affine: bool) -> Tensor:
        context.features_ND, context.core = features_ND, core
        return core.push(features_ND, vector_1P.detach(), affine=affine)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _Pull.apply(gradients[0], context.features_ND, context.core), None, None, None


class _Pull(torch.autograd.Function):
    """``J^T b``, whose gradient in b is :class:`_Push`."""

    @staticmethod
    def forward(context: Any, bent_NC: Tensor, features_ND: Tensor, core: Core) -> Tensor:
        context.features_ND, context.core = features_ND, core
        return core.pull(features_ND, bent_NC.detach())

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _Push.apply(gradients[0], context.features_ND, context.core, False), None, None
