r"""Replace a request of few rows by an equivalent one of few features.

The rows :math:`X` of a request span at most as many dimensions as there are rows. With orthonormal columns :math:`Q` of
that span, a row x becomes :math:`Q^T x` and weights :math:`w_c` become :math:`Q^T w_c`. What a class's vectors (its
weights, the stored gradient, the noise of objective perturbation) have outside the span becomes a few more coordinates,
in which every row is 0. These directions may differ between the classes, because no row tells them apart. The map is
an isometry and keeps all outputs, so objectives, gradients, Hessians and norms stay what they were, for every loss. All
other directions are left out: there the Hessian is l2 and no step goes.

Shapes: F rows, D features, C classes, E = D (+ 1 with bias), V vectors of each class, S = F + V reduced features.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sfu.heads.linear import LinearHead
from sfu.lazy import torch
from sfu.losses.objective import Objective
from sfu.request import ForgetRequest

if TYPE_CHECKING:
    from torch import Tensor

_WORTHWHILE = 0.75
"""Largest share of the features that may be left: decompositions then take less than half of the time."""


@dataclass(frozen=True, repr=False)
class SpanHead(LinearHead):
    """A head on the reduced features; each class had ``unseen`` more."""

    unseen: int = field(kw_only=True)

    def objective(self) -> Objective:
        return replace(super().objective(), unseen=self.unseen)


@dataclass(frozen=True)
class Reduction:
    """An equivalent request of fewer features, and the way back.

    Attributes:
        request: The reduced request; its head is of no use outside the computation of a step.
        basis_DF: The orthonormal columns Q.
        outside_VCD: The further directions of each class.
    """

    request: ForgetRequest
    basis_DF: Tensor
    outside_VCD: Tensor

    def lift(self, vectors_CE: Tensor) -> Tensor:
        """Return vectors of the reduced parameters, such as a step, as vectors of the head's own."""
        inside, width = self.basis_DF.shape[1], self.basis_DF.shape[1] + self.outside_VCD.shape[0]
        features_CD = vectors_CE[:, :inside] @ self.basis_DF.T
        features_CD += torch.einsum("cv,vcd->cd", vectors_CE[:, inside:width], self.outside_VCD)
        return torch.cat([features_CD, vectors_CE[:, width:]], 1)


def reduce_request(request: ForgetRequest) -> Reduction | None:
    """Return the equivalent request of fewer features, or ``None`` if that would not save much.

    Only a linear head has such a request. Its head should be float64 (:meth:`~sfu.request.ForgetRequest.in_float64`).
    """
    head, views = request.head, request.views_VFD
    if type(head) is not LinearHead:
        return None
    like_CE = head.parameters_CE
    vectors = [like_CE, head.gradient_CE]
    if head.certificate is not None:
        vectors.append(head.certificate.noise_CE)
    if head.unfinished_CE is not None:
        vectors.append(head.unfinished_CE)
    rows = [request.features_FD, *([] if views is None else views), *request.unlabelled]
    count = sum(part.shape[0] for part in rows)
    width = count + len(vectors)
    if width > _WORTHWHILE * head.n_features:
        return None
    basis_DF, coordinates_FF = torch.linalg.qr(torch.cat([part.to(like_CE) for part in rows]).T)
    small_FS = torch.nn.functional.pad(coordinates_FF.T, (0, len(vectors)))
    outside_VCD = _outside(torch.stack([vector[:, : head.n_features] for vector in vectors]), basis_DF)

    def reduced(vector_CE: Tensor) -> Tensor:
        features_CD = vector_CE[:, : head.n_features].to(like_CE)
        inside_CF, beside_CV = features_CD @ basis_DF, torch.einsum("cd,vcd->cv", features_CD, outside_VCD)
        return torch.cat([inside_CF, beside_CV, vector_CE[:, head.n_features :].to(like_CE)], 1)

    certificate = head.certificate
    if certificate is not None:
        certificate = replace(certificate, secret_CE=reduced(certificate.noise_CE))
    small = SpanHead(
        reduced(like_CE), reduced(head.gradient_CE), head.l2, head.n_train, head.bias, head.loss, weight=head.weight,
        certificate=certificate, forgotten=head.forgotten, recipe=head.recipe,
        unfinished_CE=None if head.unfinished_CE is None else reduced(head.unfinished_CE),
        unseen=head.n_features - width,
    )  # fmt: skip
    own, n_forget = small_FS[: request.features_FD.shape[0]], request.features_FD.shape[0]
    shown = None if views is None else small_FS[n_forget : n_forget * (1 + len(views))].unflatten(0, (len(views), -1))
    further = small_FS[count - sum(len(part) for part in request.unlabelled) :]
    unlabelled = further.split([len(part) for part in request.unlabelled]) if request.unlabelled else ()
    made = replace(request, head=small, features_FD=own, views_VFD=shown, unlabelled=tuple(unlabelled))
    return Reduction(made, basis_DF, outside_VCD)


def _outside(vectors_VCD: Tensor, basis_DF: Tensor) -> Tensor:
    """Return orthonormal directions outside the span for each class, ``[V, C, D]``; 0 where there is nothing left."""
    found: list[Tensor] = []
    for vector_CD in vectors_VCD:
        size_C1 = vector_CD.norm(dim=1, keepdim=True)
        left_CD = vector_CD
        for _ in range(2):  # once more, for what rounding has left
            left_CD = left_CD - (left_CD @ basis_DF) @ basis_DF.T
            for direction_CD in found:
                left_CD = left_CD - (left_CD * direction_CD).sum(1, keepdim=True) * direction_CD
        norm_C1 = left_CD.norm(dim=1, keepdim=True)
        eps = torch.finfo(left_CD.dtype).eps
        found.append(torch.where(norm_C1 > 10 * eps * size_C1, left_CD / norm_C1, 0.0))
    return torch.stack(found)
