"""Source-free machine unlearning for PyTorch.

From Python::

    from sfu import LinearHead, unlearn

    head = LinearHead.from_module(model.fc, l2=5e-4, n_train=50_000, loss="softmax")
    result = unlearn(head, forget_features, forget_labels)

From the command line: ``sfu --help``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sfu.curvature.effective_l2 import EffectiveL2 as EffectiveL2
    from sfu.curvature.effective_l2 import effective_l2 as effective_l2
    from sfu.curvature.estimators.base import CurvatureEstimate as CurvatureEstimate
    from sfu.curvature.estimators.base import CurvatureEstimator as CurvatureEstimator
    from sfu.curvature.estimators.base import HessianEstimator as HessianEstimator
    from sfu.curvature.observations import HessianObservation as HessianObservation
    from sfu.curvature.settings import CurvatureSettings as CurvatureSettings
    from sfu.curvature.settings import curvature_settings as curvature_settings
    from sfu.data.datasets.base import FeatureDataset as FeatureDataset
    from sfu.data.datasets.base import ImageDataset as ImageDataset
    from sfu.data.images.image_set import ImageSet as ImageSet
    from sfu.data.raw_arrays import RawArrays as RawArrays
    from sfu.errors import ConfigError as ConfigError
    from sfu.errors import DataError as DataError
    from sfu.errors import SfuError as SfuError
    from sfu.evaluation.audit import Audit as Audit
    from sfu.evaluation.audit import evaluate as evaluate
    from sfu.heads.base import Head as Head
    from sfu.heads.files import load_head as load_head
    from sfu.heads.fit import fit as fit
    from sfu.heads.kept import Kept as Kept
    from sfu.heads.linear import LinearHead as LinearHead
    from sfu.heads.nearest_centroid import NearestCentroid as NearestCentroid
    from sfu.heads.training_record import TrainingRecord as TrainingRecord
    from sfu.losses.base import Constants as Constants
    from sfu.losses.base import Layout as Layout
    from sfu.losses.base import Loss as Loss
    from sfu.losses.base import OutputHessian as OutputHessian
    from sfu.losses.base import make_loss as make_loss
    from sfu.reporting.loggers.base import RunLogger as RunLogger
    from sfu.request import Access as Access
    from sfu.request import ForgetRequest as ForgetRequest
    from sfu.request import MethodContext as MethodContext
    from sfu.request import RetainedSet as RetainedSet
    from sfu.schema import setting as setting
    from sfu.unlearning.base import UnlearningMethod as UnlearningMethod
    from sfu.unlearning.result import UnlearningResult as UnlearningResult
    from sfu.unlearning.stream import RequestStream as RequestStream
    from sfu.unlearning.unlearn import unlearn as unlearn

__version__ = "0.1.0"

_HOMES = {
    "sfu.curvature.effective_l2": ("EffectiveL2", "effective_l2"),
    "sfu.curvature.estimators.base": (
        "CurvatureEstimate", "CurvatureEstimator", "HessianEstimator", "HessianObservation",
    ),
    "sfu.curvature.settings": ("CurvatureSettings", "curvature_settings"),
    "sfu.data.datasets.base": ("FeatureDataset", "ImageDataset"),
    "sfu.data.images.image_set": ("ImageSet",),
    "sfu.data.raw_arrays": ("RawArrays",),
    "sfu.errors": ("ConfigError", "DataError", "SfuError"),
    "sfu.evaluation.audit": ("Audit", "evaluate"),
    "sfu.heads.base": ("Head",),
    "sfu.heads.files": ("load_head",),
    "sfu.heads.fit": ("fit",),
    "sfu.heads.kept": ("Kept",),
    "sfu.heads.linear": ("LinearHead",),
    "sfu.heads.nearest_centroid": ("NearestCentroid",),
    "sfu.heads.training_record": ("TrainingRecord",),
    "sfu.losses.base": ("Constants", "Layout", "Loss", "OutputHessian", "make_loss"),
    "sfu.reporting.loggers.base": ("RunLogger",),
    "sfu.request": ("Access", "ForgetRequest", "MethodContext", "RetainedSet"),
    "sfu.schema": ("setting",),
    "sfu.unlearning.base": ("UnlearningMethod",),
    "sfu.unlearning.result": ("UnlearningResult",),
    "sfu.unlearning.stream": ("RequestStream",),
    "sfu.unlearning.unlearn": ("unlearn",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = ["__version__", *sorted(_MODULE_OF)]


if not TYPE_CHECKING:  # where a checker would take any name for known

    def __getattr__(name: str) -> Any:
        """Import the public names on first use, so that ``import sfu`` alone stays quick."""
        import importlib

        if name not in _MODULE_OF:
            raise AttributeError(f"module 'sfu' has no attribute '{name}'")
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
