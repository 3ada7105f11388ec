"""Score heads against Retrained, on data reloaded after unlearning is done.

Shapes: R retained rows, F forget rows, T test rows, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sfu.data.canaries import Canaries
from sfu.data.feature_data import FeatureData
from sfu.data.split import ForgetSplit
from sfu.evaluation.distances import margin_difference, mean_jensen_shannon
from sfu.evaluation.measures import accuracies, accuracy, agreement, mean_kl, squared_norm
from sfu.evaluation.membership import cross_entropy_per_sample, membership_attack
from sfu.heads.base import Head
from sfu.operators.build import build_operator
from sfu.operators.structure import Structure

Metrics = dict[str, float | None]

_POINTS, _OUTPUTS = 16, 256
"""Heads, and outputs of all of them, that are evaluated in one pass over the rows."""
_GAPS = {
    "test_gap": "test_accuracy", "remain_gap": "remain_accuracy", "forget_gap": "forget_accuracy", "mia_gap": "mia",
}  # fmt: skip
_COMPARISONS = (
    "distance", "weight_distance", "agreement", "forget_kl", "forget_kl_reversed", "forget_js",
    "forget_margin_difference", "test_margin_difference", "measured_distance_gain",
)  # fmt: skip


class _Scores(NamedTuple):
    """Accuracies and attack score of one head, and the outputs they came from."""

    metrics: Metrics
    test_TC: Tensor
    forget_FC: Tensor


class Evaluator:
    """Compares heads with Original and Retrained, in the norm of the retained Hessian at Original."""

    def __init__(
        self,
        data: FeatureData,
        split: ForgetSplit,
        original: Head,
        retrained: Head | None,
        *,
        membership_splits: int = 5,
        seed: int = 0,
        canaries: Canaries | None = None,
    ) -> None:
        """Compute the retained Hessian at ``original`` (as products) and Retrained's own scores.

        Without ``retrained``, all comparisons with it are ``None``. The seed is that of the membership attack. If the
        forget set is one of ``canaries``, their behaviour is a metric, too.
        """
        self._canaries = canaries
        self._forget = (data.train_features_ND[split.forget_F], data.train_labels_N[split.forget_F])
        self._test = (data.test_features_TD, data.test_labels_T)
        self._forgotten_classes = self._forget[1].unique()
        self._n_splits, self._seed = membership_splits, seed
        retain_R = split.retain_R
        self._rows = original.rows(data.train_features_ND[retain_R], data.train_labels_N[retain_R], cache=True)
        self._objective = original.objective_of(self._rows.weight)
        self._hessian = build_operator(self._objective, self._rows, original.parameters_CE, Structure.products)
        self._original, self._retrained = original, retrained
        self._points = max(1, min(_POINTS, _OUTPUTS // original.n_classes))
        self._retrained_scores, self._nothing = None, 0.0
        if retrained is not None:
            remain_accuracy = accuracies(self._rows, retrained.parameters_CE[None])[0]
            self._retrained_scores = self._scores(retrained, remain_accuracy)
            self._nothing = self._squared_distance(original, retrained)

    def evaluate(self, *heads: Head) -> list[Metrics]:
        """Return all metrics of each head.

        Percentages are 0 to 100; gaps are the head's value minus Retrained's, in points. ``distance`` is
        ``|w - w_r| / |w* - w_r|`` in the norm of the retained data's Hessian at w* (0: Retrained, 1: nothing done), and
        ``measured_distance_gain`` is how much the squared numerator falls from doing nothing.
        """
        found: list[Metrics] = []
        for first in range(0, len(heads), self._points):
            some = heads[first : first + self._points]
            parameters_PCE = torch.stack([head.parameters_CE for head in some])
            remain = accuracies(self._rows, parameters_PCE)
            gradients_PCE = self._objective.gradients_at(self._rows, parameters_PCE)
            squares = [0.0] * len(some)
            if self._retrained is not None:
                differences_PCE = parameters_PCE - self._retrained.parameters_CE
                squares = self._hessian.quadratic(differences_PCE).clamp(min=0).tolist()
            for head, remains, gradient_CE, square in zip(some, remain, gradients_PCE, squares, strict=True):
                scores = self._scores(head, remains)
                gradient = {"retain_gradient_norm": float(gradient_CE.norm())}
                found.append(scores.metrics | gradient | self._compare(head, scores, square))
        return found

    def distance(self, head: Head) -> float | None:
        """Return the distance to Retrained, 1 for nothing done; ``None`` if it is not known."""
        if self._retrained is None or not self._nothing > 0:
            return None
        return math.sqrt(self._squared_distance(head, self._retrained) / self._nothing)

    def trade_off(self, path: Sequence[Tensor]) -> dict[str, list[float]]:
        """Return accuracies, in per cent, at each point of a path of parameters."""
        found: dict[str, list[float]] = {"test_accuracy": [], "forget_accuracy": []}
        for key, labelled in (("test_accuracy", self._test), ("forget_accuracy", self._forget)):
            rows = self._original.rows(*labelled, cache=True)
            for start in range(0, len(path), self._points):
                found[key] += accuracies(rows, torch.stack(list(path[start : start + self._points])))
        return found

    def _canary_accuracy(self, head: Head, forget_accuracy: float, canaries: Canaries) -> float | None:
        """Return the share of canaries that get their wrong label, or of test rows that the trigger turns, in per cent.

        Only test rows of other classes than the trigger's label can be turned; ``None`` if there are none.
        """
        trigger, (features_TD, labels_T) = canaries.trigger, self._test
        if trigger is None:
            return forget_accuracy
        turned_TC = head.logits(trigger.added(features_TD[labels_T != trigger.label]))
        return accuracy(turned_TC, labels_T.new_full((len(turned_TC),), trigger.label)) if len(turned_TC) else None

    def _squared_distance(self, head: Head, retrained: Head) -> float:
        return squared_norm(head.parameters_CE - retrained.parameters_CE, self._hessian)

    def _compare(self, head: Head, own: _Scores, square: float) -> Metrics:
        """Return the metrics that need Retrained, from which the squared distance is given."""
        gaps = _GAPS if self._canaries is None else {**_GAPS, "canary_gap": "canary_accuracy"}
        if self._retrained is None or self._retrained_scores is None:
            return dict.fromkeys((*gaps, *_COMPARISONS))
        reference, nothing = self._retrained_scores, self._nothing
        if torch.equal(head.parameters_CE, self._original.parameters_CE):
            square = nothing  # its own may be rounded in another way
        values = (
            *(_difference(own.metrics[key], reference.metrics[key]) for key in gaps.values()),
            math.sqrt(square / nothing) if nothing > 0 else None,
            float((head.parameters_CE - self._retrained.parameters_CE).norm()),
            agreement(own.test_TC, reference.test_TC),
            mean_kl(reference.forget_FC, own.forget_FC),
            mean_kl(own.forget_FC, reference.forget_FC),
            mean_jensen_shannon(own.forget_FC, reference.forget_FC),
            margin_difference(own.forget_FC, reference.forget_FC, self._forget[1]),
            margin_difference(own.test_TC, reference.test_TC, self._test[1]),
            nothing - square,
        )
        return dict(zip((*gaps, *_COMPARISONS), values, strict=True))

    def _scores(self, head: Head, remain_accuracy: float) -> _Scores:
        test_TC, forget_FC = (head.logits(features) for features, _ in (self._test, self._forget))
        same_class = torch.isin(self._test[1], self._forgotten_classes)
        membership = membership_attack(
            cross_entropy_per_sample(forget_FC, self._forget[1]),
            cross_entropy_per_sample(test_TC, self._test[1])[same_class.to(test_TC.device)],
            n_splits=self._n_splits,
            seed=self._seed,
        )
        forget_accuracy = accuracy(forget_FC, self._forget[1])
        metrics: Metrics = {
            "test_accuracy": accuracy(test_TC, self._test[1]),
            "remain_accuracy": remain_accuracy,
            "forget_accuracy": forget_accuracy,
            "mia": membership.mean,
            "mia_std": membership.std,
        }
        if self._canaries is not None:
            metrics["canary_accuracy"] = self._canary_accuracy(head, forget_accuracy, self._canaries)
        return _Scores(metrics, test_TC, forget_FC)


def _difference(own: float | None, reference: float | None) -> float | None:
    return None if own is None or reference is None else own - reference
