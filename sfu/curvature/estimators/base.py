"""What an estimator of the retained data's Hessian offers.

Estimating has two halves. :meth:`~CurvatureEstimator.observe` looks at examples, and
:meth:`~CurvatureEstimator.estimate` turns what it observed into a curvature operator. Observations of disjoint sets
merge, so cross-validation looks at every example once and estimates K + 1 times.

Shapes: C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sfu.curvature.observations import HessianObservation, merge_hessians
from sfu.curvature.settings import CurvatureSettings
from sfu.operators.base import CurvatureOperator
from sfu.operators.plan import Plan, plan_structure
from sfu.registry import Registered, add_modules
from sfu.request import Access, ForgetRequest, MethodContext, Retained

Observation = TypeVar("Observation")
SettingsT = TypeVar("SettingsT", bound=CurvatureSettings)


@dataclass(frozen=True)
class CurvatureEstimate:
    """An estimated Hessian: that of the mean objective, regulariser included.

    Its details are scalars worth reporting, and its note is a sentence for the reader if something went wrong.
    """

    operator: CurvatureOperator
    details: dict[str, Any] = field(default_factory=dict)
    note: str | None = None


class CurvatureEstimator(Registered, ABC, Generic[SettingsT, Observation], kind="estimator"):
    """Estimates the Hessian of the retained data at the trained head; registered under the name of its settings."""

    def __init__(self, settings: SettingsT) -> None:
        self.settings = settings

    @property
    def access(self) -> Access:
        """What the estimator may see; source-free unless overridden."""
        return Access.FORGET

    @property
    def needs_validation(self) -> bool:
        """Whether the estimate takes the forget set for a sample of the retained data.

        Such an estimate is cross-validated on the forget set. One that knows the retained curvature has nothing to
        validate.
        """
        return True

    def is_forget_hessian(self, request: ForgetRequest) -> bool:
        """Whether the estimate is the Hessian of the rows of ``request`` and nothing else.

        It is then l2 outside their span, so the request can be reduced (:mod:`sfu.curvature.span`).
        """
        return False

    def plan(self, request: ForgetRequest, count: int | None = None) -> Plan:
        """Choose how to hold the Hessian of ``count`` rows (by default those of the request) that are observed at once.

        Raises:
            ConfigError: ``curvature.structure`` does not fit the loss or the machine.
        """
        alone = not request.unlabelled and request.views_VFD is None  # products of several sources share no subspace
        return self._plan(request, count, validated=alone and self.is_forget_hessian(request))

    def _plan(self, request: ForgetRequest, count: int | None = None, *, validated: bool = False) -> Plan:
        head = request.head
        return plan_structure(
            head.layout, head.parameters_CE.shape[0], head.parameters_CE.shape[1], count or request.n_forget,
            head.parameters_CE.device, self.settings.structure, copies=20 if self.needs_validation else 3,
            validated=validated,
        )  # fmt: skip

    @abstractmethod
    def observe(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> Observation:
        """Look at the examples of ``request`` (or at ``retained``, if the access allows).

        Raises:
            SourceFreeError: The estimator needs the retained data, and none were given.
            ConfigError: The estimator cannot handle this head.
        """

    @abstractmethod
    def merge(self, observations: Sequence[Observation]) -> Observation:
        """Return the observation of the union of disjoint sets of examples."""

    @abstractmethod
    def estimate(self, observation: Observation, request: ForgetRequest) -> CurvatureEstimate:
        """Return the Hessian; uses only the head and the counts of ``request``.

        Raises:
            DataError: There are too few rows.
            SolverError: A fit found nothing finite.
        """


add_modules(CurvatureEstimator, "sfu.curvature.estimators")


class HessianEstimator(CurvatureEstimator[SettingsT, HessianObservation]):
    """An estimator that starts from the Hessian of rows: the forget rows, unless overridden."""

    def observe(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> HessianObservation:
        return HessianObservation(request.hessian(self.plan(request).structure), request.weight)

    def merge(self, observations: Sequence[HessianObservation]) -> HessianObservation:
        return merge_hessians(observations)

    def estimate(self, observation: HessianObservation, request: ForgetRequest) -> CurvatureEstimate:
        return CurvatureEstimate(observation.operator)


def make_estimator(settings: CurvatureSettings) -> CurvatureEstimator[Any, Any]:
    """Return the estimator that ``curvature.estimator`` names.

    Raises:
        ConfigError: Its settings cannot work.
    """
    kind: type[CurvatureEstimator[Any, Any]] = CurvatureEstimator.named(settings.estimator, "curvature.estimator")
    return kind(settings)
