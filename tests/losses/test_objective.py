"""The objective of a set of rows: means, weights, streaming, and its derivatives against float64 autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sfu.errors import ConfigError
from sfu.losses.base import Layout, make_loss
from sfu.losses.objective import Objective
from sfu.losses.quadratic import Quadratic
from sfu.losses.rows import Rows
from tests.losses.cases import defined, every_loss

CPU = torch.device("cpu")


def problem(loss, bias=True, seed=0, size=1.0, weighted=True, n=23, width=4, n_classes=3):
    """(objective, rows, parameters, and the objective again as a plain function of the parameters)."""
    generator = torch.Generator().manual_seed(seed)
    features = size * torch.randn(n, width, generator=generator, dtype=torch.float64)
    labels = torch.arange(n) % n_classes
    weights = 0.1 + torch.rand(n, generator=generator, dtype=torch.float64) if weighted else None
    loss = make_loss(**{**loss.as_json(), "class_weights": [0.5, 1.0, 3.0] if weighted else None})
    mask = torch.ones(width + bias, dtype=torch.float64)
    if bias:
        mask[-1] = 0
    linear = torch.randn(n_classes, width + bias, generator=generator, dtype=torch.float64) if weighted else None
    objective = Objective(loss, 0.3, mask, linear)
    rows = Rows(features, labels, loss, bias=bias, device=CPU, sample_weights_N=weights)
    point = torch.randn(n_classes, width + bias, generator=generator, dtype=torch.float64) / size

    def plain(parameters):
        design = torch.cat([features, torch.ones(n, 1).double()], 1) if bias else features
        total, mass = 0.0, 0.0
        for i in range(n):
            v = 1.0 if weights is None else float(weights[i]) * loss.class_weights[int(labels[i])]
            total, mass = total + v * defined(loss, parameters @ design[i], int(labels[i])), mass + v
        extra = 0.0 if linear is None else (linear * parameters).sum()
        return total / mass + 0.15 * (parameters.square() * mask).sum() + extra

    return objective, rows, point, plain


@every_loss
@settings(max_examples=8)
@given(bias=st.booleans(), weighted=st.booleans(), seed=st.integers(0, 1000), size=st.sampled_from([1e-3, 1.0, 1e3]))
def test_value_gradient_and_hessian_are_autograds(loss, bias, weighted, seed, size):
    objective, rows, point, plain = problem(loss, bias, seed, size, weighted)
    variable = point.clone().requires_grad_()
    value = plain(variable)
    (gradient,) = torch.autograd.grad(value, variable)
    assert objective.value(rows, point) == pytest.approx(float(value.detach()), rel=1e-11)
    torch.testing.assert_close(objective.gradient(rows, point), gradient, rtol=1e-9, atol=1e-11 * max(1, size))
    full = torch.autograd.functional.hessian(lambda w: plain(w.reshape(point.shape)), point.flatten())
    ridge = torch.diag(objective.ridge_E.repeat(3))
    dense = objective.data_hessian(rows, point, Layout.dense) + ridge
    torch.testing.assert_close(dense, full, rtol=1e-8, atol=1e-10 * max(1, size**2))
    blocks = torch.stack([full.reshape(3, rows.width, 3, rows.width)[c, :, c] for c in range(3)])
    diagonal = objective.data_hessian(rows, point, Layout.blocks) + torch.diag(objective.ridge_E)
    torch.testing.assert_close(diagonal, blocks, rtol=1e-8, atol=1e-10 * max(1, size**2))
    if loss.layout is Layout.shared:
        one = objective.data_hessian(rows, point, Layout.shared) + torch.diag(objective.ridge_E)
        torch.testing.assert_close(one, blocks[0], rtol=1e-8, atol=1e-10 * max(1, size**2))


@every_loss
def test_many_points_and_any_chunk_give_the_same(loss):
    objective, rows, point, _ = problem(loss)
    points = torch.stack([point, 2 * point, -point])
    values, gradients = objective.values_at(rows, points), objective.gradients_at(rows, points)
    hessian = objective.data_hessian(rows, point, Layout.dense)
    for chunk in (1, 5, 23, 100):
        for cache in (False, True):
            again = Rows(
                rows.features_ND, rows.labels_N, objective.loss, bias=True, device=CPU, cache=cache, chunk_rows=chunk,
                sample_weights_N=problem_weights(rows, objective.loss),
            )  # fmt: skip
            for _ in range(2):  # the second pass over cached rows too
                torch.testing.assert_close(objective.values_at(again, points), values, rtol=1e-12, atol=1e-14)
                torch.testing.assert_close(objective.gradients_at(again, points), gradients, rtol=1e-11, atol=1e-13)
            torch.testing.assert_close(
                objective.data_hessian(again, point, Layout.dense), hessian, rtol=1e-11, atol=1e-13
            )
    for p, w in enumerate(points):
        torch.testing.assert_close(objective.gradient(rows, w), gradients[p], rtol=1e-12, atol=1e-14)
        assert objective.value(rows, w) == pytest.approx(float(values[p].sum()), rel=1e-13)


def problem_weights(rows, loss):
    """The sample weights alone, without the class weights."""
    return rows.weights_N / torch.tensor(loss.class_weights, dtype=torch.float64)[rows.labels_N]


def test_sets_combine_by_their_weights_and_integer_weights_are_copies():
    loss = make_loss("softmax", class_weights=[1, 2, 4])
    features, labels = torch.randn(9, 4, dtype=torch.float64), torch.arange(9) % 3
    objective, point = Objective(loss, 0.1, torch.ones(4).double()), torch.randn(3, 4, dtype=torch.float64)

    def rows(index, weights=None):
        return Rows(features[index], labels[index], loss, bias=False, device=CPU, sample_weights_N=weights)

    whole, first, second = rows(slice(None)), rows(slice(4)), rows(slice(4, None))
    assert whole.weight == first.weight + second.weight == 21.0
    mixed = sum(part.weight / whole.weight * objective.gradient(part, point) for part in (first, second))
    torch.testing.assert_close(objective.gradient(whole, point), mixed, rtol=1e-12, atol=1e-14)
    copies = objective.gradient(rows(torch.tensor([0, 1, 1, 1])), point)
    weighted = objective.gradient(rows(torch.tensor([0, 1]), torch.tensor([1.0, 3.0])), point)
    torch.testing.assert_close(copies, weighted, rtol=1e-12, atol=1e-14)


def test_class_weights_from_the_configuration():
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    config = make_loss(name="logistic", class_weights="balanced")
    loss = config.for_labels(labels, 3)
    assert loss.class_weights == pytest.approx((6 / 9, 1.0, 2.0))
    rows = Rows(torch.zeros(6, 2), labels, loss, bias=False, device=CPU)
    assert rows.weight == pytest.approx(6.0)
    totals = torch.zeros(3).double().index_add(0, labels, rows.weights_N)
    torch.testing.assert_close(totals, torch.full((3,), 2.0, dtype=torch.float64))
    assert make_loss("logistic").for_labels(labels, 3).class_weights is None
    scaled = make_loss("quadratic", target_scale=2.0, class_weights=[1, 1, 2]).for_labels(labels, 3)
    assert scaled == Quadratic((1.0, 1.0, 2.0), target_scale=2.0)
    for given_, message in (
        ([1, 2], "has 2 entries for 3 classes"),
        ("even", "Give null, balanced, or a finite number above 0 for every class"),
        (0.5, "Give null, balanced, or a finite number above 0 for every class"),
        ([1, "x", 2], "are not all numbers"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_loss("logistic", class_weights=given_).for_labels(labels, 3)
    with pytest.raises(ConfigError, match="has 2 entries but a label is 2"):
        Rows(torch.zeros(6, 2), labels, make_loss("softmax", class_weights=[1, 2]), bias=False, device=CPU)


def test_second_moments_are_computed_once_for_each_set_of_rows():
    features, labels = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    rows = Rows(features, labels, Quadratic(), bias=False, device=torch.device("cpu"))
    assert not rows.has_moments
    whole = rows.moments()
    assert rows.has_moments
    assert rows.moments() is whole
    some = features.double()[::4]
    for twin in (rows.thinned(4), rows.batch(torch.arange(0, 40, 4))):
        assert not twin.has_moments
        torch.testing.assert_close(twin.moments(), some.T @ some / 10, rtol=1e-12, atol=1e-14)
    assert rows.to_float32().moments().dtype == torch.float32
