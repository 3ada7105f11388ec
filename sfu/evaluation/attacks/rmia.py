r"""Robust membership inference: the row's likelihood ratio against that of other rows of the population.

With :math:`\Pr(x | \theta) = p_y`, the reference models' mean
:math:`\Pr(x) = \tfrac12 (\overline{p}_{in} + \overline{p}_{out})` (the *online* form: half of the shadows were trained
on x), and

.. math:: \Lambda(x, z) = \frac{\Pr(x | \theta) / \Pr(x)}{\Pr(z | \theta) / \Pr(z)}

the score of x is the share of the rows z with :math:`\Lambda \ge \gamma`, where :math:`\gamma = 1` and z runs over all
targets.

Source: Zarifzadeh, Liu and Shokri 2024, "Low-cost high-power membership inference attacks", equations 2 to 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sfu.evaluation.attacks.base import Needs, ScoringAttack, View
from sfu.evaluation.attacks.signals import confidences

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Rmia(ScoringAttack, name="rmia"):
    """Online RMIA. The adversary has the pool of rows and trains heads as Original was, without unlearning."""

    needs = Needs.shadows

    def scores(self, view: View) -> NDArray[Any]:
        import numpy as np
        from scipy.special import log_expit

        assert view.shadows is not None
        inside_ST = view.shadows.inside_ST
        p_ST = np.exp(log_expit(view.shadows.confidence_ST))
        tiny = np.finfo(np.float64).tiny
        means = [(p_ST * mask).sum(0) / mask.sum(0).clip(1) for mask in (inside_ST, ~inside_ST)]
        own_T = confidences(view.logits_TC.double(), view.labels_T).cpu().numpy()
        ratio_T = log_expit(own_T) - np.log((sum(means) / 2).clip(tiny))
        return np.searchsorted(np.sort(ratio_T), ratio_T, side="right") / len(ratio_T)
