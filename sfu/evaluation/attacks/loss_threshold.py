"""Rows of small loss are called members.

Source: Yeom et al. 2018, "Privacy risk in machine learning: analyzing the connection to overfitting".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sfu.evaluation.attacks.base import ScoringAttack, View
from sfu.evaluation.attacks.signals import cross_entropies

if TYPE_CHECKING:
    from numpy.typing import NDArray


class LossThreshold(ScoringAttack, name="loss_threshold"):
    """The score is minus the cross-entropy. The adversary has the head and labelled rows."""

    def scores(self, view: View) -> NDArray[Any]:
        return (-cross_entropies(view.logits_TC.double(), view.labels_T)).cpu().numpy()
