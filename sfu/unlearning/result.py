"""What a method returns, and how it tells that to a person.

Shapes: C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sfu.heads.base import Head, lay_out

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sfu.unlearning.step_curvature import StepCurvature

ALREADY_FORGOTTEN, TRAINED_STEPS = "already_forgotten", "trained_steps"
REPEATED_ROWS, EQUAL_ROWS_LEFT = "repeated_rows", "equal_rows_left"
REASONS = {
    "l2_estimated": "l2 was estimated from the rows.",
    REPEATED_ROWS: "Rows that were given several times count once.",
    EQUAL_ROWS_LEFT: "Rows that are equal to these stay, because training had them more often.",
    ALREADY_FORGOTTEN: "Rows had been forgotten before, and are left out.",
    "not_random": "The rows are no random sample of the training rows, so the step is short.",
    "classes": "The classes of the rows are not shared as in training.",
    "drift": "The unlabelled rows are unlike the training rows.",
    "duplicates": "Many rows are near copies of others.",
    "few_retained": "Few rows are retained for so many features.",
    "gradient": "The gradient of the rows is unlike that of training.",
    "mean": "The features of the rows are unlike those of training on average.",
    "norms": "The rows are larger or smaller than the unlabelled ones.",
    "weights": "Few rows carry most of the weight.",
    "early_stopped": "Training may have stopped before its optimum, so no gain is predicted.",
    "unlabelled_unused": "The unlabelled rows are not used.",
    "estimate": "The estimate of the curvature has a remark.",
    "solve": "The step could not be computed to full precision.",
    "sequence": "The head had forgotten rows before, and requests one after another end less near.",
    "trained_backbone": "The backbone was trained on the rows, too, and does not forget them.",
    TRAINED_STEPS: "The steps before the estimator saw the rows, too, and do not forget them.",
    "rounding": "Rounding to the dtype of the model undoes much of the step.",
    "forced": "The step was applied although sfu would have withheld it or kept it short.",
    "incomplete": "Not all batches of the request were forgotten.",
    "no_gain": "The step is predicted to be no better than nothing.",
    "unbounded": "Nothing bounds the harm that a step could do.",
}
"""What the codes of :attr:`UnlearningResult.reasons` mean."""
FACTS = {"l2_estimated", REPEATED_ROWS, ALREADY_FORGOTTEN}
"""Reasons that are no reservations."""


class Remark(NamedTuple):
    """Something that the reader should know of a step: its code, one of :data:`REASONS`, and a clause for the note."""

    code: str
    text: str


@dataclass(frozen=True)
class UnlearningResult:
    """What a method returns.

    Attributes:
        head: The head after unlearning.
        applied: Whether the method did everything it was asked to; ``False`` if it skipped a step or a batch.
        predicted_distance_gain: Predicted reduction of the squared distance to Retrained, in the retain-Hessian norm;
            if the head keeps a ledger, that of all requests so far.
        details: Scalars worth reporting (chosen damping, solver status, ...).
        note: One sentence for the reader of the table.
        path: Parameters after each step of an iterative method, the start first; evenly thinned if there are many.
        trials: The results of all settings tried, if the choice needs the retrained model.
        curvature: The Hessian that a Newton step inverted, if ``MethodContext.keep_curvature`` asks for it.
        method: Name of the method, if :func:`sfu.unlearn` called it.
        predicted_share: Predicted share of the squared distance to Retrained that the step removes, or all requests so
            far have removed; ``None`` if it cannot be predicted.
        predicted_share_interval: The interval that this share lies in, 9 times in 10.
        reasons: Codes of what the note says, in its order (:data:`REASONS`); only Newton steps have them.
        model: The whole model with the head's weights, if :func:`sfu.unlearn` was given one.
    """

    head: Head
    applied: bool = True
    predicted_distance_gain: float | None = None
    details: Mapping[str, float | int | str | bool | tuple[float, ...] | None] = field(default_factory=dict)
    note: str | None = None
    path: tuple[Tensor, ...] = ()
    trials: tuple[UnlearningResult, ...] = ()
    method: str | None = None
    predicted_share: float | None = None
    predicted_share_interval: tuple[float, float] | None = None
    reasons: tuple[str, ...] = ()
    model: nn.Module | None = field(default=None, repr=False, compare=False)
    curvature: StepCurvature | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Lay out the tensors as those of a result from the cache are."""
        object.__setattr__(self, "head", self.head.laid_out())
        object.__setattr__(self, "path", tuple(map(lay_out, self.path)))

    @property
    def predicted_distance(self) -> float | None:
        """Predicted distance to Retrained, of which 1 is that of doing nothing; ``None`` if it is not known."""
        return None if self.predicted_share is None else math.sqrt(1 - self.predicted_share)

    @property
    def verdict(self) -> Literal["applied", "applied_with_reservations", "withheld"]:
        """Whether the rows are forgotten as far as the method can, with reservations (``reasons``), or not at all.

        Rows that had all been forgotten before are forgotten.
        """
        if not self.applied and self.reasons != (ALREADY_FORGOTTEN,) and "incomplete" not in self.reasons:
            return "withheld"
        return "applied" if FACTS.issuperset(self.reasons) else "applied_with_reservations"

    def to_dict(self) -> dict[str, Any]:
        """Return what there is to tell, for JSON; no head and no example."""
        interval, forgotten = self.predicted_share_interval, self.head.forgotten
        return {
            "verdict": self.verdict, "reasons": list(self.reasons), "note": self.note, "method": self.method,
            "predicted_share": self.predicted_share, "predicted_distance": self.predicted_distance,
            "predicted_share_interval": None if interval is None else list(interval),
            "predicted_distance_gain": self.predicted_distance_gain,
            "rows_forgotten": forgotten.rows, "requests": forgotten.requests, "n_train": self.head.n_train,
            "details": {key: list(one) if isinstance(one, tuple) else one for key, one in self.details.items()},
        }  # fmt: skip

    def summary(self) -> str:
        """Return the verdict, the prediction and the reasons, a line each."""
        lines = [f"verdict: {self.verdict.replace('_', ' ')}"]
        if self.predicted_share is not None and self.predicted_share_interval is not None:
            low, high = self.predicted_share_interval
            told = f"{self.predicted_share:.2f} ({low:.2f} to {high:.2f})"
            lines.append(f"predicted share: {'not known, the rows are too few to tell' if self._is_open else told}")
            lines += [] if self._is_open else [f"predicted distance to Retrained: {self.predicted_distance:.2f}"]
        lines += [f"{code}: {REASONS[code]}" for code in self.reasons]
        return "\n".join(textwrap.fill(line, _COLUMNS, subsequent_indent="  ") for line in lines)

    def explain(self) -> str:
        """Say what happened and what it is worth in plain words, for a person who decides, in lines of 80 columns."""
        if not self.applied and self.reasons == (ALREADY_FORGOTTEN,):
            return textwrap.fill(_NOTHING_LEFT, _COLUMNS)
        told, in_sequence = [_VERDICTS[self.verdict]], self.head.forgotten.requests > 1
        if (
            self.verdict != "withheld"
            and self.predicted_share is not None
            and self.predicted_share_interval is not None
            and not self._is_open
        ):
            low, high = self.predicted_share_interval
            before, rows, steps = ("", "the rows", "the step is predicted to remove")
            if in_sequence:
                before, rows = " the first request", "the rows of all requests"
                steps = "all requests so far are predicted to have removed"
            told.append(
                f"Compare the model before{before} with one that was trained again without {rows}. Of the squared "
                f"distance between the two, {steps} {self.predicted_share:.0%}, and 9 times in 10 between {low:.0%} "
                f"and {high:.0%}."
            )
        elif self.verdict != "withheld":
            why = ": the rows are too few to tell" if self._is_open else ""
            told.append(
                f"How near this comes to a model that was trained again without the rows is not predicted{why}."
            )
        told += [REASONS[code] for code in self.reasons]
        told.append("This is an estimate from the rows alone, and no proof: the other training rows were not seen.")
        return textwrap.fill(" ".join(told), _COLUMNS)

    @property
    def _is_open(self) -> bool:
        """Whether the interval says nothing: it is [0, 1], as far as it is printed."""
        low, high = self.predicted_share_interval or (0.5, 0.5)
        return low < _PRINTED and high > 1 - _PRINTED

    def __repr__(self) -> str:
        """Say in a few lines what was done, without any tensor."""
        lines = [f"  {name}: {value}" for name, value in self._about().items() if value is not None]
        return "\n".join(["UnlearningResult(", *lines, ")"])

    def _repr_html_(self) -> str:
        """Return a table for notebooks, with a bar for the predicted share."""
        rows = [
            f"<tr><th style='text-align:left'>{html.escape(name.replace('_', ' '))}</th>"
            f"<td style='text-align:left'>{html.escape(str(value))}</td></tr>"
            for name, value in ({"verdict": self.verdict} | self._about()).items()
            if value is not None
        ]
        return f"<table>{''.join(rows)}</table>{self._bar()}"

    def _about(self) -> dict[str, Any]:
        gain, share, interval = self.predicted_distance_gain, self.predicted_share, self.predicted_share_interval
        return {
            "method": self.method, "applied": self.applied,
            "predicted_distance_gain": None if gain is None else f"{gain:.3g}",
            "predicted_share": None if share is None else f"{share:.2f}",
            "predicted_share_interval": None if interval is None else "{:.2f} to {:.2f}".format(*interval),
            "predicted_distance": None if share is None else f"{self.predicted_distance:.2f}",
            "note": self.note, "head": self.head,
            "model": None if self.model is None else type(self.model).__name__,
        }  # fmt: skip

    def _bar(self) -> str:
        if self.predicted_share is None or self.predicted_share_interval is None:
            return ""
        low, high = (_WIDTH * bound for bound in self.predicted_share_interval)
        share = f"{self.predicted_share:.0%} of the squared distance to Retrained, predicted"
        return (
            f"<svg width='{_WIDTH}' height='34' role='img' aria-label='{share}'>"
            f"<rect width='{_WIDTH}' height='12' fill='#ddd'/>"
            f"<rect width='{_WIDTH * self.predicted_share:.0f}' height='12' fill='#3b6ea8'/>"
            f"<line x1='{low:.0f}' x2='{high:.0f}' y1='6' y2='6' stroke='#000' stroke-width='2'/>"
            f"<text y='28' font-size='12' fill='currentColor'>{share}</text></svg>"
        )


_WIDTH, _COLUMNS, _PRINTED = 320, 80, 0.005
_NOTHING_LEFT = (
    "The rows had been forgotten from this head before, so there was nothing left to do: no step was taken now, and "
    "the model is as it was. What the earlier requests were worth is in their results."
)
_VERDICTS = {
    "applied": "The rows were forgotten.",
    "applied_with_reservations": "The rows were forgotten, with reservations.",
    "withheld": "The rows were not forgotten: the step was withheld, and the model is as it was.",
}
