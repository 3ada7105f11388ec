"""What an estimator of the retained data's Hessian must offer.

Estimating has two halves. :meth:`~CurvatureEstimator.observe` looks at examples, :meth:`~CurvatureEstimator.estimate`
turns what was seen into a Hessian block. Observations of disjoint sets merge, so cross-validation looks at every
example once and estimates K + 1 times.

Shapes: E = D (+ 1 with bias).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from sfu.unlearning.method import Access, RetainedSet, Tools
from sfu.unlearning.request import ForgetRequest

if TYPE_CHECKING:
    from sfu.settings import CurvatureConfig

Observation = TypeVar("Observation")


@dataclass(frozen=True)
class CurvatureEstimate:
    """An estimated Hessian block.

    Attributes:
        hessian_EE: Symmetric; of the mean objective, the regulariser included.
        details: Scalars worth keeping (solver status and the like).
        note: One sentence for the reader if something is amiss.
    """

    hessian_EE: Tensor
    details: dict[str, Any] = field(default_factory=dict)
    note: str | None = None


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

    @abstractmethod
    def observe(self, request: ForgetRequest, tools: Tools, retained: RetainedSet | None = None) -> Observation:
        """Look at the examples of ``request`` (or at ``retained``, if the access allows)."""

    @abstractmethod
    def merge(self, observations: Sequence[Observation]) -> Observation:
        """The observation of the union of disjoint sets of examples."""

    @abstractmethod
    def estimate(
        self, observation: Observation, request: ForgetRequest, weight: float | None = None
    ) -> CurvatureEstimate:
        """The Hessian block for one of :attr:`weights`; of ``request`` only the head and the counts are used."""
