"""The interface of a membership attack.

An attack is a class that gives its name, says what it needs, and scores rows::

    class Loss(ScoringAttack, name="loss"):
        def scores(self, view):
            return -cross_entropies(view.logits_TC, view.labels_T).numpy()

Shapes: T target rows, S shadows, C classes, F rows to forget, K test rows of the same classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from sfu.evaluation.attacks.statistics import Roc, measure, roc
from sfu.registry import Registered, add_modules

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


NO_OTHERS = "there are no test rows of the forgotten classes to compare with"


class Needs(Enum):
    """What an attack needs besides the head's outputs."""

    head = "head"  # nothing
    shadows = "shadows"  # heads trained on other rows
    unlearned_shadows = "unlearned_shadows"  # such heads after the row's own method
    noise = "noise"  # how far the noise-free head is from Retrained


@dataclass(frozen=True)
class ShadowSignals:
    """Confidences ``[S, T]`` of the targets under shadows, and which targets each shadow was trained on, ``[S, T]``."""

    confidence_ST: NDArray[Any]
    inside_ST: NDArray[Any]


@dataclass(frozen=True)
class View:
    """What attacks see of one head.

    Attributes:
        logits_TC: Outputs for the targets.
        labels_T: Their labels.
        member_T: Which targets were trained on and forgotten. Scores must not depend on it.
        forget_losses_F: Cross-entropy of all rows to forget, in nats.
        test_losses_K: That of all test rows of the same classes.
        shadows: Shadows as they were trained.
        unlearned: Shadows after the row's own method.
        noise_shift: Distance of the head without its noise from Retrained, in standard deviations of the noise.
    """

    logits_TC: Tensor
    labels_T: Tensor
    member_T: NDArray[Any]
    forget_losses_F: Tensor
    test_losses_K: Tensor
    shadows: ShadowSignals | None = None
    unlearned: ShadowSignals | None = None
    noise_shift: float | None = None


@dataclass(frozen=True)
class Outcome:
    """Figures of an attack on one head, for ``metrics.json``, and its ROC curve, if there is one."""

    figures: dict[str, Any]
    curve: Roc | None = None


class Attack(Registered, ABC, kind="attack"):
    """Tells rows that were forgotten from rows that were never seen."""

    needs: ClassVar[Needs] = Needs.head

    @abstractmethod
    def measure(self, view: View, *, splits: int, seed: int) -> Outcome:
        """Attack one head. ``splits`` are those of attacks that are fitted to some of the rows."""


class ScoringAttack(Attack):
    """An attack that scores each target without being told which are members."""

    @abstractmethod
    def scores(self, view: View) -> NDArray[Any]:
        """Return a score for each target, ``[T]``; a larger one says that it was trained on."""

    def measure(self, view: View, *, splits: int, seed: int) -> Outcome:
        if not len(view.member_T):
            return Outcome({"note": NO_OTHERS})
        return outcome(self.scores(view), view.member_T, seed=seed)


def outcome(scores_T: NDArray[Any], member_T: NDArray[Any], *, seed: int) -> Outcome:
    """Return what scores show, or a note if some are not finite or one side has none."""
    import numpy as np

    scores_T = np.asarray(scores_T, dtype=np.float64)
    if not np.isfinite(scores_T).all():
        return Outcome({"note": "some scores are not finite: the head's outputs are too large"})
    members, others = scores_T[member_T], scores_T[~member_T]
    return Outcome(measure(members, others, seed=seed), roc(members, others))


add_modules(Attack, "sfu.evaluation.attacks", skip=("base", "design", "gaussians", "report", "signals", "statistics"))
