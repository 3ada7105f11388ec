"""Forget in batches, one after another, as requests come in and as certified removal does.

Each batch starts from the head that the one before left. With the retained data, those of a batch are all rows that are
not in it or in one before. A batch that the method withholds leaves the head as it was, and its rows with the retained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from sfu.unlearning.method import RetainedSet, Tools, Unlearned
from sfu.unlearning.request import ForgetRequest

Step = Callable[[ForgetRequest, Tools, RetainedSet | None], Unlearned]


def unlearn_in_batches(
    step: Step, request: ForgetRequest, tools: Tools, retained: RetainedSet | None, n_batches: int
) -> Unlearned:
    """Apply ``step`` to every batch of a random partition (seed ``folds``); details are the last batch's.

    Args:
        step: One batch: what a method's ``unlearn`` does.
        request: All that is to be forgotten.
        tools: Of the run.
        retained: What is to stay, or ``None``.
        n_batches: How many, at most the number of rows.
    """
    order = torch.randperm(request.n_forget, generator=tools.generator("folds"))
    parts = list(order.tensor_split(n_batches))
    head, notes, applied, last = request.head, dict[str, int](), 0, None
    still = torch.ones(request.n_forget, dtype=torch.bool)  # rows of the request that are in the training set
    for index, part in enumerate(parts):
        still[part] = False
        rest = None if retained is None else with_rows(retained, request, still.nonzero()[:, 0])
        batch = replace(request.rows(part), head=head)
        last = step(batch, tools, rest)
        head, applied = last.head, applied + last.applied
        still[part] = not last.applied
        if last.note:
            notes[last.note] = notes.get(last.note, 0) + 1
        if tools.progress is not None:
            tools.progress(index + 1, n_batches)
    assert last is not None
    remarks = [f"{count} of {n_batches} batches: {note}" if n_batches > 1 else note for note, count in notes.items()]
    return Unlearned(
        head,
        applied=applied > 0,
        details=last.details if n_batches == 1 else {**last.details, "batches": n_batches, "batches_applied": applied},
        note="; ".join(remarks) or None,
    )


def with_rows(retained: RetainedSet, request: ForgetRequest, index: torch.Tensor) -> RetainedSet:
    """The retained rows and those of the request that are still in the training set."""
    features, labels = retained.features_RD, retained.labels_R
    weights = None
    if retained.weights_R is not None and request.weights_F is not None:
        weights = torch.cat([retained.weights_R, request.weights_F[index].to(retained.weights_R)])
    return RetainedSet(
        torch.cat([features, request.features_FD[index].to(features)]),
        torch.cat([labels, request.labels_F[index].to(labels)]),
        weights,
    )
