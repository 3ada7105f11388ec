"""Requests one after another: what the head remembers, what the note says, and whether its figures are true."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import sfu
from sfu.curvature.settings import curvature_settings
from sfu.heads.forgotten import Forgotten
from sfu.request import ForgetRequest, MethodContext
from sfu.unlearning.methods.newton import Newton

L2, ROWS, REQUESTS = 1e-3, 36, 5
CURVATURE = {"estimator": "closed_form"}


def digits(seed: int):
    pixels, labels = load_digits(return_X_y=True)
    chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[:1437]
    return torch.nn.functional.normalize(torch.from_numpy(pixels), dim=1)[chosen], torch.from_numpy(labels)[chosen]


def ridge(features, labels) -> torch.nn.Linear:
    hot = torch.nn.functional.one_hot(labels, 10).double()
    gram = features.T @ features / len(labels) + L2 * torch.eye(64).double()
    layer = torch.nn.Linear(64, 10, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.linalg.solve(gram, features.T @ hot / len(labels)).T)
    return layer


def distances(seed: int, curvature, serve=lambda head: head, size=ROWS, **options):
    """The distance to Retrained after requests one after another and after one for all rows, and the results."""
    features, labels = digits(seed)
    given = sfu.LinearHead.from_module(ridge(features, labels), l2=L2, n_train=1437, loss="quadratic", **options)
    total = REQUESTS * ROWS
    at_once = sfu.unlearn(given, features[:total], labels[:total], curvature=curvature)
    head, results = given, []
    for start in range(0, total, size):
        rows = slice(start, start + size)
        result = sfu.unlearn(head, features[rows], labels[rows], curvature=curvature)
        assert result.applied
        head = serve(result.head)
        assert head.n_train == 1437 - rows.stop
        results.append(result)
    retained = features[total:]
    gram = retained.T @ retained / len(retained) + L2 * torch.eye(64).double()
    target = ridge(retained, labels[total:]).weight.detach()
    one_by_one, once, start = (
        float(((off := end.parameters_CE - target) @ gram * off).sum().sqrt()) for end in (head, at_once.head, given)
    )
    return one_by_one / start, once / start, results


@pytest.mark.parametrize(("size", "ledger"), [(36, False), (9, False), (36, True)])
def test_a_sequence_of_requests_predicts_where_it_ends(tmp_path, size, ledger):
    def through_files(head):
        head.save(tmp_path / "head")
        return sfu.load_head(tmp_path / "head")

    for seed in range(2):
        measured, once, results = distances(seed, CURVATURE, through_files, size, ledger=ledger)
        last, low, high = results[-1], *results[-1].predicted_share_interval
        assert last.predicted_distance == pytest.approx(measured, rel=0.15)
        assert low <= 1 - measured**2 <= high
        assert (measured > once) is not ledger or measured == pytest.approx(once, rel=0.02)
        if ledger:
            assert not any(result.note for result in results)
            continue
        assert results[0].note is None
        told = f"{last.predicted_distance:.2f}" if size == 36 else "at most 1.00"
        assert f"one for all rows, here at a predicted distance of {told} after all of them" in last.note
        assert f"had already forgotten {180 - size} rows in {180 // size - 1} requests;" in last.note


def test_a_request_without_a_prediction_ends_that_of_the_sequence():
    features, labels = digits(0)
    given = sfu.LinearHead.from_module(ridge(features, labels), l2=L2, n_train=1437, loss="quadratic", bound=1.0)
    first = sfu.unlearn(given, features[:60], labels[:60], curvature=CURVATURE)
    assert first.head.forgotten.predicted()[1] == first.predicted_share
    selected = sfu.unlearn(first.head, features[60:90], labels[60:90], request="selected", curvature=CURVATURE)
    assert selected.applied
    last = sfu.unlearn(selected.head, features[90:150], labels[90:150], curvature=CURVATURE)
    assert selected.predicted_share is last.predicted_share is None
    assert last.note.startswith("this head had already forgotten 90 rows in 2 requests; requests one after another end")
    noisy = sfu.unlearn(first.head, features[90:150], labels[90:150], curvature=CURVATURE, noise_sigma=1e-6)
    assert noisy.applied
    assert noisy.predicted_share is None


def test_batches_predict_what_requests_do():
    features, labels = digits(0)
    head = sfu.LinearHead.from_module(ridge(features, labels), l2=L2, n_train=1437, loss="quadratic")
    result = sfu.unlearn(head, features[:180], labels[:180], batches=5, curvature=CURVATURE)
    assert 0.6 < result.predicted_distance < 0.8
    assert f"predicted distance of {result.predicted_distance:.2f} after all of them" in result.note


@pytest.mark.parametrize("size", [36, 9])
def test_a_ledger_makes_requests_one_after_another_as_good_as_one(size):
    """Figures of docs/keep.md; tests/unlearning/test_ledger.py has other cases."""
    one_by_one, once, _ = distances(0, CURVATURE, size=size, ledger=True)
    assert one_by_one < 1.1 * once


def test_unlabelled_rows_make_requests_one_after_another_almost_as_good(tmp_path):
    pixels, _ = load_digits(return_X_y=True)
    others = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))[1437:]  # those of no training row
    np.savez(tmp_path / "rows.npz", features=pixels[others] / np.linalg.norm(pixels[others], axis=1, keepdims=True))
    known = {**CURVATURE, "unlabelled": str(tmp_path / "rows.npz")}
    one_by_one, once, _ = distances(0, known)
    assert abs(one_by_one - 0.33) < 3 * 0.023  # figures of docs/limits.md, and standard deviations over splits
    assert abs(once - 0.26) < 3 * 0.020


def test_rows_that_are_requested_again_are_left_out():
    features, labels = digits(0)
    given = sfu.LinearHead.from_module(ridge(features, labels), l2=L2, n_train=1437, loss="quadratic")
    first = sfu.unlearn(given, features[:40], labels[:40], curvature=CURVATURE)
    again = sfu.unlearn(first.head, features[:40].float().double(), labels[:40], curvature=CURVATURE)
    assert again.applied  # other numbers are other rows
    again = sfu.unlearn(first.head, features[:40], labels[:40].int(), curvature=CURVATURE)
    assert not again.applied
    assert again.note == (
        "not applied: 40 of 40 rows had been forgotten from this head before, so there is nothing left to do"
    )
    assert torch.equal(again.head.parameters_CE, first.head.parameters_CE)
    assert again.head.n_train == 1397
    mixed = sfu.unlearn(first.head, features[20:80], labels[20:80], views=features[None, 20:80], curvature=CURVATURE)
    alone = sfu.unlearn(first.head, features[40:80], labels[40:80], views=features[None, 40:80], curvature=CURVATURE)
    assert torch.equal(mixed.head.parameters_CE, alone.head.parameters_CE)
    assert mixed.head.n_train == 1357
    assert mixed.note == f"20 of 60 rows had been forgotten from this head before and are left out; {alone.note}"


def test_rows_that_are_given_twice_count_once_unless_the_training_set_held_them_twice():
    features, labels = digits(0)
    given = sfu.LinearHead.from_module(ridge(features, labels), l2=L2, n_train=1437, loss="quadratic")
    rows = torch.cat([torch.arange(40), torch.arange(10, 13)])
    once, twice, all_of_them = (
        sfu.unlearn(given, features[index], labels[index], curvature=CURVATURE, copies=copies)
        for index, copies in ((rows[:40], False), (rows, False), (rows, True))
    )
    assert torch.equal(twice.head.parameters_CE, once.head.parameters_CE)
    assert (once.head.n_train, twice.head.n_train, all_of_them.head.n_train) == (1397, 1397, 1394)
    assert (once.note, all_of_them.note) == (None, None)
    assert twice.note == "3 rows given again in this request count once (copies=True counts them all)"
    other = sfu.unlearn(given, features[rows], torch.cat([labels[:40], (labels[10:13] + 1) % 10]), curvature=CURVATURE)
    assert other.head.n_train == 1394  # other labels are other rows


def test_a_step_that_is_withheld_is_not_remembered():
    features, labels = digits(0)
    features = features * torch.linspace(0.5, 1.5, len(features))[:, None].double()  # so that no bound is known
    given = sfu.LinearHead.from_module(ridge(features, labels), l2=L2, n_train=1437, loss="quadratic")
    one_class = labels == 3
    withheld = sfu.unlearn(given, features[one_class], labels[one_class], curvature=CURVATURE)
    assert not withheld.applied
    assert (withheld.head.n_train, withheld.head.forgotten.requests) == (1437, 0)
    forced = sfu.unlearn(
        withheld.head, features[one_class], labels[one_class], curvature={**CURVATURE, "on_doubt": "apply"}
    )
    assert forced.head.forgotten.requests == 1
    first = sfu.unlearn(given, features[~one_class][:40], labels[~one_class][:40], curvature=CURVATURE)
    second = sfu.unlearn(first.head, features[one_class], labels[one_class], curvature=CURVATURE)
    assert second.note.startswith("not applied: the forget set is no random sample")
    assert "requests" not in second.note
    assert second.head.forgotten == first.head.forgotten


@pytest.mark.parametrize("batches", [1, 2])
def test_batches_are_requests_and_experiments_only_count(batches):
    features, labels = digits(0)
    given = sfu.LinearHead.from_module(ridge(features, labels), l2=L2, n_train=1437, loss="quadratic")
    method = Newton(curvature_settings(CURVATURE), batches=batches)
    result = method.unlearn(ForgetRequest(given, features[:80], labels[:80]), MethodContext())
    assert result.head.forgotten == Forgotten(batches, 80)
    assert (result.note is not None) == (batches > 1)
    if batches > 1:
        assert result.note.startswith("this request was served in 2 batches; requests one after another end further")


def test_requests_with_the_retained_curvature_are_exact_and_need_no_note():
    features, labels = digits(0)
    given = sfu.LinearHead.from_module(ridge(features, labels), l2=L2, n_train=1437, loss="quadratic")
    exact = Newton(curvature_settings(estimator="exact"), batches=3)
    retained = sfu.RetainedSet(features[80:], labels[80:])
    result = exact.unlearn(ForgetRequest(given, features[:80], labels[:80]), MethodContext(), retained)
    assert result.note is None
    assert result.head.forgotten == Forgotten(3, 80)
    torch.testing.assert_close(result.head.parameters_CE, ridge(features[80:], labels[80:]).weight.detach())


def test_short_words_for_results_heads_and_requests():
    features, labels = digits(0)
    given = sfu.LinearHead.from_module(ridge(features, labels), l2=L2, n_train=1437, loss="quadratic")
    result = sfu.unlearn(given, features[:40], labels[:40], curvature=CURVATURE)
    text = repr(sfu.unlearn(result.head, features[40:80], labels[40:80], curvature=CURVATURE))
    assert text.splitlines()[:3] == [
        "UnlearningResult(",
        "  method: Newton step, curvature.estimator=closed_form",
        "  applied: True",
    ]
    assert re.search(r"^  predicted_distance_gain: \d\.\d+", text, re.M)
    assert re.search(r"^  note: this head had already forgotten 40 rows in 1 request;", text, re.M)
    assert "LinearHead(10 classes, 64 features, bias=False, loss=quadratic, l2=0.001, n_train=1357, " in text
    assert len(text.splitlines()) == 10
    request = ForgetRequest(given, features[:40], labels[:40])
    for shown in (text, repr(given), repr(request), repr(sfu.RetainedSet(features, labels))):
        assert "tensor" not in shown
        assert len(shown) < 800
    assert repr(request).startswith("ForgetRequest(40 of 1437 rows, head=LinearHead(")
