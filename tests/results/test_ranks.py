from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sfu.results.aggregate import aggregate
from sfu.results.ranks import rank_methods
from tests.reporting.samples import make_metrics, make_row


def brute_force(distances, margin):
    """The average rank of every method in each of the S^S equally likely draws, with replacement, of S runs."""
    names = list(distances)
    n_runs = len(next(iter(distances.values()))[0])
    found = []
    for draw in itertools.product(range(n_runs), repeat=n_runs):
        ranks = []
        for setting in range(len(distances[names[0]])):
            means = [sum(distances[name][setting][run] for run in draw) / n_runs for name in names]
            ranks.append([1 + sum(other < mean - margin for other in means) for mean in means])
        found.append([sum(column) / len(ranks) for column in zip(*ranks, strict=True)])
    return np.array(found)


@pytest.mark.parametrize("n_settings", [1, 3])
@pytest.mark.parametrize("margin", [0.0, 0.3])
def test_the_draws_are_those_of_every_possible_resample(n_settings, margin):
    drawn = np.random.default_rng(1).normal(size=(4, n_settings, 4)) + np.arange(4)[:, None, None] / 3
    distances = {f"m{index}": values.tolist() for index, values in enumerate(drawn)}
    ranks, exact = rank_methods(distances, margin, draws=40_000), brute_force(distances, margin)
    for index, name in enumerate(distances):
        rank, column = ranks[name], exact[:, index]
        assert rank.best == pytest.approx((column == exact.min(1)).mean(), abs=0.015)
        for end, share in ((rank.low, 0.025), (rank.high, 0.975)):
            assert (column < end - 1e-9).mean() <= share + 0.01
            assert (column <= end + 1e-9).mean() >= share - 0.01
        means = {other: np.mean(values, axis=1) for other, values in distances.items()}
        own = 1 + sum(means[other] < means[name] - margin for other in means)
        assert rank.mean == pytest.approx(own.mean())
    assert [rank.mean for rank in ranks.values()] == sorted(rank.mean for rank in ranks.values())


def test_a_method_that_is_always_nearest_is_first_for_sure_and_equal_ones_share_a_rank():
    ranks = rank_methods({"far": [[2.0, 3.0]], "near": [[0.4, 0.5]], "as_near": [[0.401, 0.501]]})
    assert [(rank.mean, rank.low, rank.high, rank.best) for rank in ranks.values()] == [
        (1, 1, 1, 1), (1, 1, 1, 1), (3, 3, 3, 0),
    ]  # fmt: skip
    assert list(ranks)[-1] == "far"
    assert rank_methods({}) == {}


@settings(max_examples=20)
@given(st.lists(st.lists(st.floats(0, 5), min_size=3, max_size=3), min_size=1, max_size=5))
def test_ranks_are_within_their_intervals_and_between_1_and_the_number_of_methods(values):
    for rank in rank_methods({str(index): [runs] for index, runs in enumerate(values)}, draws=500).values():
        assert 1 <= rank.low <= rank.high <= len(values)
        assert 0 <= rank.best <= 1


def table(*distances, **more):
    """One run for each list of the distances of a, b and c, at two settings."""
    runs = []
    for setting in ("x", "y"):
        for seed, (a, b, c) in enumerate(distances):
            rows = {name: make_row(70, 70, 70, 50, distance) for name, distance in {"a": a, "b": b, "c": c}.items()}
            rows |= {"original": make_row(70, 70, 70, 50, 1.0, access="none")} | more
            runs.append(({"request": setting, "seed": str(seed)}, make_metrics(**rows)))
    return aggregate(runs)


def test_tables_rank_the_untouched_head_and_what_sees_the_forget_set_alone():
    plus = make_row(70, 70, 70, 50, 0.0, access="retained")
    found = table((0.2, 0.5, 3.0), (0.3, 0.4, 2.0), plus=plus)
    assert {name: rank.mean for name, rank in found.ranks.items()} == {"a": 1, "b": 2, "original": 3, "c": 4}
    assert found.to_json()["ranks"]["a"] == {"mean": 1, "low": 1, "high": 1, "best": 1}


def test_a_method_without_some_distance_has_no_rank_and_one_run_ranks_nothing():
    assert list(table((0.2, None, 3.0), (0.3, 0.4, 2.0)).ranks) == ["a", "original", "c"]
    assert table((0.2, 0.5, 3.0)).ranks == {}
