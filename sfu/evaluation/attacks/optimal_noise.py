r"""The best attack on a head with Gaussian noise, computed and not sampled.

The adversary knows all rows, the method, and the two heads without noise: the method's own, :math:`w_u`, and
Retrained's, :math:`w_r`. It sees parameters that are one of the two plus noise of standard deviation :math:`\sigma` on
every parameter, and asks whether the forget set was ever there. By Neyman and Pearson no attack is better than to
project on the difference. With :math:`d = |w_u - w_r| / \sigma` it has

.. math:: \mathrm{TPR} = \Phi(\Phi^{-1}(\mathrm{FPR}) + d), \qquad \mathrm{AUC} = \Phi(d / \sqrt 2).

For a request of one row, :math:`w_r` is the leave-one-out head, so this is the best attack on that row.
"""

from __future__ import annotations

import math

from sfu.evaluation.attacks.base import Attack, Needs, Outcome, View
from sfu.evaluation.attacks.statistics import RATES


class OptimalNoise(Attack, name="optimal_noise"):
    """The adversary knows everything but the noise."""

    needs = Needs.noise

    def measure(self, view: View, *, splits: int, seed: int) -> Outcome:
        assert isinstance(view.noise_shift, float)
        return Outcome(exact_figures(view.noise_shift))


def exact_figures(shift: float) -> dict[str, float]:
    """Return the figures of the best attack on a shift, in standard deviations of the noise."""
    from scipy.special import ndtr, ndtri  # quicker to import than scipy.stats

    rates = {f"tpr_at_fpr_{rate:g}": float(ndtr(ndtri(rate) + shift)) for rate in RATES}
    return {"auc": float(ndtr(shift / math.sqrt(2))), **rates, "shift": shift}
