"""The paper's membership-inference attack.

A logistic regression on the per-sample cross-entropy tries to tell examples of the forget set from as many test
examples of the same classes. At 50 % it cannot tell them apart; compare a method's score with Retrained's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


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
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    size = min(forget_losses.numel(), test_losses.numel())
    if size < 2 * n_splits:
        return MembershipScore(None, None)
    rng = np.random.default_rng(seed)
    sides = [
        values.double().cpu().numpy()[np.sort(rng.permutation(values.numel())[:size])]
        for values in (forget_losses, test_losses)
    ]
    attack = make_pipeline(StandardScaler(), LogisticRegression())
    folds = StratifiedKFold(n_splits, shuffle=True, random_state=seed)
    scores = cross_val_score(attack, np.concatenate(sides)[:, None], np.repeat([1, 0], size), cv=folds)
    return MembershipScore(100.0 * float(scores.mean()), 100.0 * float(scores.std()))
