"""Names of settings as branches under way still import them; gone when they are merged."""

from __future__ import annotations

from typing import Any

from sfu.curvature.settings import (  # noqa: F401
    CurvatureSettings,
    GradientTerm,
    LowerBound,
    Measurement,
    Pairs,
    Prior,
    Regularization,
    Solver,
    Subspace,
    curvature_settings,
)
from sfu.data.datasets.base import Damaged, Dataset  # noqa: F401
from sfu.data.settings import BackboneSettings as BackboneConfig  # noqa: F401
from sfu.data.settings import ForgetSettings as ForgetConfig  # noqa: F401
from sfu.experiment.config import EvaluationSettings as EvaluationConfig  # noqa: F401
from sfu.experiment.config import Reuse, RunConfig, register  # noqa: F401
from sfu.heads.settings import AdamSettings as AdamConfig  # noqa: F401
from sfu.heads.settings import CoreWeights, HeadSettings, Training  # noqa: F401
from sfu.heads.settings import PretrainSettings as PretrainConfig  # noqa: F401
from sfu.heads.settings import SgdSettings as SgdConfig  # noqa: F401
from sfu.losses.base import make_loss
from sfu.operators.structure import Structure  # noqa: F401
from sfu.reporting.loggers.base import RunLogger
from sfu.schema import make
from sfu.seeds import SeedSettings as SeedsConfig  # noqa: F401
from sfu.unlearning.settings import NewtonSettings as NewtonConfig  # noqa: F401
from sfu.unlearning.settings import RowSettings as MethodConfig  # noqa: F401
from sfu.unlearning.settings import Tune  # noqa: F401


class _Names:
    def __getattr__(self, name: str) -> str:
        return name


Estimator: Any = _Names()


def CurvatureConfig(**given: Any) -> CurvatureSettings:
    return curvature_settings(given)


def HeadConfig(name: str = "linear", **given: Any) -> HeadSettings:
    return make(HeadSettings.named(name), {"name": name, **given}, f"head={name}")


def LossConfig(name: str = "quadratic", **given: Any) -> Any:
    return make_loss(name, **given)


def DatasetConfig(name: str, **given: Any) -> Dataset:
    return make(Dataset.named(name), {"name": name, **given}, f"dataset={name}")


def LoggerConfig(name: str = "none", **given: Any) -> RunLogger:
    return make(RunLogger.named(name), {"name": name, **given}, f"logger={name}")
