r"""The forget Hessian mixed with that of public, unlabelled features from the same backbone.

.. math:: H = (1 - \alpha) H_f + \alpha H_{public}

The Hessian does not depend on labels for the quadratic, logistic and softmax losses, so any images like the training
ones serve; where it does (Huberised hinge, class weights) the head's own predictions stand for them. The weight
:math:`\alpha` is chosen with rho and c by cross-validation on the forget set: public data that are unlike the training
data get little weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sfu.curvature.estimators.base import CurvatureEstimate, HessianEstimator
from sfu.curvature.observations import HessianObservation
from sfu.curvature.settings import ReferenceSettings
from sfu.data.datasets.features import read_feature_file
from sfu.data.raw_arrays import check_features
from sfu.errors import ConfigError, DataError
from sfu.lazy import torch
from sfu.operators.base import CurvatureOperator
from sfu.operators.build import build_operator
from sfu.operators.structure import Structure
from sfu.request import ForgetRequest, MethodContext, Retained

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHTS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 0.95, 1.0)


class Reference(HessianEstimator[ReferenceSettings], name="reference"):
    """Forget Hessian and public Hessian, mixed in the proportion that cross-validation chooses."""

    def __init__(self, settings: ReferenceSettings) -> None:
        """Find the file.

        Raises:
            ConfigError: No file is named.
            DataError: The file does not exist.
        """
        super().__init__(settings)
        if not settings.reference_path:
            raise ConfigError(
                "curvature.estimator=reference needs curvature.reference_path: an .npz or .safetensors file whose "
                f"array '{settings.reference_key}' holds public features [rows, D] from the same backbone."
            )
        self._path = Path(settings.reference_path).expanduser()
        if not self._path.is_file():
            raise DataError(
                f"curvature.reference_path={self._path} does not exist (relative paths start at {Path.cwd()})."
            )
        self._features: Tensor | None = None
        self._cached: tuple[object, Tensor, CurvatureOperator] | None = None  # the tensor keeps its address in use

    @property
    def weights(self) -> tuple[float, ...]:
        given = self.settings.reference_weight
        return _WEIGHTS if given is None else (given,)

    @property
    def default_weight(self) -> float:
        """Use the public data alone, since a few forget rows say less than they do."""
        return self.weights[-1]

    def observe(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> HessianObservation:
        if self._features is None:
            self._features = self._read(request, context.normalize_rows)
        return super().observe(request, context, retained)

    def estimate(
        self, observation: HessianObservation, request: ForgetRequest, weight: float | None = None
    ) -> CurvatureEstimate:
        alpha = self.default_weight if weight is None else weight
        mixed = observation.operator.combine([self._public_hessian(observation, request)], [1 - alpha, alpha])
        return CurvatureEstimate(mixed, {"reference_weight": alpha})

    def _public_hessian(self, observation: HessianObservation, request: ForgetRequest) -> CurvatureOperator:
        """Compute the public Hessian once for each point at which the head is looked at."""
        assert self._features is not None
        head = request.head
        key = (head.parameters_CE.data_ptr(), head.parameters_CE.dtype, observation.operator.structure)
        if self._cached is None or self._cached[0] != key:
            rows = head.rows(self._features, head.logits(self._features).argmax(1), cache=True)
            structure = Structure(observation.operator.structure)
            made = build_operator(head.objective(), rows, head.parameters_CE, structure)
            self._cached = (key, head.parameters_CE, made)
        return self._cached[2]

    def _read(self, request: ForgetRequest, normalize_rows: bool) -> Tensor:
        key, head = self.settings.reference_key, request.head
        arrays = read_feature_file(self._path, (key,), "curvature.reference_path")
        if key not in arrays:
            raise DataError(f"curvature.reference_path={self._path} has no array '{key}'. Set curvature.reference_key.")
        features = torch.from_numpy(check_features(arrays[key], f"curvature.reference_path={self._path}: {key}"))
        if features.shape[1] != head.n_features:
            raise DataError(
                f"curvature.reference_path={self._path}: {key} is {features.shape[1]} wide but the head takes "
                f"{head.n_features}. Extract it with the backbone the head was trained on."
            )
        return torch.nn.functional.normalize(features, dim=1) if normalize_rows else features
