r"""The paper's membership-inference attack.

A logistic regression on the per-sample cross-entropy tries to tell examples of the forget set from as many test
examples of the same classes. At 50 % it cannot tell them apart; compare a method's score with Retrained's own.

The regression is scikit-learn's with its default penalty (C = 1) on the loss :math:`x_i` in nats. For members
:math:`y_i = 1` and others :math:`y_i = -1` its weight w and intercept b minimise

.. math:: \tfrac12 w^2 + \sum_i \log\left(1 + e^{-y_i (w x_i + b)}\right).

scikit-learn's default solver and tolerance stop short of this minimum, which moved the score of small sets by points.
sfu solves the same problem for the standardised loss :math:`(x_i - m) / s`, where the equal penalty is
:math:`C = s^2`, by Newton's method, and checks that the gradient vanishes. It does so without scikit-learn, which takes
longer to import than most evaluations.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

log = logging.getLogger(__name__)

_GRADIENT = 1e-6
"""Largest gradient of the mean objective at a solution, for standardised losses."""
_EXACT = 1e-13
"""Gradient at which no further step is taken."""


class AttackedFolds(NamedTuple):
    """The attack's score, and the losses of the rows in its folds; ``None`` if there are no folds.

    ``member_N`` says which of these rows are members.
    """

    score: MembershipScore
    losses_N: NDArray[Any] | None = None
    member_N: NDArray[Any] | None = None


@dataclass(frozen=True)
class MembershipScore:
    """Attack accuracy in per cent over the splits; ``None`` with too few examples (under two a split and side)."""

    mean: float | None
    std: float | None


def cross_entropy_per_sample(logits_NC: Tensor, labels_N: Tensor) -> Tensor:
    """Return the softmax cross-entropy of each row in nats, ``[N]``."""
    return torch.nn.functional.cross_entropy(logits_NC, labels_N.to(logits_NC.device), reduction="none")


def membership_attack(forget_losses: Tensor, test_losses: Tensor, *, n_splits: int, seed: int) -> MembershipScore:
    """Return the mean and standard deviation of the attack's accuracy over stratified splits.

    See :func:`attack_on_folds`.
    """
    return attack_on_folds(forget_losses, test_losses, n_splits=n_splits, seed=seed).score


def attack_on_folds(forget_losses: Tensor, test_losses: Tensor, *, n_splits: int, seed: int) -> AttackedFolds:
    """Attack each fold by a model that was fitted on the others.

    The test examples are of the forgotten classes. The larger side is subsampled.
    """
    size = min(forget_losses.numel(), test_losses.numel())
    if size < 2 * n_splits:
        return AttackedFolds(MembershipScore(None, None))
    rng = np.random.default_rng(seed)
    sides = [
        values.double().cpu().numpy()[np.sort(rng.permutation(values.numel())[:size])]
        for values in (forget_losses, test_losses)
    ]
    losses_N, member_N = np.concatenate(sides), np.repeat([1, 0], size)
    fold_N = _folds(size, n_splits, seed)
    scores = []
    for fold in range(n_splits):
        held_out = fold_N == fold
        attack = fit_attack(losses_N[~held_out], member_N[~held_out])
        if attack is None:
            log.warning(
                "The membership attack did not converge, so this head gets no score (mia is null). Its losses run from "
                "%.3g to %.3g nats; check that training and unlearning did not diverge.",
                losses_N.min(), losses_N.max(),
            )  # fmt: skip
            return AttackedFolds(MembershipScore(None, None))
        scores.append(attack.score(losses_N[held_out], member_N[held_out]))
    score = MembershipScore(100.0 * float(np.mean(scores)), 100.0 * float(np.std(scores)))
    return AttackedFolds(score, losses_N, member_N == 1)


@dataclass(frozen=True)
class Attack:
    """A fitted regression on the standardised loss ``(loss - mean) / scale``."""

    weight: float
    intercept: float
    mean: float
    scale: float

    def score(self, losses_N: NDArray[Any], member_N: NDArray[Any]) -> float:
        """Return the share of examples that it tells rightly."""
        decision_N = self.weight * (losses_N - self.mean) / self.scale + self.intercept
        return float(np.mean((decision_N > 0) == member_N))


def fit_attack(losses_N: NDArray[Any], member_N: NDArray[Any], *, max_iter: int = 100) -> Attack | None:
    """Return the fitted attack, or ``None`` if it is not at the minimum after ``max_iter`` steps.

    Losses whose variance is infinite have none.

    Args:
        losses_N: Losses in nats.
        member_N: 1 for members, 0 for others.
        max_iter: Largest number of Newton steps.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        mean, variance, n_rows = float(losses_N.mean()), float(losses_N.var()), len(losses_N)
    if not np.isfinite(variance):
        return None
    spread = variance > (n_rows * mean * np.finfo(np.float64).eps) ** 2  # else it is rounding
    scale = variance**0.5 if spread else 1.0
    at_N, penalty = (losses_N - mean) / scale, 1 / (n_rows * max(variance, np.finfo(np.float64).tiny))
    weight, intercept = 0.0, 0.0
    for step in range(max_iter + 1):
        chance_N = np.exp(-np.logaddexp(0, -(weight * at_N + intercept)))
        of_weight, of_intercept = (chance_N - member_N) @ at_N / n_rows + penalty * weight, (chance_N - member_N).mean()
        gradient = max(abs(of_weight), abs(of_intercept))
        if step == max_iter or gradient <= _EXACT:
            break
        curvature_N = chance_N * (1 - chance_N) + np.finfo(np.float64).tiny
        centre = np.average(at_N, weights=curvature_N)  # around it, weight and intercept are independent
        to_weight = (of_weight - centre * of_intercept) / (curvature_N @ (at_N - centre) ** 2 / n_rows + penalty)
        to_intercept = of_intercept / curvature_N.mean() - centre * to_weight
        weight, intercept = weight - to_weight, intercept - to_intercept
    return Attack(weight, intercept, mean, scale) if gradient <= _GRADIENT else None


def _folds(size: int, n_splits: int, seed: int) -> NDArray[Any]:
    """Return the fold of each of ``size`` members and as many others, as scikit-learn's ``StratifiedKFold`` draws."""
    rng = np.random.RandomState(seed)
    sides = np.repeat([0, 1], size)
    counts_SF = [np.bincount(sides[fold::n_splits], minlength=2) for fold in range(n_splits)]
    drawn = []
    for side in range(2):
        folds_N = np.repeat(np.arange(n_splits), [count[side] for count in counts_SF])
        rng.shuffle(folds_N)
        drawn.append(folds_N)
    return np.concatenate(drawn)
