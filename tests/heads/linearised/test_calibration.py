"""Rows of a linearised head with heavy tails: what the trace that the head keeps makes of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from sfu.curvature.calibration import factors_of_unlabelled, factors_to, stretch_of_forget_rows
from sfu.curvature.caution import assess
from sfu.curvature.cross_validation import cross_validate
from sfu.curvature.estimators.base import make_estimator
from sfu.curvature.likeness import counted
from sfu.curvature.settings import curvature_settings
from sfu.heads.cores.core import Core
from sfu.heads.settings import LinearisedSettings
from sfu.heads.train import train_head
from sfu.losses.base import make_loss
from sfu.request import ForgetRequest, MethodContext
from sfu.unlearning.methods.newton import Newton

D, C, N, FORGET, UNLABELLED = 6, 3, 300, 60, 150
CONTEXT = MethodContext({"folds": 5})


def heavy_rows(count: int, seed: int, heavy: int = 4) -> torch.Tensor:
    """Rows of which the last few are 15 times as large, along directions of their own."""
    rows = torch.randn(count, D, generator=torch.Generator().manual_seed(seed)).double()
    rows[count - heavy :] *= 15
    return rows


def make(seed: int = 0, forget_heavy: int = 0, l2: float = 0.1):
    """A trained head, a request of 60 rows without (or with) heavy ones, and the index of the retained rows."""
    features = heavy_rows(N, seed)
    labels = (features[:, :C] + torch.randn(N, C, generator=torch.Generator().manual_seed(seed + 1000))).argmax(1)
    torch.manual_seed(0)
    core = Core.of(nn.Linear(D, C).double(), features[:4], batch_size=N, components=("fc",))
    head = train_head(
        features, labels, C, LinearisedSettings(l2=l2, tolerance=1e-10), make_loss("quadratic"), seed=0,
        device=torch.device("cpu"), dtype=torch.float64, core=core,
    )  # fmt: skip
    start = N - FORGET - 4 + forget_heavy
    forget = torch.arange(start, start + FORGET)
    keep = torch.ones(N, dtype=torch.bool)
    keep[forget] = False
    return ForgetRequest(head, features[forget], labels[forget]), features[keep]


def design(features: torch.Tensor) -> torch.Tensor:
    return torch.cat([features, torch.ones(len(features), 1).double()], 1)


def moments(features: torch.Tensor, factors: torch.Tensor | float = 1.0) -> torch.Tensor:
    rows = design(features)
    return (rows * (torch.ones(len(rows)).double() * factors)[:, None]).T @ rows / len(rows)


def along(operator) -> torch.Tensor:
    """``v^T H v`` for v along single features of class 0."""
    return operator.quadratic(torch.eye(D, C * (D + 1)).double()[:, None])


def without_projections(request: ForgetRequest) -> ForgetRequest:
    """The request, where nothing tells that rows without heavy ones are unlike the training rows."""
    kept = dataclasses.replace(request.head.kept, projected_2K=None)
    return dataclasses.replace(request, head=dataclasses.replace(request.head, kept=kept))


def without_trace(request: ForgetRequest) -> ForgetRequest:
    head = request.head
    return dataclasses.replace(request, head=dataclasses.replace(head, kept=dataclasses.replace(head.kept, trace=None)))


@pytest.mark.parametrize("wanted", [0.4, 2.0, 7.5])
def test_factors_cap_the_largest_squares_so_that_the_mean_is_the_wanted_one(wanted):
    squares = torch.tensor([1.0, 30.0, 0.5, 2.0, 9.0, 0.0]).double()
    scaled = factors_to(wanted, squares) * squares
    assert float(scaled.mean()) == pytest.approx(min(wanted, 42.5 / 6) if wanted < 42.5 / 6 else wanted)
    if wanted < 42.5 / 6:
        torch.testing.assert_close(scaled, squares.clamp(max=float(scaled.max())))
    else:
        torch.testing.assert_close(scaled, squares * wanted / (42.5 / 6))
    assert factors_to(1.0, torch.zeros(3).double()).tolist() == [1, 1, 1]


def test_the_trace_is_the_mean_square_of_the_jacobians_and_follows_a_request():
    request, retained = make()
    exact = C * float((design(torch.cat([retained, request.features_FD]))).square().sum(1).mean())
    assert request.head.kept.trace == pytest.approx(exact, rel=0.15)  # by random signs
    left = request.unlearned_head(request.head.parameters_CE).kept.trace
    rows = request.head.rows(retained, torch.zeros(len(retained), dtype=torch.int64))
    assert left == pytest.approx(float(request.head.traces(rows).sum()), rel=1e-9)
    assert stretch_of_forget_rows(request) == pytest.approx(left / request.trace, rel=1e-9)
    assert stretch_of_forget_rows(without_trace(request)) == 1


def test_held_out_forget_rows_are_stretched_and_unlabelled_rows_capped():
    request, _ = make()
    unlabelled = heavy_rows(UNLABELLED, 77)
    request = dataclasses.replace(request, unlabelled=(unlabelled[:50], unlabelled[50:]))
    factors = torch.cat(factors_of_unlabelled(request))
    estimator, head = make_estimator(curvature_settings(estimator="closed_form")), request.head
    assert float(factors.min()) < 0.7
    for rows, of_set in zip(request.unlabelled, factors_of_unlabelled(request), strict=True):
        assert float(of_set @ head.traces(head.unlabelled_rows(rows))) == pytest.approx(head.kept.trace, rel=1e-9)
    stretch, identity = stretch_of_forget_rows(request), torch.eye(D).double()
    assert stretch > 1.5

    def wanted(data):
        return (data[:D, :D] + head.l2 * identity).diagonal()

    whole = cross_validate(estimator, request, CONTEXT, 1, 0.25)
    torch.testing.assert_close(
        along(whole.sources.operators["unlabelled_2"]), wanted(moments(unlabelled[50:], factors[50:]))
    )
    fold, parts = whole.folds[0], [moments(unlabelled[:50], factors[:50]), moments(unlabelled[50:], factors[50:])]
    assert whole.trust == 1  # one fold holds nothing out of the forget rows
    training = (parts[0] * 50 + parts[1] * 100) / 150
    share = request.step_ratio
    torch.testing.assert_close(
        along(fold.held_out), wanted((1 + share) * training - share * moments(request.features_FD))
    )
    both = sum(along(fold.held_out) for fold in cross_validate(estimator, request, CONTEXT, 2, 0.25).folds) / 2
    own = moments(request.features_FD)
    torch.testing.assert_close(both, wanted(0.75 * stretch * own + 0.25 * ((1 + share) * training - share * own)))
    alone = cross_validate(estimator, dataclasses.replace(request, unlabelled=()), CONTEXT, 2)
    both = sum(along(fold.held_out) for fold in alone.folds) / 2
    torch.testing.assert_close(both, wanted(stretch * moments(request.features_FD)))
    assert factors_of_unlabelled(without_trace(request)) is None


def test_scaled_rows_keep_their_weight_in_every_other_form():
    request, _ = make()
    factors = torch.linspace(0.1, 1, FORGET).double()
    rows = request.data().scaled(factors)
    assert rows.weight == FORGET
    for same in (rows, rows.to_float32(), rows.joined([rows], [0.5, 0.5])):
        assert float(same.shares_N.sum()) == pytest.approx(float(factors.mean()))
    assert float(rows.thinned(2).shares_N.sum()) == pytest.approx(float(factors[::2].mean()))


def test_a_gain_is_predicted_only_if_the_rows_show_enough_of_the_curvature():
    light, heavy = make()[0], make(forget_heavy=2)[0]
    assert counted(heavy.head.traces(heavy.data())) < 8.5
    assert assess(heavy).caution.few == 1
    assert Newton(curvature_settings(estimator="closed_form")).unlearn(light, CONTEXT).predicted_distance_gain is None
    for request in (light, heavy):
        assert not assess(request).enough
        for among, enough in ((0, True), (4, False)):  # once capped, four heavy ones are most of the curvature again
            rows = heavy_rows(UNLABELLED, 77, among)
            shown = dataclasses.replace(without_projections(request), unlabelled=(rows,))
            assert assess(shown).enough is enough
            assert not assess(without_trace(shown)).enough


def test_heavy_tails_are_no_drift_but_rows_without_them_are():
    request = make()[0]
    alike, light = (assess(dataclasses.replace(request, unlabelled=(heavy_rows(600, 77, among),))) for among in (8, 0))
    assert alike.evidence["drift"].at_most > 0.04  # a linear head would not trust them
    assert alike.trust > 0.5
    assert light.trust == 0


def retained_distance(request: ForgetRequest, retained: torch.Tensor) -> float:
    """Distance to Retrained of the cross-validated step, by dense algebra."""
    result = Newton(curvature_settings(estimator="closed_form")).unlearn(request, CONTEXT)
    hessian = moments(retained) + request.head.l2 * torch.eye(D + 1).double()

    def per_class(vector_1P: torch.Tensor) -> torch.Tensor:
        return torch.cat([vector_1P[0, : C * D].view(C, D), vector_1P[0, C * D :, None]], 1)

    target = request.step_ratio * torch.linalg.solve(hessian, per_class(request.newton_gradient()).T).T
    away = per_class(result.head.parameters_CE - request.head.parameters_CE) - target
    return float(((away @ hessian) * away).sum() / ((target @ hessian) * target).sum()) ** 0.5


def test_retained_rows_heavier_than_all_that_are_seen_do_less_harm():
    """Four retained rows have two thirds of all curvature; without the trace, steps are far too long."""
    found = [retained_distance(one, retained) for request, retained in (make(2), make(3))
             for one in (request, without_trace(request))]  # fmt: skip
    assert max(found[::2]) < 0.9
    assert min(found[1::2]) > 1.2
