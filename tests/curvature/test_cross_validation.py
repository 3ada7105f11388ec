"""What the folds are: everything without their rows, and the Hessian that they show."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sfu import request as request_module
from sfu.curvature import cross_validation
from sfu.curvature.cross_validation import FORGET, RETAINED, UNLABELLED, VIEWS, Sources, cross_validate, observe_once
from sfu.curvature.estimators.base import make_estimator
from sfu.curvature.settings import curvature_settings
from sfu.curvature.source_fit import Caution, choose_step
from sfu.errors import ConfigError
from sfu.heads.settings import Training
from sfu.losses.base import make_loss
from sfu.operators.build import build_operator
from sfu.operators.structure import Structure
from tests.unlearning.cases import CONTEXT, FORGET_CURVATURE, case, situation

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def second_moments(rows: torch.Tensor) -> torch.Tensor:
    return rows.double().T @ rows.double() / rows.shape[0] + 1e-3 * torch.eye(rows.shape[1]).double()


@pytest.mark.parametrize("training", list(Training))
def test_a_fold_is_the_curvature_of_the_others_and_is_scored_by_its_own(training):
    request, _, _ = situation(training=training, n_forget=50)
    head = request.head
    validation = cross_validate(make_estimator(FORGET_CURVATURE), request, CONTEXT, 5)
    correction = 400 / 50 * head.gradient_CE
    order = torch.randperm(50, generator=CONTEXT.generator("folds")).tensor_split(5)
    assert float(head.gradient_CE.norm()) > 0.01 or training is Training.exact
    for k, fold in enumerate(validation.folds):
        others = request.rows(torch.cat([part for j, part in enumerate(order) if j != k]))
        assert list(fold.sources.rows) == [FORGET]
        found = fold.sources.operators[FORGET].blocks_BKK
        torch.testing.assert_close(found, others.hessian(Structure.shared).blocks_BKK, **CLOSE)
        torch.testing.assert_close(fold.gradient_CE, others.forget_gradient() - correction, **CLOSE)
        torch.testing.assert_close(fold.signal_CE, head.gradient_CE - correction, **CLOSE)
        torch.testing.assert_close(
            fold.held_out.blocks_BKK, request.rows(order[k]).hessian(Structure.shared).blocks_BKK, **CLOSE
        )
        assert fold.training is None
    whole = request.hessian(Structure.shared).blocks_BKK
    torch.testing.assert_close(validation.sources.operators[FORGET].blocks_BKK, whole, **CLOSE)
    assert (len(validation.folds), validation.failed_fits) == (5, 0)


def with_others(n_forget: int = 50, views: int = 2, sets: int = 1):
    """A request with views of its rows and sets of unlabelled rows."""
    request, retained, _ = situation(n_forget=n_forget)
    shifts = 0.1 * torch.randn(views, n_forget, 12, generator=torch.Generator().manual_seed(0))
    unlabelled = tuple(retained.features_RD[:100].split(100 // sets))
    return dataclasses.replace(request, views_VFD=request.features_FD + shifts, unlabelled=unlabelled)


def test_views_and_unlabelled_rows_are_split_too():
    request = with_others()
    (rows,) = request.unlabelled
    estimator = make_estimator(FORGET_CURVATURE)
    validation = cross_validate(estimator, request, CONTEXT, 5, trust=0.5)
    drawn = CONTEXT.generator("folds")
    order, split = (torch.randperm(count, generator=drawn).tensor_split(5) for count in (50, 100))
    own = second_moments(request.features_FD)
    for k, fold in enumerate(validation.folds):
        kept, left = (torch.cat([part for j, part in enumerate(parts) if j != k]) for parts in (order, split))
        expected = {
            FORGET: second_moments(request.features_FD[kept]),
            VIEWS: second_moments(request.views_VFD[:, kept].flatten(0, 1)),
            UNLABELLED: second_moments(rows[left]),
        }
        assert list(fold.sources.rows.items()) == [(FORGET, 50), (VIEWS, 80), (UNLABELLED, 80), (RETAINED, 0)]
        for name, block in expected.items():
            torch.testing.assert_close(fold.sources.operators[name].blocks_BKK[0], block, **CLOSE)
        retained = (400 * expected[UNLABELLED] - 50 * expected[FORGET]) / 350
        values, vectors = torch.linalg.eigh(retained - 1e-3 * torch.eye(12).double())
        raised = vectors * values.clamp(min=0) @ vectors.T + 1e-3 * torch.eye(12).double()
        torch.testing.assert_close(fold.sources.operators[RETAINED].blocks_BKK[0], raised, rtol=1e-6, atol=1e-9)
        training = second_moments(rows[split[k]])
        torch.testing.assert_close(fold.training.blocks_BKK[0], training, **CLOSE)
        shown = (400 * training - 50 * own) / 350
        mean = 0.5 * shown + 0.5 * second_moments(request.features_FD[order[k]])
        torch.testing.assert_close(fold.held_out.blocks_BKK[0], mean, **CLOSE)
    whole = observe_once(estimator, request, estimator.observe(request, CONTEXT)).sources
    for name in (FORGET, VIEWS, UNLABELLED):
        torch.testing.assert_close(
            validation.sources.operators[name].blocks_BKK, whole.operators[name].blocks_BKK, **CLOSE
        )
    assert validation.sources.rows == {FORGET: 50, VIEWS: 100, UNLABELLED: 100, RETAINED: 0}


def test_a_fold_is_made_without_views_that_show_one_of_its_rows():
    request = with_others()
    rows = torch.arange(50)
    partners = torch.stack([rows, (rows + 7) % 50])  # the second view of each row is mixed with another row
    mixed = dataclasses.replace(request, partners_VF=partners)
    validation = cross_validate(make_estimator(FORGET_CURVATURE), mixed, CONTEXT, 5)
    order = torch.randperm(50, generator=CONTEXT.generator("folds")).tensor_split(5)
    for fold, own in zip(validation.folds, order, strict=True):
        shows = torch.isin(rows, own) | torch.isin(partners, own)
        assert 10 < shows[1].sum() < 40
        expected = second_moments(request.views_VFD[~shows])
        torch.testing.assert_close(fold.sources.operators[VIEWS].blocks_BKK[0], expected, **CLOSE)
        assert fold.sources.rows[VIEWS] == (~shows).sum()
    whole = second_moments(request.views_VFD.flatten(0, 1))
    torch.testing.assert_close(validation.sources.operators[VIEWS].blocks_BKK[0], whole, **CLOSE)


def test_if_every_view_shows_a_row_of_the_fold_the_forget_rows_stand_for_them():
    request = with_others(n_forget=20, views=1)
    first, second = torch.randperm(20, generator=CONTEXT.generator("folds")).tensor_split(2)
    partners = torch.empty(1, 20, dtype=torch.int64)
    partners[0, first], partners[0, second] = second, first
    validation = cross_validate(
        make_estimator(FORGET_CURVATURE), dataclasses.replace(request, partners_VF=partners), CONTEXT, 2
    )
    for fold, others in zip(validation.folds, (second, first), strict=True):
        expected = second_moments(request.features_FD[others])
        torch.testing.assert_close(fold.sources.operators[VIEWS].blocks_BKK[0], expected, **CLOSE)


def test_every_row_is_looked_at_once(monkeypatch):
    seen = []

    def build(objective, rows, parameters_CE, structure):
        seen.append(rows.count)
        return build_operator(objective, rows, parameters_CE, structure)

    for module in (cross_validation, request_module):
        monkeypatch.setattr(module, "build_operator", build)
    cross_validate(make_estimator(FORGET_CURVATURE), with_others(), CONTEXT, 5, trust=0.5)
    assert sorted(seen) == 5 * [10] + 10 * [20]  # forget rows, two views of each, unlabelled rows


def test_the_difference_of_sampled_curvatures_has_no_negative_eigenvalues():
    request = with_others()
    few = dataclasses.replace(request, unlabelled=(request.unlabelled[0][:8],))
    found = cross_validate(make_estimator(FORGET_CURVATURE), few, CONTEXT, 5, trust=0.5).sources.operators
    blocks = {name: one.blocks_BKK[0] - 1e-3 * torch.eye(12).double() for name, one in found.items()}
    assert torch.linalg.eigvalsh(400 * blocks[UNLABELLED] - 50 * blocks[FORGET])[0] < -1
    assert torch.linalg.eigvalsh(blocks[RETAINED])[0] > -1e-9


def test_without_trust_unlabelled_rows_are_a_source_and_no_judge():
    validation = cross_validate(make_estimator(FORGET_CURVATURE), with_others(sets=2), CONTEXT, 5)
    alone = cross_validate(make_estimator(FORGET_CURVATURE), situation(n_forget=50)[0], CONTEXT, 5)
    assert list(validation.sources.rows) == [FORGET, VIEWS, f"{UNLABELLED}_1", f"{UNLABELLED}_2"]
    for fold, other in zip(validation.folds, alone.folds, strict=True):
        assert fold.training is None
        torch.testing.assert_close(fold.held_out.blocks_BKK, other.held_out.blocks_BKK, **CLOSE)


def test_fewer_rows_than_folds_stay_whole_and_unlabelled_rows_are_held_out():
    request = with_others(n_forget=3)
    validation = cross_validate(make_estimator(FORGET_CURVATURE), request, CONTEXT, 5, trust=1.0)
    assert len(validation.folds) == 5
    own = second_moments(request.features_FD)
    for fold in validation.folds:
        assert fold.sources.rows == {FORGET: 3, VIEWS: 6, UNLABELLED: 80, RETAINED: 0}
        torch.testing.assert_close(fold.sources.operators[FORGET].blocks_BKK[0], own, **CLOSE)
        expected = (400 * fold.training.blocks_BKK[0] - 3 * own) / 397
        torch.testing.assert_close(fold.held_out.blocks_BKK[0], expected, **CLOSE)
        torch.testing.assert_close(fold.gradient_CE, request.newton_gradient(), **CLOSE)


def test_copies_of_one_row_cannot_be_split():
    request, _, _ = situation(n_forget=30)
    copies = type(request)(request.head, request.features_FD[:1].repeat(30, 1), request.labels_F)
    validation = cross_validate(make_estimator(FORGET_CURVATURE), copies, CONTEXT, 5)
    assert validation.folds == ()
    torch.testing.assert_close(
        validation.sources.operators[FORGET].blocks_BKK, copies.hessian(Structure.shared).blocks_BKK, **CLOSE
    )


def test_a_mixture_of_sources_by_hand():
    request = with_others()
    sources = cross_validate(make_estimator(FORGET_CURVATURE), request, CONTEXT, 5).sources
    weights = (0.25, 0.0, 0.75)
    expected = 0.25 * second_moments(request.features_FD) + 0.75 * second_moments(request.unlabelled[0])
    torch.testing.assert_close(sources.mixed(weights).blocks_BKK[0], expected, **CLOSE)
    assert sources.damped(weights) is sources.damped(weights)
    drawn = torch.randn(4, 12, generator=torch.Generator().manual_seed(0)).double()
    for pair in ((1.0, 0.0, 0.0), weights):  # the inverse is that of the weights asked for
        step = sources.damped(pair).solve(drawn, 0.1)
        damped = sources.mixed(pair).blocks_BKK[0] + 0.1 * torch.eye(12).double()
        torch.testing.assert_close(step, torch.linalg.solve(damped, drawn.T).T, rtol=1e-8, atol=1e-10)
    alone = Sources({FORGET: sources.operators[FORGET]}, {FORGET: 50.0})
    assert alone.mixed((1.0,)) is sources.operators[FORGET]


def test_curvature_that_cannot_be_mixed_is_refused():
    estimator = make_estimator(curvature_settings(estimator="diagonal", perturbations=20))
    with pytest.raises(ConfigError, match=r"held as diagonal and cannot be mixed .* Use curvature\.estimator=closed_"):
        cross_validate(estimator, with_others(), CONTEXT, 5)


@pytest.mark.parametrize("sets", [1, 2])
def test_products_of_all_sources_share_a_subspace_and_choose_what_matrices_choose(sets):
    request, retained = case(make_loss("softmax"), 50)
    views = request.features_FD + 0.1 * torch.randn(2, 50, 12, generator=torch.Generator().manual_seed(0))
    unlabelled = tuple(retained.features_RD[:100].split(100 // sets))
    request = dataclasses.replace(request, views_VFD=views, unlabelled=unlabelled)

    def validated(structure: str, trust: float = 0.0):
        settings = curvature_settings(estimator="closed_form", structure=structure)
        return cross_validate(make_estimator(settings), request, CONTEXT, 5, trust)

    dense, products = validated("dense"), validated("products")
    held = [one for fold in products.folds for one in (*fold.sources.operators.values(), fold.held_out)]
    assert len({id(one.subspace) for one in (*held, *products.sources.operators.values())}) == 1
    expected, found = (choose_step(one, 1.0, Caution(), request.head.l2) for one in (dense, products))
    assert (found.gain, found.scale) == pytest.approx((expected.gain, expected.scale), rel=1e-3)
    right = request.newton_gradient()
    steps = [one.sources.damped(expected.weights).solve(right, expected.rho) for one in (dense, products)]
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-3, atol=1e-4 * float(steps[0].abs().max()))
    for fold, exact in zip(validated("products", 0.5).folds, validated("dense", 0.5).folds, strict=True):
        vector = torch.randn(*right.shape, dtype=torch.float64)
        torch.testing.assert_close(fold.held_out.matmul(vector), exact.held_out.matmul(vector), **CLOSE)
        inverse, lift = fold.sources.damped(expected.weights), fold.training.subspace.lift
        coordinates = inverse.restricted().solve(inverse.subspace.coordinates(right), 0.1).value_CE
        for shown in (fold.held_out, fold.training):
            _, curved, _ = inverse.scores(right, [0.1], shown)
            assert float(curved[0]) == pytest.approx(float(shown.quadratic(lift(coordinates))), rel=1e-8)
