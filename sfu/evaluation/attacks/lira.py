"""Online LiRA: the likelihood ratio of the head's confidence under shadows that were trained on the row or not.

Source: Carlini et al. 2022, algorithm 1, with moderated variances (:mod:`sfu.evaluation.attacks.gaussians`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sfu.evaluation.attacks.base import Needs, ScoringAttack, View
from sfu.evaluation.attacks.gaussians import log_likelihood_ratio
from sfu.evaluation.attacks.signals import confidences

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Lira(ScoringAttack, name="lira"):
    """The adversary has the pool of rows, trains heads as Original was, and does not know that rows were unlearned."""

    needs = Needs.shadows

    def scores(self, view: View) -> NDArray[Any]:
        assert view.shadows is not None
        own_T = confidences(view.logits_TC.double(), view.labels_T).cpu().numpy()
        return log_likelihood_ratio(own_T, view.shadows)
