"""U-LiRA: the likelihood ratio under shadows that forgot the row by the same method, or that never saw it.

Every shadow was trained, was asked to forget as many rows as the request has, and has taken the method's own step. For
a row, half of the shadows had it in their request; the others never saw it, and forgot other rows.

Source: Hayes et al. 2024, "Inexact unlearning needs more careful evaluations to avoid a false sense of privacy".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sfu.evaluation.attacks.base import Needs, ScoringAttack, View
from sfu.evaluation.attacks.gaussians import log_likelihood_ratio
from sfu.evaluation.attacks.signals import confidences

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ULira(ScoringAttack, name="ulira"):
    """The adversary has the pool of rows, and knows how heads are trained and by which method they forget."""

    needs = Needs.unlearned_shadows

    def scores(self, view: View) -> NDArray[Any]:
        assert view.unlearned is not None
        own_T = confidences(view.logits_TC.double(), view.labels_T).cpu().numpy()
        return log_likelihood_ratio(own_T, view.unlearned)
