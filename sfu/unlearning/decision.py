"""Decide from the forget set alone whether a Newton step may be applied, and say what limits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sfu.curvature.caution import Assessment
from sfu.heads.base import Head
from sfu.unlearning.further_steps import StepResult
from sfu.unlearning.result import Remark, UnlearningResult

NO_GAIN = "the step is predicted to be no better than nothing"
_ALTHOUGH = "applied because curvature.on_doubt=apply, although "


@dataclass(frozen=True)
class Decision:
    """Whether to apply a step.

    Attributes:
        predicted_distance_gain: Predicted reduction of the squared distance to Retrained; ``None`` if unknown.
        objections: Reasons to skip the step; none if it may be applied.
        remarks: What the reader should know of a step that is applied.
    """

    predicted_distance_gain: float | None
    objections: Sequence[Remark] = ()
    remarks: Sequence[Remark] = field(default_factory=list)

    def skipped(self, head: Head, details: Mapping[str, Any]) -> UnlearningResult:
        """Return the head untouched, with the objections as a note."""
        told = "; ".join(one.text for one in self.objections)
        return UnlearningResult(
            head, applied=False, predicted_distance_gain=self.predicted_distance_gain, details=details,
            note=f"not applied: {told} (curvature.on_doubt=apply applies it)",
            reasons=tuple(one.code for one in self.objections),
        )  # fmt: skip


def withheld(assessment: Assessment, force: bool) -> Decision | None:
    """Return the decision to skip any step, if nothing bounds the harm that it could do."""
    if force or assessment.predictable or assessment.bounded:
        return None
    remedy = (
        "No bound of the training rows' curvature is known that would make a step safe. Give the head's bound (sfu "
        "computes it at training) or unlabelled rows like the training rows"
    )
    what = (
        _no_sample(assessment) if assessment.reasons else "so few rows show too little of the curvature of the others"
    )
    return Decision(None, [Remark("unbounded", f"{what}. {remedy}")])


def decide(
    assessment: Assessment | None, gain: float | None, first: StepResult, further_remarks: Sequence[Remark], force: bool
) -> Decision:
    """Decide whether to apply the first step; ``force`` applies it whatever is predicted.

    ``gain`` is the predicted reduction of the squared distance; ``None`` if it is unknown.
    """
    remarks = list(further_remarks)
    if assessment is not None:
        remarks = [*_limits(assessment, force), *remarks]
    if force:
        forced = [Remark("forced", _ALTHOUGH + NO_GAIN)] if gain is not None and gain <= 0 else []
        return Decision(gain, remarks=[*forced, *remarks])
    if gain is not None and gain <= 0:
        return Decision(gain, [Remark("no_gain", NO_GAIN), *remarks])
    if first.note is not None and not first.details["solve_residual"] < 1:
        return Decision(gain, [Remark("solve", f"{first.note}, more than that of no step; raise head.l2")])
    return Decision(gain, remarks=remarks)


def _limits(assessment: Assessment, force: bool) -> list[Remark]:
    """Say what the evidence has done to the step."""
    alarms = [alarm for alarm in assessment.evidence.alarms if alarm.reason not in assessment.reasons]
    others = [Remark(alarm.name, alarm.reason) for alarm in alarms]
    if not assessment.reasons:
        return others
    if force:
        return [Remark("forced", _ALTHOUGH + _no_sample(assessment)), *others]
    if assessment.replaced:
        done = "the unlabelled rows stand for the training data, and the gain is predicted from them"
    else:
        harm = "no harm" if assessment.harmless else "little harm"
        done = f"the step is kept so short that it can do {harm}, and no gain can be predicted; unlabelled rows help"
    return [Remark("not_random", f"{_no_sample(assessment)}; {done}"), *others]


def _no_sample(assessment: Assessment) -> str:
    what = "the forget set is no random sample of the training data"
    if assessment.evidence["gradient"].reason in assessment.reasons:
        what += ", or the loss, l2, labels or scale of the features are not those of training"
    return f"{what} ({', and '.join(assessment.reasons)})"
