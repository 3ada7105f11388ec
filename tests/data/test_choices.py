"""Forget sets that are not random, against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from sklearn.linear_model import Ridge

from sfu.data import choices
from sfu.data.settings import ForgetSettings
from sfu.data.split import make_split
from sfu.errors import ConfigError, DataError

DRAW = np.random.default_rng(0)
LABELS = np.arange(120) % 3
FEATURES = DRAW.normal(size=(120, 5)) + np.eye(3, 5)[LABELS]
COPIES = np.concatenate([FEATURES, FEATURES[:6] + 1e-6 * DRAW.normal(size=(6, 5))])
OF_COPIES = np.concatenate([LABELS, LABELS[:6]])


@pytest.fixture(autouse=True, params=[7, 2048])
def _blocks(request, monkeypatch):
    monkeypatch.setattr(choices, "_BLOCK_ROWS", request.param)


def chosen(features: np.ndarray, labels: np.ndarray, seed: int = 0, **settings: object):
    labels_N = torch.from_numpy(labels)
    return make_split(ForgetSettings(**settings), labels_N, 3, seed, features_ND=torch.from_numpy(features))


def test_hardest_are_the_rows_of_largest_error_under_a_ridge_head():
    l2 = 1e-3 * (FEATURES**2).sum()
    head = Ridge(alpha=l2, fit_intercept=False).fit(FEATURES, np.eye(3)[LABELS])
    errors = ((head.predict(FEATURES) - np.eye(3)[LABELS]) ** 2).sum(1)
    made = chosen(FEATURES, LABELS, choose="hardest", fraction=0.2)
    assert made.forget_F.tolist() == sorted(errors.argsort()[-24:])
    assert (made.kind, made.request) == ("hardest", "selected")
    of_class = chosen(FEATURES, LABELS, choose="hardest", classes=[1], fraction=0.25)
    members = np.flatnonzero(LABELS == 1)
    assert of_class.forget_F.tolist() == sorted(members[errors[members].argsort()[-10:]])
    assert of_class.kind == "classes"


def test_duplicates_are_the_rows_whose_nearest_neighbour_is_nearest_and_retained():
    made = chosen(COPIES, OF_COPIES, choose="duplicates", fraction=6 / 126)
    assert {row % 120 for row in made.forget_F.tolist()} == set(range(6))  # one of each pair of copies
    made = chosen(FEATURES, LABELS, choose="duplicates", fraction=0.1)
    gaps = np.where(LABELS[:, None] == LABELS, cdist(FEATURES, FEATURES), np.inf)
    np.fill_diagonal(gaps, np.inf)
    nearest, taken = gaps.argmin(1), set(made.forget_F.tolist())
    assert not taken & {nearest[row] for row in taken}
    passed_over = [
        row for row in range(120) if row not in taken and gaps[row].min() < max(gaps[r].min() for r in taken)
    ]
    assert all(nearest[row] in taken or row in {nearest[other] for other in taken} for row in passed_over)


def test_no_more_duplicates_than_there_are_pairs_and_rows_alone_have_no_neighbour():
    pairs = np.repeat(10.0 * np.eye(3, 5), 2, axis=0)
    pairs[1::2] += 0.1
    labels = np.array([0, 0, 1, 1, 2, 2])
    assert len(chosen(pairs, labels, choose="duplicates", fraction=0.5).forget_F) == 3
    with pytest.raises(DataError, match="only 3 of 6 rows can be forgotten while their nearest neighbour is retained"):
        chosen(pairs, labels, choose="duplicates", fraction=0.67)
    with pytest.raises(DataError, match="only 0 of 2 rows"):
        chosen(pairs[:2], np.array([0, 1]), choose="duplicates", fraction=0.5)


@pytest.mark.parametrize("seed", [0, 1])
def test_similar_rows_are_those_around_one_row(seed):
    made = chosen(FEATURES, LABELS, seed, choose="similar", fraction=0.1)
    taken, gaps = made.forget_F.tolist(), cdist(FEATURES, FEATURES)
    assert [row for row in taken if sorted(gaps[row].argsort()[:12]) == taken]
    assert made.request == "person"
    other = chosen(FEATURES, LABELS, seed + 2, choose="similar", fraction=0.1)
    assert other.forget_F.tolist() != taken


def test_a_fraction_that_grows_asks_for_the_same_rows_and_more():
    sets = [set(chosen(FEATURES, LABELS, fraction=share).forget_F.tolist()) for share in (0.1, 0.2, 0.4)]
    assert sets[0] < sets[1] < sets[2]


def test_choices_that_cannot_be_made_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"forget\.choose=random_rows"):
        ForgetSettings(choose="random_rows")
    with pytest.raises(ConfigError, match=r"forget\.classes without forget\.fraction takes all of them"):
        chosen(FEATURES, LABELS, choose="hardest", classes=[1])
    with pytest.raises(ConfigError, match=r"forget\.parts=13 but there are only 12 rows"):
        chosen(FEATURES, LABELS, parts=13)
    monkeypatch.setattr(choices, "_WIDEST", 4)
    with pytest.raises(ConfigError, match="solves for a head of 5 features, and does so for at most 4"):
        chosen(FEATURES, LABELS, choose="hardest")
