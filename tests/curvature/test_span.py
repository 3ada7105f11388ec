"""A request of few rows reduced to few features, against the same computation in all features."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sfu.curvature import span
from sfu.curvature.sampling import sampling_ratio
from sfu.curvature.settings import Regularization, curvature_settings
from sfu.curvature.span import SpanHead, reduce_request
from sfu.errors import ArtifactError
from sfu.heads.certificate import Certificate
from sfu.heads.linear import LinearHead
from sfu.losses.base import make_loss
from sfu.operators.structure import Structure
from sfu.request import ForgetRequest
from sfu.unlearning.methods.newton import Newton
from tests.unlearning.cases import CONTEXT, relative

RULES = [Regularization.cross_validated, Regularization.mean_eigenvalue, Regularization.none]
LOSSES = ["quadratic", "softmax", "logistic", "huber_hinge"]
FEATURES = 40


def made(loss: str = "quadratic", *, bias=True, rows=12, views=0, weights=False, noise=False, seed=0, l2=1e-2):
    """A request of a head that is not at its optimum, with rows of rank ``rows - 1``."""
    drawn = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=drawn, dtype=torch.float64)

    shape = (3, FEATURES + bias)
    head = LinearHead(
        0.3 * draw(*shape), 0.1 * draw(*shape), l2, 300, bias,
        make_loss(loss, class_weights=[1.0, 2.0, 0.5] if weights else None), weight=400.0 if weights else None,
        certificate=Certificate(1.0, draw(*shape), 0.0) if noise else None,
    )  # fmt: skip
    features = draw(rows, FEATURES)
    features[-1] = features[0]
    return ForgetRequest(
        head, features.float(), torch.arange(rows) % 3, draw(rows).abs() if weights else None,
        features + 0.1 * draw(views, rows, FEATURES) if views else None,
    )  # fmt: skip


@settings(max_examples=30)
@given(
    loss=st.sampled_from(LOSSES), bias=st.booleans(), rows=st.integers(2, 24), weights=st.booleans(),
    noise=st.booleans(), seed=st.integers(0, 99), l2=st.sampled_from([1e-6, 1e-2, 1.0]),
)  # fmt: skip
def test_everything_that_enters_a_step_stays_what_it_was(loss, bias, rows, weights, noise, seed, l2):
    request = made(loss, bias=bias, rows=rows, weights=weights, noise=noise, seed=seed, l2=l2)
    reduction = reduce_request(request)
    small = reduction.request
    assert small.head.n_features == rows + 2 + noise
    drawn = torch.randn(2, *small.head.parameters_CE.shape, generator=torch.Generator().manual_seed(seed)).double()
    lifted = torch.stack([reduction.lift(vector) for vector in drawn])
    close = {"rtol": 1e-8, "atol": 1e-10}
    torch.testing.assert_close((lifted[0] * lifted[1]).sum(), (drawn[0] * drawn[1]).sum(), **close)
    torch.testing.assert_close(reduction.lift(small.head.parameters_CE), request.head.parameters_CE, **close)
    torch.testing.assert_close(reduction.lift(small.head.gradient_CE), request.head.gradient_CE, **close)
    torch.testing.assert_close(reduction.lift(small.head.rows_gradient_CE), request.head.rows_gradient_CE, **close)
    torch.testing.assert_close(reduction.lift(small.newton_gradient()), request.newton_gradient(), **close)
    there, here = (r.at(r.head.parameters_CE + v) for r, v in ((small, drawn[0]), (request, lifted[0])))
    torch.testing.assert_close(reduction.lift(there.forget_gradient()), here.forget_gradient(), **close)
    few, many = (r.head.objective().value(r.data(), r.head.parameters_CE) for r in (there, here))
    assert few == pytest.approx(many, rel=1e-10)
    assert sampling_ratio(small) == pytest.approx(sampling_ratio(request), rel=1e-8)
    for structure in (Structure.products, Structure(request.head.layout.value)):
        one, other = small.hessian(structure), request.hessian(structure)
        images = torch.stack([reduction.lift(image) for image in one.matmul(drawn)])
        torch.testing.assert_close(images, other.matmul(lifted), **close)
        torch.testing.assert_close(one.quadratic(drawn), other.quadratic(lifted), **close)
        assert one.trace() == pytest.approx(other.trace(), rel=1e-10)
        if loss == "huber_hinge":  # it may have no curvature at all
            continue
        assert one.damped().mean_eigenvalue == pytest.approx(other.damped().mean_eigenvalue, rel=1e-8)
        few, many = (h.damped().solve(r.newton_gradient(), 0.1) for h, r in ((one, small), (other, request)))
        torch.testing.assert_close(reduction.lift(few), many, rtol=1e-6, atol=1e-8)


@settings(max_examples=40)
@given(
    loss=st.sampled_from(LOSSES), bias=st.booleans(), rows=st.sampled_from([5, 21, 25]), views=st.sampled_from([0, 2]),
    weights=st.booleans(), seed=st.integers(0, 99), rule=st.sampled_from(RULES),
    steps=st.sampled_from([1, 2]), estimator=st.sampled_from(["closed_form", "psd_fit"]),
)  # fmt: skip
def test_the_step_stays_what_it_was(loss, bias, rows, views, weights, seed, rule, steps, estimator):
    views = views if 3 * rows <= 20 else 0
    bias = bias and loss != "huber_hinge"  # which may have no curvature along biases
    request = made(loss, bias=bias, rows=rows, views=views, weights=weights, seed=seed)
    config = curvature_settings(estimator=estimator, regularization=rule, on_doubt="apply")
    method, results = Newton(config, noise_sigma=1e-3, steps=steps), []
    for reduce in (reduce_request, lambda request: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(span, "reduce_request", reduce)
            results.append(method.unlearn(request, CONTEXT))
    few, many = results
    if loss == "huber_hinge" and estimator == "psd_fit":  # which fits
        assert "reduced_features" not in few.details
        return
    moved = many.head.parameters_CE - request.head.parameters_CE
    assert relative(few.head.parameters_CE - many.head.parameters_CE, moved) < 1e-8
    assert type(few.head) is LinearHead
    assert few.head.n_features == FEATURES
    if many.predicted_distance_gain is not None:
        assert few.predicted_distance_gain == pytest.approx(many.predicted_distance_gain, rel=1e-8)
    assert few.note == many.note
    assert few.details["reduced_features"] == rows * (1 + views) + 2
    assert "reduced_features" not in many.details
    assert (few.details["rho"] is None) == (many.details["rho"] is None)
    if many.details["rho"] is not None:
        assert few.details["rho"] == pytest.approx(many.details["rho"], rel=1e-8)


def test_rows_that_are_many_or_not_of_a_plain_linear_head_are_not_reduced():
    assert reduce_request(made(rows=28)) is not None
    assert reduce_request(made(rows=29)) is None
    assert reduce_request(dataclasses.replace(made(rows=20), unlabelled=(torch.zeros(9, FEATURES),))) is None
    small = reduce_request(made(rows=5)).request
    assert type(small.head) is SpanHead
    assert reduce_request(small) is None
    shrunk = Newton(curvature_settings(estimator="oas")).unlearn(made(rows=21), CONTEXT)
    assert "reduced_features" not in shrunk.details


@pytest.mark.parametrize("views", [0, 1])
def test_unlabelled_rows_are_in_the_span_too(views):
    further = torch.randn(7, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    request = dataclasses.replace(made(rows=10, views=views), unlabelled=(further[:4], further[4:]))
    reduction = reduce_request(request)
    assert [rows.shape for rows in reduction.request.unlabelled] == [(4, 19 + 10 * views), (3, 19 + 10 * views)]
    lifted = torch.cat(reduction.request.unlabelled)[:, : 17 + 10 * views] @ reduction.basis_DF.T
    torch.testing.assert_close(lifted, further)
    basis = reduce_request(made()).basis_DF
    assert relative(further @ basis @ basis.T - further, further) > 0.1


def test_a_reduced_head_is_never_saved(tmp_path):
    with pytest.raises(ArtifactError, match="cannot be saved"):
        reduce_request(made()).request.head.save(tmp_path / "head")


def test_views_are_reduced_with_the_rows():
    request = made(rows=6, views=3)
    reduction = reduce_request(request)
    assert reduction.request.views_VFD.shape == (3, 6, 24 + 2)
    lifted = reduction.request.views_VFD[..., :24] @ reduction.basis_DF.T
    torch.testing.assert_close(lifted, request.views_VFD)
    assert reduce_request(dataclasses.replace(request, views_VFD=None)).basis_DF.shape == (FEATURES, 6)
