"""Decide from the forget set alone whether a Newton step may be applied, and say why or why not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sfu.curvature.sampling import DOUBTFUL, UNLIKE_A_SAMPLE
from sfu.heads.base import Head
from sfu.unlearning.base import UnlearningResult
from sfu.unlearning.further_steps import StepResult

NO_GAIN = "the step is predicted to be no better than nothing"


@dataclass(frozen=True)
class Decision:
    """Whether to apply a step.

    Attributes:
        predicted_distance_gain: Predicted reduction of the squared distance to Retrained; ``None`` if unknown.
        objections: Reasons to skip the step; none if it may be applied.
        remarks: What the reader should know of a step that is applied.
    """

    predicted_distance_gain: float | None
    objections: Sequence[str] = ()
    remarks: Sequence[str] = field(default_factory=list)

    def skipped(self, head: Head, details: Mapping[str, Any]) -> UnlearningResult:
        """Return the head untouched, with the objections as a note."""
        note = f"not applied: {'; '.join(self.objections)} (curvature.force=true applies it)"
        return UnlearningResult(
            head, applied=False, predicted_distance_gain=self.predicted_distance_gain, details=details, note=note
        )


def check_sample(ratio: float | None, force: bool) -> Decision | None:
    """Return the decision to skip any step, if the forget set is unlike a random sample and nobody forces it."""
    return Decision(None, [_unlike_a_sample(ratio)]) if is_unlike(ratio) and not force else None


def decide(
    ratio: float | None, gain: float | None, first: StepResult, further_remarks: Sequence[str], force: bool
) -> Decision:
    """Decide whether to apply the first step; ``force`` applies it whatever is predicted.

    ``ratio`` is the :func:`~sfu.curvature.sampling.sampling_ratio` of the forget set, and ``gain`` the predicted
    reduction of the squared distance; ``None`` if they are unknown.
    """
    although, remarks = "applied because curvature.force=true, although ", list(further_remarks)
    if is_unlike(ratio):
        remarks.insert(0, although + _unlike_a_sample(ratio))
    elif gain is not None and gain <= 0 and force:
        remarks.insert(0, although + NO_GAIN)
    elif ratio is not None and ratio > DOUBTFUL:
        remarks.insert(
            0,
            f"the forget set is not quite like a random sample (its gradient is {ratio:.0f} times what sampling "
            "explains); take the predicted gain with caution",
        )
    if force:
        return Decision(gain, remarks=remarks)
    if gain is not None and gain <= 0:
        return Decision(gain, [NO_GAIN, *remarks])
    if first.note is not None and not first.details["solve_residual"] < 1:
        return Decision(gain, [f"{first.note}, more than that of no step; raise head.l2"])
    return Decision(gain, remarks=remarks)


def is_unlike(ratio: float | None) -> bool:
    """Whether the forget set is so unlike a random sample that its curvature represents nothing else."""
    return ratio is not None and ratio > UNLIKE_A_SAMPLE


def _unlike_a_sample(ratio: float | None) -> str:
    times = "far more than" if ratio == math.inf else f"{ratio:.0f} times what"
    return (
        f"the forget set is unlike a random sample of the training data (its gradient is {times} sampling explains), "
        "so its curvature does not represent the rest and no gain can be predicted"
    )
