"""Forget in batches, one after another, as requests come in and as certified removal does.

Each batch starts from the head that the one before left. With the retained data, those of a batch are all rows that are
not in it or in one before. A batch that the method withholds leaves the head as it was, and its rows with the retained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.base import UnlearningResult

Step = Callable[[ForgetRequest, MethodContext, RetainedSet | None], UnlearningResult]


def unlearn_in_batches(
    step: Step, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None, n_batches: int
) -> UnlearningResult:
    """Apply ``step`` to every batch of a random partition (seed ``folds``); details are the last batch's.

    The predicted gain is the sum of the batches', which are independent samples: what one leaves is as likely to help
    the next as to harm it.

    Args:
        step: One batch: what a method's ``unlearn`` does.
        request: All that is to be forgotten.
        context: Of the run.
        retained: What is to stay, or ``None``.
        n_batches: How many, at most the number of rows.
    """
    order = torch.randperm(request.n_forget, generator=context.generator("folds"))
    parts = list(order.tensor_split(n_batches))
    head, notes, applied, last = request.head, dict[str, int](), 0, None
    gains: list[float | None] = []
    still = torch.ones(request.n_forget, dtype=torch.bool)  # rows of the request that are in the training set
    training_set = None if retained is None else TrainingSet(retained, request)
    for index, part in enumerate(parts):
        still[part] = False
        rest = None if training_set is None else training_set.keeping(still.nonzero()[:, 0])
        batch = replace(request.rows(part), head=head)
        last = step(batch, context, rest)
        head, applied = last.head, applied + last.applied
        still[part] = not last.applied
        gains.append(last.predicted_gain if last.applied else 0.0)
        if last.note:
            notes[last.note] = notes.get(last.note, 0) + 1
        if context.progress is not None:
            context.progress(index + 1, n_batches)
    assert last is not None
    if n_batches == 1:
        return last
    remarks = [f"{count} of {n_batches} batches: {note}" for note, count in notes.items()]
    if 0 < applied < n_batches:
        remarks.insert(0, f"incomplete: {applied} of {n_batches} batches were forgotten")
    known = [gain for gain in gains if gain is not None]
    return UnlearningResult(
        head,
        applied=applied == n_batches,
        predicted_gain=sum(known) if len(known) == n_batches and applied > 0 else last.predicted_gain,
        details={**last.details, "batches": n_batches, "batches_applied": applied},
        note="; ".join(remarks) or None,
    )


def _weights_of(given: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(labels, dtype=torch.float64) if given is None else given.double()


class TrainingSet:
    """The retained rows with room behind them for rows of the request, so that they are copied once, not every time."""

    def __init__(self, retained: RetainedSet, request: ForgetRequest) -> None:
        """Copy the retained rows; where one side alone has weights, those of the other are 1."""
        self._request, self._count = request, retained.labels_R.shape[0]
        features, labels, weights = request.features_FD, request.labels_F, request.weights_F
        self._features = torch.cat([retained.features_RD, features.to(retained.features_RD)])
        self._labels = torch.cat([retained.labels_R, labels.to(retained.labels_R)])
        self._weights = None
        if retained.weights_R is not None or weights is not None:
            sides = _weights_of(retained.weights_R, retained.labels_R), _weights_of(weights, labels)
            self._weights = torch.cat([side.to(retained.labels_R.device) for side in sides])

    def keeping(self, index: torch.Tensor) -> RetainedSet:
        """The retained rows and those of the request; good until the next call, which writes over it."""
        stop, request = self._count + index.numel(), self._request
        self._features[self._count : stop] = request.features_FD[index].to(self._features)
        self._labels[self._count : stop] = request.labels_F[index].to(self._labels)
        if self._weights is not None and request.weights_F is not None:
            self._weights[self._count : stop] = request.weights_F[index].to(self._weights)
        weights = None if self._weights is None else self._weights[:stop]
        return RetainedSet(self._features[:stop], self._labels[:stop], weights)
