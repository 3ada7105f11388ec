"""The paper's attack (:mod:`sfu.evaluation.membership`), scored like the others.

``accuracy`` and ``accuracy_std`` are the row's ``mia`` and ``mia_std``. A regression on one number only chooses a
threshold, so the other figures are those of all thresholds on the loss, for the rows that the regression is given. (Its
decisions on held-out folds would be below one half on average where there is nothing to tell.)
"""

from __future__ import annotations

from sfu.evaluation.attacks.base import Attack, Outcome, View, outcome


class Paper(Attack, name="paper"):
    """A logistic regression on the loss. The adversary has the head and rows of which it is told which are members."""

    def measure(self, view: View, *, splits: int, seed: int) -> Outcome:
        from sfu.evaluation.membership import attack_on_folds  # imports PyTorch

        found = attack_on_folds(view.forget_losses_F, view.test_losses_K, n_splits=splits, seed=seed)
        accuracy = {"accuracy": found.score.mean, "accuracy_std": found.score.std}
        if found.losses_N is None or found.member_N is None:
            return Outcome(accuracy | {"note": "too few rows, or losses to which no regression can be fitted"})
        measured = outcome(-found.losses_N, found.member_N, seed=seed)
        return Outcome(accuracy | measured.figures, measured.curve)
