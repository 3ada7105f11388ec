"""Forget in batches, one after another, as requests come in and as certified removal does.

Each batch starts from the head of the batch before. If the retained data are given, those of a batch are all rows that
are not in it or in one before. A batch that the method skips leaves the head as it was, and its rows stay among the
retained.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from sfu.errors import ConfigError
from sfu.heads.forgotten import Forgotten
from sfu.lazy import torch
from sfu.request import ForgetRequest, MethodContext, Retained, RetainedSet
from sfu.unlearning.result import UnlearningResult

_ENDED = (
    "the head's ledger ends here: it only serves random requests, without noise, by an estimate that is the Hessian of "
    "the forget rows, and with unlabelled rows if there were any before. Collect later requests (docs/keep.md)"
)

Step = Callable[[ForgetRequest, MethodContext, RetainedSet | None], UnlearningResult]


def check_batches(n_batches: int, n_forget: int) -> None:
    """Refuse more batches than rows.

    Raises:
        ConfigError: ``newton.batches`` is above ``n_forget``.
    """
    if n_batches > n_forget:
        raise ConfigError(
            f"newton.batches={n_batches} but there are only {n_forget} rows to forget. Give at most that many."
        )


def sequence_note(forgotten: Forgotten, after: Forgotten, n_batches: int) -> str | None:
    """Say what follows if rows are forgotten from the forget set alone, but not all of them at once.

    Args:
        forgotten: What the head has forgotten before the request.
        after: What it has forgotten after it.
        n_batches: Number of batches of the request.
    """
    if after.ledger is not None:
        return None
    if forgotten.ledger is not None:
        return _ENDED
    if not forgotten.requests and n_batches == 1:
        return None
    what = f"this request was served in {n_batches} batches"
    if forgotten.requests:
        what = f"this head had already forgotten {forgotten}"
    predicted, told = after.predicted(), ""
    if predicted is not None:
        most = "at most " if predicted[1] == 0 else ""
        told = f", here at a predicted distance of {most}{math.sqrt(1 - predicted[1]):.2f} after all of them"
    return (
        f"{what}; requests one after another end further from Retrained than one for all rows{told}. Collect requests, "
        "keep a ledger (docs/keep.md), or give unlabelled rows (docs/limits.md)"
    )


def unlearn_in_batches(
    step: Step, request: ForgetRequest, context: MethodContext, retained: Retained, n_batches: int
) -> UnlearningResult:
    """Apply ``step`` to every batch of a random partition (seed ``folds``); details are those of the last batch.

    The predicted gain is the sum over batches, or that of the last if a ledger joins them. Since these are independent
    samples, what one batch leaves is as likely to help the next as to harm it. There are at most as many batches as
    rows.
    """
    order = torch.randperm(request.n_forget, generator=context.generator("folds"))
    parts = list(order.tensor_split(n_batches))
    head, notes, reasons, applied, last = request.head, dict[str, int](), dict[str, None](), 0, None
    gains: list[float | None] = []
    in_training = torch.ones(request.n_forget, dtype=torch.bool)  # of each row of the request, so far
    for index, part in enumerate(parts):
        in_training[part] = False
        others = None if retained is None else with_rows(retained, request, in_training.nonzero()[:, 0])
        last = step(replace(request.rows(part), head=head), context, others)
        head, applied = last.head, applied + last.applied
        in_training[part] = not last.applied
        gains.append(last.predicted_distance_gain if last.applied else 0.0)
        reasons |= dict.fromkeys(last.reasons)
        if last.note:
            notes[last.note] = notes.get(last.note, 0) + 1
        context.report(index + 1, n_batches)
    assert last is not None
    if n_batches == 1:
        return last
    remarks = [f"{count} of {n_batches} batches: {note}" for note, count in notes.items()]
    if 0 < applied < n_batches:
        remarks.insert(0, f"incomplete: {applied} of {n_batches} batches were forgotten")
        reasons = {"incomplete": None, **reasons}
    known = [gain for gain in gains if gain is not None]
    return UnlearningResult(
        head,
        applied=applied == n_batches,
        predicted_distance_gain=(
            sum(known)
            if len(known) == n_batches and applied > 0 and head.forgotten.ledger is None
            else last.predicted_distance_gain
        ),
        details={**last.details, "batches": n_batches, "batches_applied": applied},
        predicted_share=last.predicted_share if applied == n_batches else None,
        predicted_share_interval=last.predicted_share_interval if applied == n_batches else None,
        note="; ".join(remarks) or None,
        reasons=tuple(reasons),
    )


def with_rows(retained: RetainedSet, request: ForgetRequest, index: torch.Tensor) -> RetainedSet:
    """Return the retained rows and some of the request's; if only one side has weights, those of the other are 1."""
    weights, labels_R = None, request.labels_of(retained)
    if retained.weights_R is not None or request.weights_F is not None:
        sides = _weights_of(retained.weights_R, labels_R), _weights_of(request.weights_F, request.labels_F)
        weights = torch.cat([sides[0], sides[1][index].to(sides[0])])
    return RetainedSet(
        torch.cat([retained.features_RD, request.features_FD[index].to(retained.features_RD)]),
        torch.cat([labels_R, request.labels_F[index].to(labels_R)]),
        weights,
    )


def _weights_of(given: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
    return labels.new_ones(len(labels), dtype=torch.float64) if given is None else given.double()
