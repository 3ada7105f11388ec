"""Folds of a forget set: random, of equal weight, with near-duplicates together."""

from __future__ import annotations

import pytest
import torch

from sfu.curvature.folds import fold_indices, random_folds
from sfu.curvature.near_duplicates import effective_rows, near_groups
from sfu.heads.linear import LinearHead
from sfu.losses.base import make_loss
from sfu.request import ForgetRequest

D, C = 6, 3


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def request(count: int = 40, weights=None, copies: int = 1, class_weights=None, seed: int = 0) -> ForgetRequest:
    features = torch.randn(count // copies, D, generator=seeded(seed)).repeat(copies, 1)
    labels = (torch.arange(count) * 7) % C
    weighted = weights is not None or class_weights is not None
    loss = make_loss("quadratic", class_weights=class_weights)
    zero = torch.zeros(C, D).double()
    head = LinearHead(zero, zero, 1e-3, 1000, loss=loss, weight=1e6 if weighted else None)
    return ForgetRequest(head, features, labels, weights)


def partition(parts: list[torch.Tensor], count: int) -> bool:
    return torch.equal(torch.cat(parts).sort().values, torch.arange(count))


def test_random_folds_of_equal_rows_are_a_split_permutation():
    parts = fold_indices(23, 5, seeded())
    assert sorted(part.numel() for part in parts) == [4, 4, 5, 5, 5]
    assert partition(parts, 23)
    for one, other in zip(random_folds(request(23), 5, seeded()), parts, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(random_folds(request(23, torch.full((23,), 3.0)), 5, seeded()), parts, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("by_class", [False, True])
def test_random_folds_have_about_equal_weight(by_class):
    weights = None if by_class else torch.linspace(0.1, 5, 60)
    asked = request(60, weights, class_weights=(1.0, 1.0, 10.0) if by_class else None)
    parts = random_folds(asked, 5, seeded(1))
    assert partition(parts, 60)
    of_folds = torch.tensor([asked.rows(part).weight for part in parts])
    assert float(of_folds.max() / of_folds.min()) < 1.1
    assert not torch.equal(parts[0], random_folds(asked, 5, seeded(2))[0])
    of_random = torch.tensor([asked.rows(part).weight for part in fold_indices(60, 5, seeded(1))])
    assert float(of_random.max() / of_random.min()) > 1.2  # so the weights do matter


def test_near_duplicates_stay_in_one_fold():
    asked = request(60, copies=3)
    parts = random_folds(asked, 4, seeded())
    assert partition(parts, 60)
    assert [len(part) for part in parts] == [15] * 4
    for part in parts:
        originals = part % 20
        assert all(int((originals == original).sum()) == 3 for original in originals)
    assert len(random_folds(request(30, copies=15), 5, seeded())) == 2  # two groups


@pytest.mark.parametrize("width", [5, 300])
def test_near_duplicates_are_found(width):
    """Also by projections of many features, in several blocks, and whatever constant all features are moved by."""
    rows = torch.randn(50, width, generator=seeded()).double() + 1e4
    noise = 0.002 * torch.randn(50, width, generator=seeded(1)).double()
    several = torch.cat([rows, rows[:20] + noise[:20], rows[:10], rows[40:] + 0.05])
    groups = near_groups(several)
    assert torch.equal(groups[:50], torch.arange(50))
    assert torch.equal(groups[50:80], torch.cat([torch.arange(20), torch.arange(10)]))
    assert torch.equal(groups[80:], torch.arange(80, 90))  # too far
    assert effective_rows(torch.ones(90), groups) == pytest.approx(90**2 / (10 * 9 + 10 * 4 + 40))


@pytest.mark.parametrize("width", [1, 3, 40])
def test_groups_are_those_of_all_distances(width):
    """With rows that are alone, rows that are near in the projections alone, and copies that differ a little."""
    rows = torch.randn(60, width, generator=seeded()).double()[torch.randint(60, (150,), generator=seeded(1))]
    rows += 0.005 * torch.randn(150, width, generator=seeded(2)).double()
    typical = (2 * (rows - rows.mean(0)).square().sum(1).mean()).sqrt()
    near = (rows[:, None] - rows).square().sum(2) <= (0.01 * typical) ** 2
    first = near.int().argmax(1)
    while not torch.equal(first[first], first):
        first = first[first]
    assert 0 < int((first == torch.arange(150)).sum()) < 150
    assert torch.equal(near_groups(rows), first)


def test_projections_miss_no_row_that_is_nearly_too_far():
    rows = torch.randn(400, 200, generator=seeded()).double()
    typical = (2 * (rows - rows.mean(0)).square().sum(1).mean()).sqrt()
    directions = torch.nn.functional.normalize(torch.randn(400, 200, generator=seeded(1)).double(), dim=1)
    groups = {part: near_groups(torch.cat([rows, rows + part * 0.01 * typical * directions])) for part in (0.98, 1.02)}
    assert torch.equal(groups[0.98], torch.arange(400).repeat(2))
    assert torch.equal(groups[1.02], torch.arange(800))


def test_a_row_that_is_near_to_a_near_duplicate_belongs_to_its_group():
    rows = torch.randn(50, 3, generator=seeded()).double()
    step = 0.8 * 0.01 * (2 * (rows - rows.mean(0)).square().sum(1).mean()).sqrt()
    chain = torch.cat([rows, torch.stack([rows[7] + step * far / 3**0.5 for far in (1, 2, 3)])])
    assert near_groups(chain)[50:].tolist() == [7, 7, 7]


def test_near_duplicates_are_found_in_another_block_of_rows():
    rows = torch.randn(400, 40, generator=seeded())
    assert torch.equal(near_groups(rows.repeat(3, 1)), torch.arange(400).repeat(3))


def test_copies_that_differ_a_little_are_known_by_the_mean():
    one = 5 + 0.001 * torch.randn(20, D, generator=seeded())
    assert torch.equal(near_groups(one), torch.arange(20))
    assert torch.equal(near_groups(one, torch.zeros(D)), torch.zeros(20, dtype=torch.int64))
