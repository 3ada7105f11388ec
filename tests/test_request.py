from __future__ import annotations

import dataclasses

import pytest
import torch

from sfu.errors import ConfigError, DataError
from sfu.heads.kept import Kept
from sfu.heads.linear import LinearHead
from sfu.request import ForgetRequest, RetainedSet, merge_requests


def head(n_train: int = 20) -> LinearHead:
    zero = torch.zeros(3, 5).double()
    return LinearHead(zero, zero, 0.1, n_train)


def test_it_holds_copies_and_is_frozen():
    features, labels = torch.randn(100, 5), torch.arange(100) % 3
    request = ForgetRequest(head(), features[10:14], labels[10:14])
    for mine, source in ((request.features_FD, features), (request.labels_F, labels)):
        assert mine.untyped_storage().nbytes() == mine.numel() * mine.element_size()
        assert mine.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
        assert mine._base is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.features_FD = features
    with pytest.raises((AttributeError, TypeError)):
        request.retained = features
    assert (request.n_forget, request.n_retain, request.step_ratio) == (4, 16, 0.25)


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (torch.zeros(0, 5), torch.zeros(0, dtype=torch.long), "at least one row"),
        (torch.zeros(2, 4), torch.tensor([0, 1]), "4 wide but the head takes 5"),
        (torch.zeros(2, 5), torch.tensor([0.0, 1.0]), r"has dtype float32.*: labels\.long\(\)\."),
        (torch.zeros(2, 5), torch.tensor([0]), r"has shape \[1\]\. Give \[2\]"),
        (torch.zeros(2, 5), torch.tensor([0, 3]), r"classes 0 \.\. 2"),
        (torch.zeros(2, 5), torch.tensor([-1, 1]), r"run from -1"),
        (torch.full((2, 5), torch.nan), torch.tensor([0, 1]), "NaN or infinite"),
        (torch.zeros(20, 5), torch.zeros(20, dtype=torch.long), "leave none retained"),
    ],
)
def test_requests_that_cannot_work(features, labels, message):
    with pytest.raises(DataError, match=message):
        ForgetRequest(head(), features, labels)


def weighted_request(**changes) -> ForgetRequest:
    weights = torch.linspace(0.5, 2.0, 60).double().reshape(3, 20)
    trained = LinearHead(weights, 0.01 * weights, 0.1, 20, weight=30.0, kept=Kept(data_hessian=torch.eye(20).double()))
    features = torch.randn(4, 20, generator=torch.Generator().manual_seed(0))
    given = {"weights_F": torch.tensor([1.0, 2.0, 3.0, 0.5]).double(), **changes}
    return ForgetRequest(trained, features, torch.tensor([0, 1, 2, 0]), **given)


def test_weights_take_the_place_of_counts_in_the_newton_step():
    request = weighted_request()
    assert (request.weight, request.retained_weight, request.step_ratio) == (6.5, 23.5, 6.5 / 23.5)
    expected = request.forget_gradient() - 30.0 / 6.5 * request.head.gradient_CE
    torch.testing.assert_close(request.newton_gradient(), expected, rtol=1e-12, atol=0)


def test_the_unlearned_head_is_that_of_the_retained_data_and_holds_nothing_of_the_others():
    request = weighted_request()
    moved = request.head.parameters_CE + 1
    left = request.unlearned_head(moved)
    assert torch.equal(left.parameters_CE, moved)
    assert torch.equal(left.gradient_CE, torch.zeros_like(moved))
    assert (left.n_train, left.weight) == (16, 23.5)


def test_views_go_with_their_rows_and_unlabelled_rows_stay_whole():
    views, rows = (torch.randn(2, 4, 20, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    partners = torch.tensor([[0, 1, 2, 3], [2, 3, 0, 1]])
    request = weighted_request(views_VFD=views, partners_VF=partners, unlabelled=(rows[0], rows[1, :3]))
    assert (request.n_forget, request.weight) == (4, 6.5)
    for mine, source in zip(request.unlabelled, (rows[0], rows[1, :3]), strict=True):
        assert torch.equal(mine, source)
        assert mine.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
    part = request.rows(torch.tensor([2, 0]))
    assert torch.equal(part.views_VFD, views[:, [2, 0]])
    assert part.partners_VF.tolist() == [[0, 1], [1, 0]]
    assert request.rows(torch.tensor([3, 2])).partners_VF.tolist() == [[0, 1], [0, 1]]  # partners are gone
    assert [len(part_rows) for part_rows in part.unlabelled] == [4, 3]
    assert part.weight == 4.0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kind": "randomly"}, ConfigError, "request='randomly' is no kind of request. Choose one of random, class"),
        (
            {"unlabelled": (torch.zeros(3, 19),)},
            DataError,
            r"unlabelled rows are \[3, 19\]. Give features \[rows, 20\]",
        ),
        (
            {"partners_VF": torch.zeros(1, 4)},
            DataError,
            r"partners of the views are \[1, 4\]. Give the number of a row",
        ),
        ({"unlabelled": (torch.zeros(0, 20),)}, DataError, r"unlabelled rows are \[0, 20\]"),
        ({"unlabelled": (torch.full((3, 20), torch.nan),)}, DataError, "unlabelled rows have NaN or infinite values"),
    ],
)
def test_kinds_and_unlabelled_rows_that_cannot_work(change, error, message):
    with pytest.raises(error, match=message):
        weighted_request(**change)


def test_parts_of_a_request_merge_into_the_whole():
    request = weighted_request()
    merged = merge_requests([request.rows(torch.tensor([0, 1])), request.rows(torch.tensor([2, 3]))])
    for name in ("features_FD", "labels_F", "weights_F"):
        assert torch.equal(getattr(merged, name), getattr(request, name))


@pytest.mark.parametrize(("count", "weight"), [(15, 23.5), (16, 23.5 * (1 + 1e-6))])
def test_retained_rows_must_be_the_training_set_without_the_forget_set(count, weight):
    request = weighted_request()
    weights = torch.full((count,), weight / count).double()
    retained = RetainedSet(torch.randn(count, 20), torch.zeros(count, dtype=torch.long), weights)
    with pytest.raises(DataError, match=rf"has {count} rows of total weight .* has 16 of 23\.5"):
        request.retained_rows(retained)
