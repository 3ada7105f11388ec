"""Many losses of few features in standard form, as one symmetric matrix for each unknown.

With P > n = D (D + 1) / 2 losses, the misfit depends on X through n numbers: ``|A X - t|^2 = |R x - Q^T t|^2 + rest``
for the QR factorisation of the P x n matrix of A. The n rows of R take the place of the P perturbations, so all work
after the factorisation is of size n.

Shapes: P perturbations, D features, N = D (D + 1) / 2 unknowns and rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfu.curvature.psd_fit.loss_form import LossForm, inverse_of
from sfu.curvature.psd_fit.standard_form import LinearMap, Spectrum, perron_bound
from sfu.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

# The rows hold N x D^2 numbers: 4 MB at D = 32.
COMPRESSED_DIMENSION = 32


class CompressedLossForm(LossForm):
    """Losses in standard form, from the QR factorisation of the measurements; for P > N."""

    def _observe(self) -> float:
        delta_PD, size = self.delta_PD, self.delta_PD.shape[1]
        of_perturbations = super().forward, super().adjoint
        self.operator_norm = perron_bound(
            lambda vector_P: of_perturbations[0](of_perturbations[1](vector_P)), delta_PD.square().sum(1)
        )
        row_N, column_N = torch.triu_indices(size, size, device=delta_PD.device)
        unknowns = len(row_N)
        length_N = (2 - (row_N == column_N).to(delta_PD)).sqrt() / 2
        rows_PN = delta_PD[:, row_N] * delta_PD[:, column_N] * length_N
        triangle = torch.linalg.qr(torch.cat([rows_PN, self.target[:, None]], 1), mode="r").R
        self.target = triangle[:unknowns, unknowns].contiguous()
        rows_NDD = delta_PD.new_zeros(unknowns, size, size)
        rows_NDD[:, row_N, column_N] = triangle[:unknowns, :unknowns] * length_N.reciprocal() / 2
        rows_NDD[:, column_N, row_N] = rows_NDD[:, row_N, column_N]
        self._rows_NDD, self._flat_NE = rows_NDD, rows_NDD.flatten(1)
        self.gram_PP = self._flat_NE @ self._flat_NE.T
        return float(triangle[unknowns, unknowns] ** 2)

    def forward(self, matrix_DD: Tensor) -> Tensor:
        return self._flat_NE @ matrix_DD.reshape(-1)

    def adjoint(self, dual: Tensor) -> Tensor:
        return (dual @ self._flat_NE).view(self.base_DD.shape)

    def evaluate(self, dual: Tensor) -> tuple[Spectrum, Tensor]:
        spectrum = Spectrum.of(self.base_DD + self.adjoint(dual))
        return spectrum, self.forward(spectrum.projection())

    def prefers_first_order(self) -> bool:
        return False

    def beyond_reach(self) -> bool:
        return True

    def jacobian(self, spectrum: Spectrum) -> LinearMap:
        return lambda vector_N: self.forward(spectrum.derivative(self.adjoint(vector_N)))

    def preconditioner(self, spectrum: Spectrum, precise: bool) -> LinearMap:
        """The Jacobian itself, formed in the eigenbasis."""
        rotated_NDD = spectrum.vector_DD.T @ self._rows_NDD @ spectrum.vector_DD
        return inverse_of((rotated_NDD * spectrum.omega()).flatten(1) @ rotated_NDD.flatten(1).T, self.weight)
