r"""What an attacker reconstructs who holds the head before and after one request.

A step is curvature turned around: with the retained Hessian H_r, Retrained of a quadratic head has

.. math:: H_r\, (w_r - w^*) = \frac{V_f}{V_r} \bigl(d_f + l_2 R\, w^*\bigr), \qquad
          d_f = \frac1{V_f} \sum_{i \in F} v_i\, \nabla_z l_i\, a_i^T

so whoever has the two heads, the Hessian, l2 and the two counts gets the gradient d_f of the forgotten rows back. Its
rank is at most the number of rows. For one row it is the outer product of the errors of the outputs and the row, and
its right singular vector is the row up to scale.

Three attackers differ in the Hessian they have: ``exact`` knows H_r, ``own_data`` computes one from unlabelled rows of
the same kind (here the test rows), and ``identity`` takes the difference of the heads as it is.

Shapes: F forget rows, R retained rows, C classes, E = D (+ 1 with bias), S reconstructed directions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sfu.heads.base import Head
from sfu.heads.linear import LinearHead
from sfu.losses.rows import design_matrix
from sfu.operators.base import CurvatureOperator
from sfu.operators.build import build_operator
from sfu.operators.structure import Structure
from sfu.request import ForgetRequest, RetainedSet

ATTACKERS = ("exact", "own_data", "identity")


@dataclass(frozen=True)
class Reconstruction:
    """How well one attacker does. All values are from 0 to 1, but for the first, which may be negative.

    Attributes:
        gradient_cosine: Cosine between the reconstructed and the true gradient of the forgotten rows.
        row_cosine: Cosine between a forgotten row and the reconstructed directions, on average over the rows.
        other_row_cosine: The same for rows of the same kind that were never in training: what needs no attack.
        subspace_overlap: Mean squared cosine of the principal angles between the reconstructed directions and the span
            of the forgotten rows; random directions have the rank of the rows over E.
        directions: Number S of reconstructed directions.
    """

    gradient_cosine: float
    row_cosine: float
    other_row_cosine: float
    subspace_overlap: float
    directions: int


class WhiteBox:
    """Attacks on the head after a request, with the head before it."""

    def __init__(self, request: ForgetRequest, retained: RetainedSet, own_ND: Tensor) -> None:
        """Compute the gradient to find and the Hessians of the attackers.

        Args:
            request: The forgotten rows and the head before.
            retained: The retained rows, whose Hessian the first attacker knows.
            own_ND: The attacker's own features of the same kind.
        """
        request = request.in_float64().at_retained_l2()
        head = self._head = request.head
        self._ratio = request.step_ratio
        self._truth_CE = request.forget_gradient() - head.objective().gradient_without_rows(head.parameters_CE)
        self._rows_FE = request.design_FE.to(head.parameters_CE)
        self._own_NE = design_matrix(own_ND, head.bias, head.parameters_CE.device, torch.float64)
        self._hessians: dict[str, CurvatureOperator | None] = {"identity": None}
        if isinstance(head, LinearHead):
            rows = head.rows(retained.features_RD, retained.labels_R, retained.weights_R)
            for name, part in (("exact", rows), ("own_data", head.unlabelled_rows(own_ND))):
                self._hessians[name] = build_operator(
                    head.objective(), part, head.parameters_CE, Structure.products
                )  # fmt: skip

    def attack(self, new: Head) -> dict[str, dict[str, Any]] | None:
        """Return what each attacker finds, by name; ``None`` if the head has not changed, or is not linear."""
        if not isinstance(self._head, LinearHead):
            return None
        move_CE = new.parameters_CE.to(self._head.parameters_CE) - self._head.parameters_CE
        if not bool(move_CE.any()):
            return None
        return {name: asdict(self._measure(self.reconstruct(move_CE, name))) for name in ATTACKERS}

    def reconstruct(self, move_CE: Tensor, attacker: str) -> Tensor:
        """Return an attacker's estimate of the data gradient of the forgotten rows, ``[C, E]``."""
        hessian, head = self._hessians[attacker], self._head
        if hessian is None:
            return move_CE  # without a scale, the part of the regulariser cannot be taken off
        return hessian.matmul(move_CE) / self._ratio - head.objective().gradient_without_rows(head.parameters_CE)

    def _measure(self, found_CE: Tensor) -> Reconstruction:
        count = min(len(self._rows_FE), found_CE.shape[0] - int(self._head.loss.shift_invariant))
        directions_SE = torch.linalg.svd(found_CE, full_matrices=False).Vh[:count]
        basis_EF, sizes_F, _ = torch.linalg.svd(self._rows_FE.T, full_matrices=False)
        span_EF = basis_EF[:, sizes_F > sizes_F.max() * 1e-10]
        return Reconstruction(
            _cosine(found_CE, self._truth_CE),
            _within(self._rows_FE, directions_SE),
            _within(self._own_NE, directions_SE),
            float((directions_SE @ span_EF).square().sum()) / len(directions_SE),
            len(directions_SE),
        )


def _cosine(one: Tensor, other: Tensor) -> float:
    size = float(one.norm() * other.norm())
    return float((one * other).sum()) / size if size > 0 else 0.0


def _within(rows_NE: Tensor, directions_SE: Tensor) -> float:
    """Return the mean cosine between rows and the span of orthonormal directions; a row of zeros counts as 0."""
    sizes_N = rows_NE.norm(dim=1)
    return float(((rows_NE @ directions_SE.T).norm(dim=1) / sizes_N.clamp(min=torch.finfo(torch.float64).tiny)).mean())
