"""Attacks on populations of which the best attack is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from sfu.evaluation.attacks.base import Attack, ShadowSignals, View
from sfu.evaluation.attacks.gaussians import log_likelihood_ratio, moderated
from sfu.evaluation.attacks.statistics import binomial_interval, measure

T, S = 6000, 256


def population(seed, spread, shift=2.0):
    """Confidences that are shifted by so many standard deviations where a head was trained on the row."""
    rng = np.random.default_rng(seed)
    mean, scale = 3 * rng.normal(size=T), spread(rng, T)
    member = np.arange(T) < T // 2
    inside = np.argsort(rng.random((S, T)), axis=0) < S // 2

    def heads(trained_on):
        return mean + scale * (shift * trained_on + rng.normal(size=trained_on.shape))

    return heads(member), member, ShadowSignals(heads(inside), inside)


def view_of(own, member, signals):
    logits = torch.from_numpy(np.stack([own, np.zeros(T)], axis=1))  # of two classes: their difference is the logit
    labels = torch.zeros(T, dtype=torch.int64)
    nothing = torch.zeros(0)
    return View(logits, labels, member, nothing, nothing, signals, signals)


SPREADS = {
    "equal": lambda rng, n: np.ones(n),
    "different": lambda rng, n: np.exp(rng.normal(size=n)),
}


@pytest.mark.parametrize("attack", ["lira", "ulira"])
@pytest.mark.parametrize("spread", SPREADS)
def test_likelihood_ratios_are_nearly_as_good_as_the_best_attack(attack, spread):
    own, member, signals = population(0, SPREADS[spread])
    scores = Attack.named(attack)().scores(view_of(own, member, signals))
    found = measure(scores[member], scores[~member], seed=0)
    for rate in (0.01, 0.001):
        low, high = found[f"tpr_at_fpr_{rate}_interval"]
        rates = binomial_interval(round(rate * T // 2), T // 2)  # the threshold lets as many others pass
        fewest, most = stats.norm.cdf(stats.norm.ppf(rates) + 2.0)
        assert low <= 1.05 * most
        assert high >= 0.95 * fewest
    assert found["tpr_at_fpr_0.01_interval"][1] >= 0.95 * stats.norm.cdf(stats.norm.ppf(0.01) + 2.0)
    low, high = found["auc_interval"]
    assert low <= stats.norm.cdf(2.0 / np.sqrt(2)) <= high + 0.005


def test_rmia_is_nearly_as_good_as_the_best_attack():
    """Far below 1, the probability relative to its mean grows with the likelihood ratio if all rows shift alike."""
    own, member, signals = population(1, SPREADS["equal"])
    low = 12.0  # p = exp(confidence) to within exp(-12 + 3 * 3)
    lowered = ShadowSignals(signals.confidence_ST - low, signals.inside_ST)
    scores = Attack.named("rmia")().scores(view_of(own - low, member, lowered))
    found = measure(scores[member], scores[~member], seed=0)
    exact = stats.norm.cdf(stats.norm.ppf(0.01) + 2.0)
    assert found["tpr_at_fpr_0.01_interval"][1] >= 0.95 * exact
    low, high = found["auc_interval"]
    assert low <= stats.norm.cdf(2.0 / np.sqrt(2)) <= high + 0.01


@pytest.mark.parametrize("attack", ["lira", "ulira", "rmia"])
def test_nothing_is_found_where_there_is_nothing(attack):
    own, member, signals = population(2, SPREADS["different"], shift=0.0)
    scores = Attack.named(attack)().scores(view_of(own, member, signals))
    low, high = measure(scores[member], scores[~member], seed=0)["auc_interval"]
    assert low <= 0.5 <= high


def test_variances_are_pooled_if_rows_are_alike_and_kept_if_they_differ():
    rng = np.random.default_rng(0)
    alike = moderated(rng.chisquare(9, size=4000), np.full(4000, 9))
    assert alike == pytest.approx(np.ones(4000), abs=0.1)
    true = np.exp(2 * rng.normal(size=4000))
    found = moderated(true * rng.chisquare(200, size=4000), np.full(4000, 200))
    assert np.log(found / true).std() < 0.12
    few = np.exp(rng.normal(size=20_000))  # the prior that is fitted is better than each row's own estimate
    own = few * rng.chisquare(4, size=20_000)
    error = np.log(moderated(own, np.full(20_000, 4)) / few).std()
    assert error < np.log(own / 4 / few).std()


def test_shadows_that_say_nothing_give_a_score_of_nothing():
    inside = np.arange(8)[:, None] % 2 == np.zeros((1, 5))
    constant = ShadowSignals(np.ones((8, 5)), inside)
    assert log_likelihood_ratio(np.linspace(-1, 1, 5), constant).tolist() == [0.0] * 5
    one_sided = ShadowSignals(np.random.default_rng(0).normal(size=(8, 5)), np.ones((8, 5), dtype=bool))
    assert log_likelihood_ratio(np.zeros(5), one_sided).tolist() == [0.0] * 5


def test_the_interval_of_a_rate_is_that_of_the_members():
    assert binomial_interval(30, 100) == pytest.approx([0.2124, 0.3998], abs=1e-3)
