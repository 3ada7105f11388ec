"""Intervals, and the one rule for better, equal and worse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sfu.results.statistic import Relation, Statistic, relation


def test_the_interval_by_hand() -> None:
    found = Statistic.of([1.0, 2.0, None, 6.0])
    half = 4.302653 * 7.0**0.5 / 3**0.5  # t(0.975, 2), variance (4 + 1 + 9) / 2
    assert found.interval == pytest.approx([3.0 - half, 3.0 + half])
    assert (found.low, found.high) == tuple(found.interval or ())
    assert (found.n, found.missing, found.values) == (3, 1, [1.0, 2.0, None, 6.0])
    assert Statistic.of([1.0]).interval is None
    assert Statistic.of([2.0, 2.0]).interval == [2.0, 2.0]


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=12), st.floats(0.01, 2))
def test_the_rule_is_two_one_sided_tests_and_then_an_interval(values: list[float], margin: float) -> None:
    if np.std(values) < 1e-6:
        return
    above = stats.ttest_1samp(values, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(values, margin, alternative="less").pvalue
    apart = stats.ttest_1samp(values, 0.0).pvalue
    if min(abs(above - 0.05), abs(below - 0.05), abs(apart - 0.05)) < 1e-6:
        return
    if max(above, below) < 0.05:
        expected = Relation.equal
    elif apart < 0.05:
        expected = Relation.better if np.mean(values) < 0 else Relation.worse
    else:
        expected = Relation.unclear
    assert relation(values, margin) is expected


def test_one_run_is_compared_as_it_is() -> None:
    assert relation([], 0.1) is None
    assert relation([0.1], 0.1) is Relation.equal
    assert relation([73.8 - 73.7], 0.1) is Relation.equal  # 0.0999...943 and 0.1000...142 are both 0.1
    assert relation([-0.11], 0.1) is Relation.better
    assert relation([0.11], 0.1) is Relation.worse


@pytest.mark.parametrize("n", [2, 3, 10])
def test_false_claims_are_as_rare_as_stated(n: int) -> None:
    draws = np.random.default_rng(n).normal(size=(4000, n))
    margin = 3.0
    at_zero = [relation(row, 1e-9) for row in draws]
    false = sum(found is not Relation.unclear for found in at_zero) / len(draws)
    assert false == pytest.approx(0.05, abs=0.012)  # different although the mean is 0
    at_margin = [relation(row + margin, margin) for row in draws]
    assert sum(found is Relation.equal for found in at_margin) / len(draws) < 0.05 + 0.012  # equal at the margin itself
    covered = [low <= 0 <= high for row in draws for low, high in [Statistic.of(list(row)).interval]]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.012)
