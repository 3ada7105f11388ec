r"""The forget Hessian mixed with the second moments of public, unlabelled features from the same backbone.

.. math:: H = (1 - \alpha) S_f + \alpha S_{public} + l_2 R

The Hessian of the quadratic loss does not depend on labels, so any images like the training ones serve. The weight
:math:`\alpha` is chosen with rho and c by cross-validation on the forget set: public data that are unlike the training
data get little weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfu.curvature.estimators.base import CurvatureEstimate, CurvatureEstimator
from sfu.data.datasets.features import read_arrays
from sfu.data.feature_data import check_features
from sfu.errors import ConfigError, DataError
from sfu.heads.moments import Moments, compute_moments
from sfu.unlearning.method import RetainedSet, Tools
from sfu.unlearning.request import ForgetRequest

if TYPE_CHECKING:
    from sfu.settings import CurvatureConfig

_WEIGHTS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 0.95, 1.0)


class Reference(CurvatureEstimator[Moments]):
    """Forget Hessian and public second moments, in the proportion that cross-validation likes best."""

    def __init__(self, config: CurvatureConfig) -> None:
        """Find the file.

        Raises:
            ConfigError: No file is named, or its type is not read.
            DataError: It does not exist.
        """
        super().__init__(config)
        if not config.reference_path:
            raise ConfigError(
                "curvature.estimator=reference needs curvature.reference_path: an .npz or .safetensors file whose "
                f"array '{config.reference_key}' holds public features [rows, D] from the same backbone."
            )
        self._path = Path(config.reference_path).expanduser()
        if not self._path.is_file():
            raise DataError(f"curvature.reference_path={self._path} does not exist (looked from {Path.cwd()}).")
        self._public: Tensor | None = None

    @property
    def weights(self) -> tuple[float, ...]:
        """The given weight of the public data, or a grid of them."""
        given = self.config.reference_weight
        return _WEIGHTS if given is None else (given,)

    @property
    def blind_weight(self) -> float:
        """Public data alone: a few forget rows say less than they do."""
        return self.weights[-1]

    def observe(self, request: ForgetRequest, tools: Tools, retained: RetainedSet | None = None) -> Moments:
        """Second moments of the forget rows; reads the public file the first time."""
        if self._public is None:
            self._public = self._read(request, tools.normalize_rows)
        return request.moments()

    def merge(self, observations: Sequence[Moments]) -> Moments:
        """Moments of the union."""
        return Moments.merge(observations)

    def estimate(self, observation: Moments, request: ForgetRequest, weight: float | None = None) -> CurvatureEstimate:
        """Mix; ``weight`` is that of the public data (by default the first of :attr:`weights`)."""
        assert self._public is not None
        alpha = self.weights[0] if weight is None else weight
        head = request.head
        mixed = (1 - alpha) * observation.second_EE + alpha * self._public
        return CurvatureEstimate(mixed + torch.diag(head.l2 * head.regularized_E), {"reference_weight": alpha})

    def _read(self, request: ForgetRequest, normalize_rows: bool) -> Tensor:
        key, head = self.config.reference_key, request.head
        arrays = read_arrays(self._path, (key,), "curvature.reference_path")
        if key not in arrays:
            raise DataError(f"curvature.reference_path={self._path} has no array '{key}'; set curvature.reference_key.")
        features = torch.from_numpy(check_features(arrays[key], f"curvature.reference_path={self._path}: {key}"))
        if features.shape[1] != head.n_features:
            raise DataError(
                f"curvature.reference_path={self._path}: {key} is {features.shape[1]} wide but the head takes "
                f"{head.n_features}; extract it with the backbone the head was trained on."
            )
        if normalize_rows:
            features = torch.nn.functional.normalize(features, dim=1)
        labels = torch.zeros(features.shape[0], dtype=torch.int64)
        like = head.parameters_CE
        return compute_moments(features, labels, 1, bias=head.bias, device=like.device, dtype=like.dtype).second_EE
