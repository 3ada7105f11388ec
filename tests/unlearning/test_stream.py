"""Requests one after another from the full Hessian: exact after every one of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sfu
from sfu.errors import ConfigError, DataError, SingularHessianError
from sfu.heads.recipe import Recipe
from sfu.unlearning.result import UnlearningResult
from tests.reporting.scripts import load_script
from tests.unlearning.cases import rows

FEATURES, LABELS = rows()
NAMES = np.array(["ant", "bee", "cow", "dog"])[LABELS.numpy()]


def trained(start: int = 0, l2: float = 1e-2, **options) -> sfu.LinearHead:
    return sfu.fit(FEATURES[start:], LABELS[start:], l2=l2, loss="quadratic", **options)


def off(head, wanted) -> float:
    return float((head.parameters_CE - wanted.parameters_CE).norm() / wanted.parameters_CE.norm())


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8), bias=st.booleans(),
    reduction=st.sampled_from(["mean", "sum"]), l2=st.sampled_from([1e-6, 1e-2, 1.0]),
)  # fmt: skip
def test_the_head_is_retrained_after_every_request(sizes, bias, reduction, l2):
    head = trained(l2=l2, bias=bias, keep="full")
    head = dataclasses.replace(head, recipe=dataclasses.replace(head.recipe, l2_reduction=reduction))
    stream, done = sfu.RequestStream(head), 0
    for size in sizes:
        assert stream.forget(FEATURES[done : done + size], LABELS[done : done + size]) == size
        done += size
        left = l2 if reduction == "mean" else l2 * 400 / (400 - done)
        assert off(stream.head, trained(done, l2=left, bias=bias)) < 1e-8
        assert stream.head.l2 == pytest.approx(left)
        assert stream.drift < 1e-9
    assert (stream.head.n_train, stream.head.forgotten.requests) == (400 - done, len(sizes))


def test_three_hundred_single_rows_need_few_factorisations_and_leave_no_drift(tmp_path):
    stream = sfu.RequestStream(trained(keep="full", classes=["ant", "bee", "cow", "dog"]))
    for row in range(300):
        assert stream.forget(FEATURES[row], str(NAMES[row])) == 1
    assert stream.drift < 1e-9
    assert off(stream.head, trained(300)) < 1e-8
    assert stream.forget(FEATURES[:3], LABELS[:3]) == 0
    assert stream.forget(FEATURES[299:302], LABELS[299:302]) == 2
    stream.head.save(tmp_path / "head")
    again = sfu.RequestStream(sfu.load_head(tmp_path / "head"))
    assert again.forget(FEATURES[300], LABELS[300]) == 0
    again.forget(FEATURES[302:310], LABELS[302:310])
    assert off(again.head, trained(310)) < 1e-8
    fixed = dataclasses.replace(trained(keep="full"), recipe=Recipe(l2_reduction="sum"))
    stream = sfu.RequestStream(fixed)
    for row in range(100):
        stream.forget(FEATURES[row], LABELS[row])
    assert stream.factorizations == 1


def test_sample_weights_count():
    weights = torch.linspace(0.5, 2, 400, dtype=torch.float64)
    stream = sfu.RequestStream(trained(keep="full", weights=weights))
    stream.forget(FEATURES[:30], LABELS[:30], weights=weights[:30])
    stream.forget(FEATURES[30], LABELS[30], weights=weights[30:31])
    assert off(stream.head, trained(31, weights=weights[31:])) < 1e-8
    assert stream.head.total_weight == pytest.approx(float(weights[31:].sum()))


def test_a_regression_of_one_output():
    layer = torch.nn.Linear(12, 1, dtype=torch.float64)
    targets = FEATURES @ torch.ones(12, 1).double() + 0.1 * LABELS[:, None]

    def solved(start):
        design = torch.cat([FEATURES[start:], torch.ones(400 - start, 1)], 1)
        ridge = 1e-2 * torch.eye(13).double()
        ridge[-1, -1] = 0
        gram = design.T @ design / len(design)
        return torch.linalg.solve(gram + ridge, design.T @ targets[start:] / len(design)).T, gram

    whole, gram = solved(0)
    with torch.no_grad():
        layer.weight.copy_(whole[:, :12])
        layer.bias.copy_(whole[:, 12])
    head = sfu.LinearHead.from_module(layer, l2=1e-2, n_train=400, loss="quadratic")
    stream = sfu.RequestStream(dataclasses.replace(head, kept=sfu.Kept(data_hessian=gram)))
    stream.forget(FEATURES[:50], targets[:50])
    torch.testing.assert_close(stream.head.parameters_CE, solved(50)[0], rtol=1e-7, atol=1e-9)


def test_what_no_stream_can_serve_is_refused():
    stopped = dataclasses.replace(trained(keep="full"), recipe=Recipe(trained="early_stopped"))
    for head, message in (
        (trained(), "loss=quadratic and no full Hessian"), (stopped, "this one was stopped early"),
        (sfu.fit(FEATURES, LABELS, l2=1e-2, loss="softmax", keep="full"), "loss=softmax and a full Hessian"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            sfu.RequestStream(head)
    stream = sfu.RequestStream(trained(keep="full"))
    before = stream.head.parameters_CE
    for features, labels in ((FEATURES[:2, :5], LABELS[:2]), (FEATURES[:2], LABELS[:2] + 9), (FEATURES / 0, LABELS)):
        with pytest.raises(DataError):
            stream.forget(features, labels)
    assert torch.equal(stream.head.parameters_CE, before)
    assert stream.head.n_train == 400


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_head_keeps_what_a_head_keeps(dtype):
    given = trained(keep="full").to(torch.device("cpu"), dtype)
    stream = sfu.RequestStream(given)
    stream.forget(FEATURES[:30], LABELS[:30])
    stream.forget(FEATURES[30], LABELS[30])
    head, wanted = stream.head, trained(31, keep="full")
    assert head.parameters_CE.dtype == dtype
    assert head.forgotten.predicted() == (1, 1, 1)
    torch.testing.assert_close(head.kept.shares_C, wanted.kept.shares_C)
    assert head.kept.trace == pytest.approx(wanted.kept.trace, rel=1e-5)
    assert wanted.kept.bound <= head.kept.bound == pytest.approx(given.kept.bound * 400 / 369)
    assert (head.kept.projected_2K is None) == (given.kept.projected_2K is None)


def test_a_request_that_fails_leaves_the_stream_as_it_was():
    stream = sfu.RequestStream(trained(keep="full"))
    with pytest.raises(SingularHessianError):
        stream.forget(100 * FEATURES[:20], LABELS[:20])
    assert (stream.head.n_train, stream.head.forgotten.rows) == (400, 0)
    assert stream.forget(FEATURES[:20], LABELS[:20]) == 20
    assert off(stream.head, trained(20)) < 1e-8


def test_equal_rows_count_once_unless_they_are_copies():
    stream = sfu.RequestStream(trained(keep="full"))
    assert stream.forget(FEATURES[:5].repeat(40, 1), LABELS[:5].repeat(40)) == 5
    assert off(stream.head, trained(5)) < 1e-8
    twice = sfu.fit(torch.cat([FEATURES, FEATURES[:5]]), torch.cat([LABELS, LABELS[:5]]), l2=1e-2, loss="quadratic",
                    keep="full")  # fmt: skip
    stream = sfu.RequestStream(twice)
    assert stream.forget(FEATURES[:5].repeat(2, 1), LABELS[:5].repeat(2), copies=True) == 10
    assert off(stream.head, trained(5)) < 1e-8


def test_no_head_is_refused():
    result = UnlearningResult(trained())
    for head, message in ((None, "a NoneType"), (torch.nn.Linear(12, 4), "a Linear"), (result, "Give the .head of")):
        with pytest.raises(DataError, match=message):
            sfu.RequestStream(head)


def test_the_benchmark_runs(capsys):
    assert load_script("bench_stream").main(["--quick"]) == 0
    assert "times as fast" in capsys.readouterr().out
