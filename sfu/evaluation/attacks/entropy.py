"""Rows of small modified entropy are called members (:func:`sfu.evaluation.attacks.signals.modified_entropies`).

Source: Song and Mittal 2021.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sfu.evaluation.attacks.base import ScoringAttack, View
from sfu.evaluation.attacks.signals import modified_entropies

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Entropy(ScoringAttack, name="entropy"):
    """The score is minus the modified entropy. The adversary has the head and labelled rows."""

    def scores(self, view: View) -> NDArray[Any]:
        return (-modified_entropies(view.logits_TC.double(), view.labels_T)).cpu().numpy()
