"""What an estimator of the retained data's Hessian must offer.

Estimating has two halves. :meth:`~CurvatureEstimator.observe` looks at examples, :meth:`~CurvatureEstimator.estimate`
turns what was seen into a curvature operator. Observations of disjoint sets merge, so cross-validation looks at every
example once and estimates K + 1 times.

Shapes: C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from sfu.operators.base import CurvatureOperator
from sfu.operators.plan import Plan, plan_structure
from sfu.request import Access, ForgetRequest, MethodContext, RetainedSet

if TYPE_CHECKING:
    from sfu.settings import CurvatureConfig

Observation = TypeVar("Observation")


@dataclass(frozen=True)
class CurvatureEstimate:
    """An estimated Hessian.

    Attributes:
        operator: Of the mean objective, the regulariser included.
        details: Scalars worth keeping (solver status and the like).
        note: One sentence for the reader if something is amiss.
    """

    operator: CurvatureOperator
    details: dict[str, Any] = field(default_factory=dict)
    note: str | None = None


class HessianObservation(NamedTuple):
    """An observation that is a Hessian: that of a set of rows, and what the rows weigh."""

    operator: CurvatureOperator
    weight: float


def merge_hessians(parts: Sequence[HessianObservation]) -> HessianObservation:
    """The Hessian of the union of disjoint sets."""
    weight = sum(part.weight for part in parts)
    first, *others = (part.operator for part in parts)
    return HessianObservation(first.combine(others, [part.weight / weight for part in parts]), weight)


class CurvatureEstimator(ABC, Generic[Observation]):
    """Estimates the Hessian of the retained data at the trained head."""

    def __init__(self, config: CurvatureConfig) -> None:
        self.config = config

    @property
    def access(self) -> Access:
        """What the estimator may see; source-free unless overridden."""
        return Access.FORGET

    @property
    def is_exact(self) -> bool:
        """Whether the estimate is the retained Hessian itself, so that there is nothing to cross-validate."""
        return False

    @property
    def weights(self) -> tuple[float | None, ...]:
        """Settings among which cross-validation may choose besides rho and c; one, unless overridden."""
        return (None,)

    @property
    def blind_weight(self) -> float | None:
        """The one of :attr:`weights` to take where there are too few rows to choose among them."""
        return self.weights[0]

    def plan(self, request: ForgetRequest, count: int | None = None) -> Plan:
        """How the Hessian is to be held, for ``count`` rows (the forget rows unless given).

        Raises:
            ConfigError: ``curvature.structure`` does not fit the loss or the machine.
        """
        head = request.head
        return plan_structure(
            head.layout, head.parameters_CE.shape[0], head.parameters_CE.shape[1], count or request.n_forget,
            head.parameters_CE.device, self.config.structure, copies=3 if self.is_exact else 20,
        )  # fmt: skip

    @abstractmethod
    def observe(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None = None
    ) -> Observation:
        """Look at the examples of ``request`` (or at ``retained``, if the access allows)."""

    @abstractmethod
    def merge(self, observations: Sequence[Observation]) -> Observation:
        """The observation of the union of disjoint sets of examples."""

    @abstractmethod
    def estimate(
        self, observation: Observation, request: ForgetRequest, weight: float | None = None
    ) -> CurvatureEstimate:
        """The Hessian for one of :attr:`weights`; of ``request`` only the head and the counts are used."""


class HessianEstimator(CurvatureEstimator[HessianObservation]):
    """An estimator that starts from the Hessian of rows it sees: the forget rows, unless overridden."""

    def observe(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None = None
    ) -> HessianObservation:
        """Hessian of the forget rows."""
        return HessianObservation(request.hessian(self.plan(request).structure), request.weight)

    def merge(self, observations: Sequence[HessianObservation]) -> HessianObservation:
        """Hessian of the union."""
        return merge_hessians(observations)

    def estimate(
        self, observation: HessianObservation, request: ForgetRequest, weight: float | None = None
    ) -> CurvatureEstimate:
        """As seen."""
        return CurvatureEstimate(observation.operator)
