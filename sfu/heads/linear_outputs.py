"""``a W^T`` as one product, for many W at once, too.

Mapped over W by ``torch.func.vmap``, an ordinary product becomes a batch of small ones, each with a copy of the rows:
on a CPU several times slower than one product with all W stacked.

Shapes: B rows, E parameters of a class, C classes, M heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LinearOutputs(torch.autograd.Function):
    """``design_BE @ parameters_CE.T``."""

    @staticmethod
    def forward(design_BE: Tensor, parameters_CE: Tensor) -> Tensor:
        """The product."""
        return design_BE @ parameters_CE.T

    @staticmethod
    def setup_context(context: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Keep both factors."""
        context.save_for_backward(*inputs)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The other factor's product with the gradient, for each that is asked for."""
        design_BE, parameters_CE = context.saved_tensors
        (gradient_BC,) = gradients
        of_design, of_parameters = context.needs_input_grad
        return (
            gradient_BC @ parameters_CE if of_design else None,
            gradient_BC.mT @ design_BE if of_parameters else None,
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], *inputs: Tensor) -> tuple[Tensor, int]:
        """Rows that are the same for all heads meet all heads stacked; otherwise as a product is mapped."""
        design, parameters = inputs
        if in_dims[0] is None and in_dims[1] is not None and design.ndim == 2:
            stacked_MCE = parameters.movedim(in_dims[1], 0)
            flat_BQ: Tensor = LinearOutputs.apply(design, stacked_MCE.flatten(0, 1))
            return flat_BQ.unflatten(1, stacked_MCE.shape[:2]), 1
        design = design if in_dims[0] is None else design.movedim(in_dims[0], 0)
        parameters = parameters if in_dims[1] is None else parameters.movedim(in_dims[1], 0)
        return design @ parameters.mT, 0
