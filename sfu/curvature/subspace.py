r"""Restrict a head to a subspace: :math:`w = w^* + Q^T (c - Q w^*)` with K orthonormal rows of Q.

In the subspace a row is its outputs and a C x K Jacobian. The restricted head is a small head, to which perturbations,
observations and dense fits apply as to a linear head.

Shapes: F rows, C classes, K dimensions, P = C E parameters (p where the classes share them).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfu.curvature.settings import Subspace
from sfu.errors import ArtifactError, ConfigError
from sfu.heads.base import Head
from sfu.lazy import torch
from sfu.losses.base import Layout, Loss
from sfu.losses.chunks import Chunk, TableChunk
from sfu.losses.rows import Rows
from sfu.operators.base import CurvatureOperator
from sfu.operators.plan import available_memory
from sfu.request import ForgetRequest

if TYPE_CHECKING:
    from torch import Tensor

_DOUBLE = 1 << 26  # up to so many numbers, a basis is held in float64
_NOTHING = 1e-10
_UNITS = 10.0  # of the precision of the products
_BASES = 6  # held at one time: one for each of five folds, and one for the whole set


class TableRows(Rows):
    """Rows whose features are their outputs at the head and their Jacobian, ``[F, C (1 + K)]``.

    ``origin_1K`` are the coordinates at which the outputs were computed.
    """

    def __init__(self, features_FD: Tensor, labels_F: Tensor, loss: Loss, origin_1K: Tensor, **options: Any) -> None:
        super().__init__(features_FD, labels_F, loss, bias=False, **options)
        self._origin_1K, self.width, self.shared = origin_1K, origin_1K.shape[1], True

    def _chunk(self, features_BD: Tensor, labels_B: Tensor, share_B: Tensor) -> Chunk:
        table_BCX = features_BD.to(self.device, self.dtype).unflatten(1, (-1, 1 + self.width))
        return TableChunk(labels_B, share_B, table_BCX[..., 1:], table_BCX[..., 0], self._origin_1K)


@dataclass(frozen=True)
class RestrictedHead(Head):
    """A head in a subspace; parameters are ``[1, K]`` coordinates."""

    origin_1K: Tensor = field(kw_only=True)  # coordinates of the head that was restricted
    outputs_of_a_row: int = field(kw_only=True)  # C

    @property
    def n_classes(self) -> int:
        return self.outputs_of_a_row

    @property
    def n_features(self) -> int:
        """Numbers of a row: its outputs and its Jacobian."""
        return self.outputs_of_a_row * (1 + self.parameters_CE.shape[1])

    @property
    def layout(self) -> Layout:
        return Layout.dense

    def rows(self, features_ND: Tensor, labels_N: Tensor, weights_N: Tensor | None = None, **options: Any) -> Rows:
        like = self.parameters_CE
        return TableRows(
            features_ND, labels_N, self.loss, self.origin_1K, device=like.device, dtype=like.dtype,
            sample_weights_N=weights_N, **options,
        )  # fmt: skip

    def outputs(self, features_ND: Tensor, parameters_CE: Tensor) -> Tensor:
        table_NCX = features_ND.to(parameters_CE).unflatten(1, (self.n_classes, -1))
        return table_NCX[..., 0] + table_NCX[..., 1:] @ (parameters_CE - self.origin_1K)[0]

    def save(self, stem: str | Path) -> list[Path]:
        raise ArtifactError("a restricted head is never saved; this is a defect in sfu.")


def restrict(request: ForgetRequest, basis_KP: Tensor) -> ForgetRequest:
    """Return the request in the subspace; costs K passes over the rows."""
    head = request.head
    shape, like = head.parameters_CE.shape, head.parameters_CE
    tables = []
    for chunk in request.data().chunks():
        columns = [chunk.outputs(like), *(chunk.push(row_P.to(like).view(shape)) for row_P in basis_KP)]
        tables.append(torch.stack(columns, 2).flatten(1))
    own_1K = (basis_KP @ like.reshape(-1).to(basis_KP)).to(like)[None]
    gradient_1K = (basis_KP @ head.gradient_CE.reshape(-1).to(basis_KP)).to(like)[None]
    small = RestrictedHead(
        own_1K, gradient_1K, head.l2, head.n_train, loss=head.loss, weight=head.weight, origin_1K=own_1K,
        outputs_of_a_row=head.n_classes,
    )  # fmt: skip
    return ForgetRequest(small, torch.cat(tables), request.labels_F, request.weights_F)


def make_basis(
    kind: Subspace,
    request: ForgetRequest,
    hessian: CurvatureOperator,
    dimension: int,
    generator: torch.Generator,
    largest_double: int = _DOUBLE,
) -> Tensor:
    """Return K orthonormal rows ``[K, P]``: the Krylov space of the forget Hessian and the gradient, or a random one.

    There are fewer rows if the Krylov space ends earlier, or if the remainder of a vector is below the precision of the
    products, since it would be noise and not orthogonal. The basis is float64 up to ``largest_double`` numbers, and
    float32 beyond.

    Raises:
        ConfigError: ``curvature.dimension`` is above the number of parameters, or the vectors do not fit the device.
    """
    like = request.head.parameters_CE
    if dimension > like.numel():
        raise ConfigError(f"curvature.dimension={dimension} but the head has {like.numel()} parameters. Lower it.")
    dtype = torch.float64 if dimension * like.numel() <= largest_double else torch.float32
    need, memory = _BASES * dimension * like.numel() * dtype.itemsize, available_memory(like.device)
    if need > memory / 2:
        raise ConfigError(
            f"curvature.dimension={dimension} needs about {need / 2**30:.1f} GiB for directions of {like.numel():,} "
            f"numbers, once for each fold, and the device has {memory / 2**30:.1f} GiB. Lower curvature.dimension, or "
            "use curvature.estimator=closed_form."
        )
    nothing = max(_NOTHING, *(_UNITS * torch.finfo(held).eps for held in (dtype, request.data().precision)))
    basis_KP = torch.zeros(dimension, like.numel(), dtype=dtype, device=like.device)
    vector_P = request.newton_gradient().reshape(-1)
    for k in range(dimension):
        if kind is Subspace.random:
            vector_P = torch.randn(like.numel(), generator=generator, dtype=torch.float64).to(like)
        size = float(vector_P.norm())
        for _ in range(2):
            inside_K = basis_KP[:k] @ vector_P.to(dtype)
            vector_P = vector_P - (inside_K @ basis_KP[:k]).to(like)
        left = float(vector_P.norm())
        if not left > nothing * size:
            return basis_KP[:k]
        basis_KP[k] = vector_P / left
        if kind is Subspace.krylov:
            vector_P = hessian.matmul((vector_P / left).view_as(like)).reshape(-1)
    return basis_KP
