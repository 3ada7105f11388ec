"""Forget in batches, one after another, as requests come in and as certified removal does.

Each batch starts from the head of the batch before. If the retained data are given, those of a batch are all rows that
are not in it or in one before. A batch that the method skips leaves the head as it was, and its rows stay among the
retained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from sfu.errors import ConfigError
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.base import UnlearningResult

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


def unlearn_in_batches(
    step: Step, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None, n_batches: int
) -> UnlearningResult:
    """Apply ``step`` to every batch of a random partition (seed ``folds``); details are those of the last batch.

    The predicted gain is the sum over batches. Since these are independent samples, what one batch leaves is as likely
    to help the next as to harm it.

    Args:
        step: Unlearns one batch.
        request: The whole request.
        context: The run's context.
        retained: The retained rows, or ``None``.
        n_batches: Number of batches, at most the number of rows.
    """
    order = torch.randperm(request.n_forget, generator=context.generator("folds"))
    parts = list(order.tensor_split(n_batches))
    head, notes, applied, last = request.head, dict[str, int](), 0, None
    gains: list[float | None] = []
    in_training = torch.ones(request.n_forget, dtype=torch.bool)  # of each row of the request, so far
    training_set = None if retained is None else TrainingSet(retained, request)
    for index, part in enumerate(parts):
        in_training[part] = False
        others = None if training_set is None else training_set.with_rows(in_training.nonzero()[:, 0])
        last = step(replace(request.rows(part), head=head), context, others)
        head, applied = last.head, applied + last.applied
        in_training[part] = not last.applied
        gains.append(last.predicted_distance_gain if last.applied else 0.0)
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
        predicted_distance_gain=(
            sum(known) if len(known) == n_batches and applied > 0 else last.predicted_distance_gain
        ),
        details={**last.details, "batches": n_batches, "batches_applied": applied},
        note="; ".join(remarks) or None,
    )


def _weights_of(given: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(labels, dtype=torch.float64) if given is None else given.double()


class TrainingSet:
    """The retained rows, with room behind them for rows of the request, so that they are copied only once.

    If only one side has weights, those of the other are 1.
    """

    def __init__(self, retained: RetainedSet, request: ForgetRequest) -> None:
        self._request, self._count = request, retained.labels_R.shape[0]
        features, labels, weights = request.features_FD, request.labels_F, request.weights_F
        self._features = torch.cat([retained.features_RD, features.to(retained.features_RD)])
        self._labels = torch.cat([retained.labels_R, labels.to(retained.labels_R)])
        self._weights = None
        if retained.weights_R is not None or weights is not None:
            sides = _weights_of(retained.weights_R, retained.labels_R), _weights_of(weights, labels)
            self._weights = torch.cat([side.to(retained.labels_R.device) for side in sides])

    def with_rows(self, index: torch.Tensor) -> RetainedSet:
        """Return the retained rows and some of the request's; the next call overwrites them."""
        stop, request = self._count + index.numel(), self._request
        self._features[self._count : stop] = request.features_FD[index].to(self._features)
        self._labels[self._count : stop] = request.labels_F[index].to(self._labels)
        if self._weights is not None and request.weights_F is not None:
            self._weights[self._count : stop] = request.weights_F[index].to(self._weights)
        weights = None if self._weights is None else self._weights[:stop]
        return RetainedSet(self._features[:stop], self._labels[:stop], weights)
