r"""The interface of a loss, as a function of the outputs :math:`z = W a` of one example.

With :math:`l(z, y)` convex in z, the derivatives in the parameters follow from those in the outputs by the design row
a:

.. math:: \nabla_W\, l = \nabla_z l \; a^T, \qquad \nabla^2_W\, l = \nabla^2_z l \otimes a a^T

so a loss is its value, its slope :math:`\nabla_z l` and its :math:`C \times C` output Hessian. The output Hessian is
never formed: it is a diagonal, minus a rank-one matrix for softmax.

Shapes: N rows, C classes; outputs are ``[N, ..., C]``, the axes between holding several parameter points. B blocks of
values: C for a loss that is a sum over classes, else 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor

from sfu.errors import ConfigError


class Layout(Enum):
    """The shape of the Hessian over all parameters."""

    shared = "shared"  # the same E x E block for every class, whatever the parameters
    blocks = "blocks"  # an E x E block for each class
    dense = "dense"  # classes are coupled
    products = "products"  # classes share all parameters: no matrix, whatever the loss


@dataclass(frozen=True)
class Constants:
    r"""Bounds on the derivatives of a loss in its outputs; infinite where there is none.

    Multiply by powers of the largest row norm for the parameters: ``|grad| <= C |a|``, and
    :math:`\|\nabla^2 l(W) - \nabla^2 l(W')\| \le \gamma \|W - W'\| |a|^3`.

    Attributes:
        gradient_bound: C, the largest norm of the slope (of one class's slope for a sum over classes).
        curvature_bound: The largest eigenvalue of the output Hessian.
        curvature_lipschitz: gamma, the Lipschitz constant of the output Hessian.
    """

    gradient_bound: float
    curvature_bound: float
    curvature_lipschitz: float


@dataclass(frozen=True)
class OutputHessian:
    """``diag(diagonal) - rank_one rank_one^T`` for each row, in the axes of the outputs.

    Attributes:
        diagonal: ``[N, ..., C]``.
        rank_one: ``[N, ..., C]``, or ``None`` for a loss that is a sum over classes.
    """

    diagonal: Tensor
    rank_one: Tensor | None = None

    def apply(self, vectors: Tensor) -> Tensor:
        """Multiply vectors of the outputs' shape (broadcast over the middle axes)."""
        if self.rank_one is None:
            return self.diagonal * vectors
        along = (self.rank_one * vectors).sum(-1, keepdim=True)
        return self.diagonal * vectors - self.rank_one * along

    def dense(self) -> Tensor:
        """Return the matrices, ``[N, ..., C, C]``."""
        full = torch.diag_embed(self.diagonal)
        if self.rank_one is not None:
            full = full - self.rank_one[..., :, None] * self.rank_one[..., None, :]
        return full

    def to_float32(self) -> OutputHessian:
        """Convert; where both are one tensor, as for softmax, they stay one."""
        diagonal = self.diagonal.float()
        if self.rank_one is None:
            return OutputHessian(diagonal)
        return OutputHessian(diagonal, diagonal if self.rank_one is self.diagonal else self.rank_one.float())

    def unsqueeze(self) -> OutputHessian:
        """Insert an axis before the last, to apply it to several vectors a row, ``[N, M, C]``."""
        rank_one = None if self.rank_one is None else self.rank_one[:, None]
        return OutputHessian(self.diagonal[:, None], rank_one)

    def trace(self) -> Tensor:
        """Trace of each row's matrix, ``[N, ...]``."""
        trace = self.diagonal.sum(-1)
        return trace if self.rank_one is None else trace - self.rank_one.square().sum(-1)


@dataclass(frozen=True)
class Loss(ABC):
    """A convex differentiable loss.

    Attributes:
        class_weights: A weight for every class, multiplied into the weight of each of its examples; ``None`` for 1.
    """

    class_weights: tuple[float, ...] | None = None

    name: ClassVar[str]
    layout: ClassVar[Layout]
    shift_invariant: ClassVar[bool] = False
    """Whether adding one number to all outputs changes nothing."""
    attained: ClassVar[bool] = True
    """Whether an example's loss is smallest somewhere, rather than falling forever as its outputs grow."""

    def __post_init__(self) -> None:
        """Check the class weights.

        Raises:
            ConfigError: A weight is not a finite number above 0.
        """
        weights = self.class_weights
        if weights is not None and not all(math.isfinite(w) and w > 0 for w in weights):
            raise ConfigError(f"loss.class_weights={list(weights)}. Give a finite number above 0 for each class.")

    @property
    @abstractmethod
    def constants(self) -> Constants:
        """Bounds for theory, each with its derivation."""

    @abstractmethod
    def values(self, outputs: Tensor, labels_N: Tensor) -> Tensor:
        """Value of each example, ``[N, ..., B]``; their sum over B is the loss."""

    @abstractmethod
    def slopes(self, outputs: Tensor, labels_N: Tensor) -> Tensor:
        """Gradient in the outputs, ``[N, ..., C]``."""

    @abstractmethod
    def curvature(self, outputs: Tensor, labels_N: Tensor) -> OutputHessian:
        """Hessian in the outputs."""

    @property
    def separable(self) -> bool:
        """Whether the loss is a sum over classes."""
        return self.layout is not Layout.dense

    def row_weights(self, labels_N: Tensor, sample_weights_N: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Return each example's sample weight times its class weight, ``[N]``, or ``None`` if all are 1.

        Raises:
            ConfigError: There are fewer class weights than classes among the labels.
        """
        if self.class_weights is None:
            return None if sample_weights_N is None else sample_weights_N.to(labels_N.device, dtype)
        if labels_N.numel() and int(labels_N.max()) >= len(self.class_weights):
            raise ConfigError(
                f"loss.class_weights has {len(self.class_weights)} entries but a label is {int(labels_N.max())}. Give "
                "one weight for each class."
            )
        of_class_N = torch.tensor(self.class_weights, dtype=dtype, device=labels_N.device)[labels_N]
        return of_class_N if sample_weights_N is None else of_class_N * sample_weights_N.to(of_class_N)

    def as_json(self) -> dict[str, Any]:
        """Return the name and parameters; :func:`sfu.losses.registry.loss_from_json` reads them."""
        return {"name": self.name, **asdict(self)}


def signs(labels_N: Tensor, like: Tensor) -> Tensor:
    """Return 1 for the label's class and -1 for the others, in the shape of :func:`one_hot`."""
    return 2 * one_hot(labels_N, like) - 1


def one_hot(labels_N: Tensor, like: Tensor) -> Tensor:
    """Return zeros and ones ``[N, 1, ..., C]`` that broadcast against outputs ``[N, ..., C]``."""
    hot = torch.nn.functional.one_hot(labels_N, like.shape[-1]).to(like.dtype)
    return hot.reshape(labels_N.shape[0], *[1] * (like.ndim - 2), like.shape[-1])
