from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score, roc_curve

from sfu.evaluation.attacks.statistics import (
    area_interval,
    area_under,
    balanced_accuracy,
    binomial_interval,
    epsilon_bound,
    epsilon_of_guesses,
    measure,
    roc,
    thinned,
)


def populations(seed, *, shift=0.7, count=300, others=500, rounded=False):
    rng = np.random.default_rng(seed)
    members, rest = rng.normal(shift, size=count), rng.normal(size=others)
    return (np.round(members, 1), np.round(rest, 1)) if rounded else (members, rest)


def test_area_and_curve_by_hand():
    members, others = np.array([3.0, 1.0, 1.0]), np.array([2.0, 1.0])
    assert area_under(members, others) == pytest.approx((2 + 2 * 0.5) / 6)  # 3 beats both, each 1 ties with a 1
    curve = roc(members, others)
    assert curve.false.tolist() == [0, 0, 0.5, 1]
    assert curve.true.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1])


@pytest.mark.parametrize("rounded", [False, True])
def test_area_and_curve_are_those_of_scikit_learn(rounded):
    members, others = populations(0, rounded=rounded)
    truth, scores = np.repeat([1, 0], [len(members), len(others)]), np.concatenate([members, others])
    assert area_under(members, others) == pytest.approx(roc_auc_score(truth, scores), abs=1e-12)
    false, true, _ = roc_curve(truth, scores, drop_intermediate=False)
    curve = roc(members, others)
    assert curve.false == pytest.approx(false, abs=1e-12)
    assert curve.true == pytest.approx(true, abs=1e-12)


def test_the_interval_of_an_area_has_the_mann_whitney_variance_at_one_half():
    """The ends of the acceptance region at 1/2: an area just inside has 1/2 in its interval, one just outside not."""
    for n in (5, 40, 5000):
        half = stats.norm.ppf(0.975) * math.sqrt((2 * n + 1) / (12 * n * n))
        if half < 0.5:
            assert area_interval(0.5 + 0.999 * half, n, n)[0] < 0.5 < area_interval(0.5 + 1.001 * half, n, n)[0]
    low, high = area_interval(0.5, 50, 50)
    assert low + high == pytest.approx(1)
    assert area_interval(1.0, 20, 20)[1] == 1.0
    assert 0.7 < area_interval(1.0, 20, 20)[0] < 1.0


@pytest.mark.parametrize("shift", [0.0, 1.0, 2.5])
def test_the_interval_of_an_area_covers(shift):
    truth, rng = stats.norm.cdf(shift / math.sqrt(2)), np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        area = area_under(rng.normal(shift, size=60), rng.normal(size=60))
        low, high = area_interval(area, 60, 60)
        covered += low <= truth <= high
    assert stats.binom.cdf(covered, 400, 0.95) > 0.005


def test_clopper_and_pearson_is_that_of_scipy():
    for right, trials in ((0, 7), (7, 7), (3, 50), (144, 144), (999, 5000)):
        for confidence in (0.95, 0.9):
            expected = stats.binomtest(right, trials).proportion_ci(confidence, method="exact")
            assert binomial_interval(right, trials, confidence) == pytest.approx([expected.low, expected.high])


def test_rates_at_small_false_positive_rates_by_counting():
    members, others = populations(3, shift=2.0, count=700, others=2000)
    found = measure(members, others, seed=0)
    for rate in (0.01, 0.001):
        threshold = np.sort(others)[::-1][int(rate * 2000)]  # so many others lie above it
        right = int((members > threshold).sum())
        assert found[f"tpr_at_fpr_{rate:g}"] == pytest.approx(right / 700)
        assert found[f"tpr_at_fpr_{rate:g}_interval"] == pytest.approx(binomial_interval(right, 700))
    assert found["note"] is None
    assert (found["n_members"], found["n_others"]) == (700, 2000)


def test_what_cannot_be_had_is_null_with_the_reason():
    few = measure(np.arange(5.0), np.arange(99.0), seed=0)
    assert few["tpr_at_fpr_0.01"] is None
    assert few["tpr_at_fpr_0.001_interval"] is None
    assert "tpr_at_fpr_0.01 needs 100 rows that were never seen, and there are 99" in few["note"]
    assert few["auc"] is not None
    assert measure(np.arange(5.0), np.arange(100.0), seed=0)["tpr_at_fpr_0.01"] is not None
    tiny = measure(np.arange(3.0), np.arange(3.0), seed=0)
    assert tiny["balanced_accuracy"] is None
    assert "balanced_accuracy needs 4 rows" in tiny["note"]


def test_constant_scores_tell_nothing():
    found = measure(np.ones(300), np.ones(300), seed=0)
    assert found["auc"] == 0.5
    assert found["balanced_accuracy"] == 0.5
    assert found["tpr_at_fpr_0.01"] == 0.0
    assert found["epsilon_lower"] == 0.0


def test_balanced_accuracy_is_near_the_best_and_does_not_overfit():
    members, others = populations(5, shift=2.0, count=4000, others=4000)
    assert balanced_accuracy(members, others, seed=0) == pytest.approx(stats.norm.cdf(1.0), abs=0.02)
    chance = [balanced_accuracy(*populations(seed, shift=0.0, count=40, others=40), seed=seed) for seed in range(200)]
    assert np.mean(chance) == pytest.approx(0.5, abs=0.02)
    assert balanced_accuracy(np.arange(9.0) + 100, np.arange(8.0), seed=0) == 1.0


def test_the_bound_of_epsilon():
    right, made = 180, 200
    epsilon = epsilon_of_guesses(right, made)
    rate = math.exp(epsilon) / (1 + math.exp(epsilon))
    assert stats.binom.sf(right - 1, made, rate) == pytest.approx(0.05, abs=1e-6)  # the tail that is just ruled out
    assert epsilon_of_guesses(100, 200) == 0.0
    assert epsilon_of_guesses(0, 10) == 0.0
    assert epsilon_bound(np.ones(100), np.ones(100)) == 0.0


def test_randomised_response_is_not_said_to_leak_more_than_it_does():
    """Each row's answer is right with probability e^eps / (1 + e^eps): the bound is above eps one time in twenty."""
    epsilon, rng, above = 1.0, np.random.default_rng(0), 0
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))
    for _ in range(300):
        told = rng.random(400) < truth
        member = np.arange(400) < 200
        scores = np.where(told, member, ~member) + 0.5 * rng.random(400)
        above += epsilon_bound(scores[member], scores[~member]) > epsilon
    assert stats.binom.sf(above - 1, 300, 0.05) > 0.005


def test_a_thinned_curve_has_both_ends_and_lies_on_the_curve():
    members, others = populations(0, count=3000, others=3000)
    curve = roc(members, others)
    kept = thinned(curve)
    points = set(zip(curve.false.tolist(), curve.true.tolist(), strict=True))
    assert set(zip(kept["fpr"], kept["tpr"], strict=True)) <= points
    assert (kept["fpr"][0], kept["tpr"][-1]) == (0.0, 1.0)
    assert len(kept["fpr"]) <= 401
