"""Attack heads by name, and read every attack against its result on Retrained.

Shapes: T targets, F rows to forget, K test rows of the same classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sfu.evaluation.attacks.base import NO_OTHERS, Attack, Needs, Outcome, ShadowSignals, View
from sfu.evaluation.attacks.signals import cross_entropies

if TYPE_CHECKING:
    from sfu.data.feature_data import FeatureData
    from sfu.data.split import ForgetSplit
    from sfu.evaluation.attacks.design import Design
    from sfu.heads.base import Head

Signals = ShadowSignals | str | None
"""What shadows say of the targets, or why they say nothing."""


class Attacker:
    """Carries out some attacks on any number of heads of one run."""

    def __init__(
        self, names: Sequence[str], data: FeatureData, split: ForgetSplit, design: Design, *, splits: int, seed: int
    ) -> None:
        """Look up the attacks and their rows.

        Args:
            names: Names of the attacks.
            data: Training and test rows.
            split: Which training rows were forgotten.
            design: The targets.
            splits: Folds of attacks that are fitted.
            seed: Seed of folds and halves.
        """
        self.attacks = {name: Attack.named(name, "evaluation.attacks")() for name in names}
        self._design, self._splits, self._seed = design, splits, seed
        labels_F = data.train_labels_N[split.forget_F]
        same_K = torch.isin(data.test_labels_T, labels_F.unique())
        self._forget = data.train_features_ND[split.forget_F], labels_F
        self._test = data.test_features_TD[same_K], data.test_labels_T[same_K]
        pool = torch.cat([data.train_labels_N, data.test_labels_T])
        features_ND = data.train_features_ND
        self._labels_T = pool[design.targets_T]
        test_T = design.targets_T >= len(features_ND)
        self._features_TD = torch.cat([
            features_ND[design.targets_T[~test_T]],
            data.test_features_TD[design.targets_T[test_T] - len(features_ND)],
        ])  # fmt: skip

    @property
    def targets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and labels of the targets, members first."""
        return self._features_TD, self._labels_T

    def needs(self, *what: Needs) -> bool:
        """Whether an attack needs one of these."""
        return any(attack.needs in what for attack in self.attacks.values())

    def attack(self, head: Head, shadows: Signals, unlearned: Signals, noise_shift: float | str) -> dict[str, Outcome]:
        """Return the outcome of every attack on a head; a note stands for one that cannot be carried out.

        Args:
            head: The head.
            shadows: What shadows say as they were trained.
            unlearned: What they say after the row's own method.
            noise_shift: Distance from Retrained in standard deviations of the head's noise; why it is not known.
        """
        losses = []
        for features, labels in (self._forget, self._test):
            logits = head.logits(features).double() if len(labels) else torch.zeros(0, head.n_classes)
            losses.append(cross_entropies(logits, labels))
        given: dict[Needs, Signals | float] = {
            Needs.shadows: shadows, Needs.unlearned_shadows: unlearned, Needs.noise: noise_shift,
        }  # fmt: skip
        view = View(
            head.logits(self._features_TD).double() if len(self._labels_T) else torch.zeros(0, head.n_classes),
            self._labels_T, self._design.member_T, losses[0], losses[1],
            shadows=shadows if isinstance(shadows, ShadowSignals) else None,
            unlearned=unlearned if isinstance(unlearned, ShadowSignals) else None,
            noise_shift=noise_shift if isinstance(noise_shift, float) else None,
        )  # fmt: skip
        return {name: self._carry_out(attack, view, given) for name, attack in self.attacks.items()}

    def _carry_out(self, attack: Attack, view: View, given: Mapping[Needs, Signals | float]) -> Outcome:
        if attack.needs in given:
            if attack.needs is not Needs.noise and not len(view.member_T):
                return Outcome({"note": NO_OTHERS})
            what = given[attack.needs]
            if what is None or isinstance(what, str):
                return Outcome({"note": what or "there are no shadows"})
        return attack.measure(view, splits=self._splits, seed=self._seed)


def with_gaps(found: Mapping[str, Mapping[str, Outcome]], reference: str | None) -> dict[str, dict[str, Any]]:
    """Return the figures of all rows, each with ``auc_gap``: its area minus that on the row ``reference``."""
    table: dict[str, dict[str, Any]] = {}
    for row, outcomes in found.items():
        table[row] = {}
        for name, one in outcomes.items():
            own = one.figures.get("auc")
            other = None if reference is None else found[reference][name].figures.get("auc")
            gap = None if own is None or other is None else own - other
            table[row][name] = one.figures | {"auc_gap": gap}
    return table
