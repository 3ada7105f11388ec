r"""Shrinkage of the forget set's Hessian towards a multiple of the identity, by two formulas for the weight.

The Hessian of class c is the second moment of rows scaled by the root of their output curvature,
:math:`\sqrt{m_{ic}}\, a_i`; that is what is shrunk, a block for each class (one for all under the quadratic loss, the
diagonal blocks under softmax). With a bias the rows are centred on their weighted mean, which costs no accuracy, so
translating the features changes nothing.

Shapes: F forget rows, D features, E = D (+ 1 with bias), C classes, B blocks (1 or C).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sfu.curvature.estimators.base import CurvatureEstimate, CurvatureEstimator
from sfu.curvature.settings import CurvatureSettings
from sfu.errors import ConfigError, DataError
from sfu.lazy import torch
from sfu.losses.base import Layout
from sfu.operators.build import with_ridge
from sfu.request import ForgetRequest, MethodContext, Retained

if TYPE_CHECKING:
    from torch import Tensor


class CurvedRows(NamedTuple):
    """Design rows and what each adds to the Hessian of each block: output curvature times row weight."""

    design_FE: Tensor
    curvature_FB: Tensor
    weight: float


class Shrinkage(CurvatureEstimator[CurvatureSettings, CurvedRows]):
    """A shrunk second moment for each block, plus ``l2 R``; members bear the names of scikit-learn's functions."""

    def observe(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> CurvedRows:
        if request.head.feature_weights_CD is None:
            raise ConfigError(
                f"curvature.estimator={self.registered_name} shrinks the covariance of feature rows, and a "
                "linearised head has none. Use closed_form or psd_fit."
            )
        head, rows, design_FE = request.head, request.data(), request.design_FE
        hessian = head.loss.curvature(design_FE @ head.parameters_CE.T, request.labels_F)
        curvature_FC = hessian.diagonal if hessian.rank_one is None else hessian.diagonal - hessian.rank_one.square()
        if head.loss.layout is Layout.shared:
            curvature_FC = curvature_FC[:, :1]
        if rows.weights_N is not None:
            curvature_FC = curvature_FC * rows.weights_N[:, None].to(curvature_FC)
        return CurvedRows(design_FE, curvature_FC, rows.weight)

    def merge(self, observations: Sequence[CurvedRows]) -> CurvedRows:
        return CurvedRows(
            torch.cat([part.design_FE for part in observations]),
            torch.cat([part.curvature_FB for part in observations]),
            sum(part.weight for part in observations),
        )

    def estimate(self, observation: CurvedRows, request: ForgetRequest) -> CurvatureEstimate:
        head = request.head
        if observation.design_FE.shape[0] < 2:
            raise DataError("Shrinkage needs at least two rows. Use curvature.estimator=closed_form for one.")
        blocks, shrinkages = [], []
        for curvature_F in observation.curvature_FB.T:
            block_EE, shrinkage = self._block(observation, curvature_F, head.n_features)
            blocks.append(block_EE)
            shrinkages.append(shrinkage)
        operator = with_ridge(torch.stack(blocks), head.objective(), head.n_classes)
        return CurvatureEstimate(operator, {"shrinkage": float(np.mean(shrinkages))})

    def _block(self, observation: CurvedRows, curvature_F: Tensor, n_features: int) -> tuple[Tensor, float]:
        from sklearn import covariance

        features_FD = observation.design_FE[:, :n_features]
        share_F = curvature_F / observation.weight  # the data Hessian is sum share a a^T
        mass = float(share_F.sum())
        has_bias = n_features < observation.design_FE.shape[1]
        mean_D = (share_F @ features_FD) / mass if has_bias and mass > 0 else torch.zeros_like(features_FD[0])
        scaled_FD = (features_FD - mean_D) * (share_F * share_F.shape[0]).sqrt()[:, None]
        shrink = getattr(covariance, self.registered_name)
        shrunk, shrinkage = shrink(scaled_FD.cpu().numpy().astype(np.float64), assume_centered=True)
        block = torch.from_numpy(shrunk).to(features_FD)
        if has_bias:
            border = mass * mean_D
            top = torch.cat([block + mass * torch.outer(mean_D, mean_D), border[:, None]], dim=1)
            block = torch.cat([top, torch.cat([border, border.new_full((1,), mass)])[None]])
        return block, float(shrinkage)


class LedoitWolf(Shrinkage, name="ledoit_wolf"):
    """``sklearn.covariance.ledoit_wolf`` of the scaled forget rows, plus ``l2 R``.

    Source: Ledoit and Wolf, A well-conditioned estimator for large-dimensional covariance matrices, 2004.
    """


class Oas(Shrinkage, name="oas"):
    """``sklearn.covariance.oas`` of the scaled forget rows, plus ``l2 R``.

    Source: Chen, Wiesel, Eldar and Hero, Shrinkage algorithms for MMSE covariance estimation, 2010.
    """
