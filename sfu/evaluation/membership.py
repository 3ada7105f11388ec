r"""The paper's membership-inference attack.

A logistic regression on the per-sample cross-entropy tries to tell examples of the forget set from as many test
examples of the same classes. At 50 % it cannot tell them apart; compare a method's score with Retrained's own.

The regression is scikit-learn's with its default penalty (C = 1) on the loss :math:`x_i` in nats. For members
:math:`y_i = 1` and others :math:`y_i = -1` its weight w and intercept b minimise

.. math:: \tfrac12 w^2 + \sum_i \log\left(1 + e^{-y_i (w x_i + b)}\right).

scikit-learn's default solver and tolerance stop short of this minimum, which moved the score of small sets by points.
sfu solves the same problem for the standardised loss :math:`(x_i - m) / s`, where the equal penalty is
:math:`C = s^2`, by Newton's method, and checks that the gradient vanishes.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

log = logging.getLogger(__name__)

_GRADIENT = 1e-6
"""Largest gradient of the mean objective at a solution, for standardised losses."""


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

    The test examples are of the forgotten classes. The larger side is subsampled. Each fold is attacked by a model that
    was fitted on the others.
    """
    from sklearn.model_selection import StratifiedKFold

    size = min(forget_losses.numel(), test_losses.numel())
    if size < 2 * n_splits:
        return MembershipScore(None, None)
    rng = np.random.default_rng(seed)
    sides = [
        values.double().cpu().numpy()[np.sort(rng.permutation(values.numel())[:size])]
        for values in (forget_losses, test_losses)
    ]
    losses_N1, member_N = np.concatenate(sides)[:, None], np.repeat([1, 0], size)
    folds = StratifiedKFold(n_splits, shuffle=True, random_state=seed).split(losses_N1, member_N)
    scores = []
    for others, held_out in folds:
        attack = fit_attack(losses_N1[others], member_N[others])
        if attack is None:
            log.warning(
                "The membership attack did not converge, so this head gets no score (mia is null). Its losses run from "
                "%.3g to %.3g nats; check that training and unlearning did not diverge.",
                losses_N1.min(), losses_N1.max(),
            )  # fmt: skip
            return MembershipScore(None, None)
        scores.append(attack.score(losses_N1[held_out], member_N[held_out]))
    return MembershipScore(100.0 * float(np.mean(scores)), 100.0 * float(np.std(scores)))


def fit_attack(losses_N1: NDArray[Any], member_N: NDArray[Any], *, max_iter: int = 1000) -> Any:
    """Return the fitted scikit-learn model, or ``None`` if it is not at the minimum after ``max_iter`` steps.

    Args:
        losses_N1: Losses in nats, as one feature.
        member_N: 1 for members, 0 for others.
        max_iter: Largest number of Newton steps.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    inverse_penalty = max(float(losses_N1.var()), np.finfo(np.float64).tiny)
    regression = LogisticRegression(C=inverse_penalty, solver="newton-cholesky", tol=1e-12, max_iter=max_iter)
    attack = make_pipeline(StandardScaler(), regression)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about steps lost in rounding at the minimum, where the gradient is checked
        attack.fit(losses_N1, member_N)
    left_N = attack.predict_proba(losses_N1)[:, 1] - member_N
    of_weight = left_N @ attack[0].transform(losses_N1)[:, 0] + regression.coef_[0, 0] / inverse_penalty
    gradient = max(abs(left_N.sum()), abs(of_weight)) / len(member_N)
    return attack if gradient <= _GRADIENT else None
