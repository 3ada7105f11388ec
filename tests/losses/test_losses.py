"""Every loss against float64 autograd of its plain definition, and its constants against what can be reached."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sfu.errors import ConfigError
from sfu.losses.base import Layout, Loss, make_loss
from sfu.losses.huber_hinge import HuberHinge
from sfu.losses.logistic import Logistic
from sfu.losses.softmax import Softmax
from sfu.losses.squared_hinge import SquaredHinge
from tests.losses.cases import defined, every_loss

outputs_and_label = st.integers(2, 6).flatmap(
    lambda c: st.tuples(
        st.lists(
            st.one_of(
                st.floats(-6, 6), st.floats(-1e4, 1e4), st.sampled_from([0.0, 1e4, -1e4, 40.0, -40.0, 1e-12, 710.0])
            ),
            min_size=c,
            max_size=c,
        ),
        st.integers(0, c - 1),
    )
)


@every_loss
@settings(max_examples=60)
@given(case=outputs_and_label)
def test_value_slope_and_hessian_are_autograds(loss, case):
    point, label = torch.tensor(case[0], dtype=torch.float64), case[1]
    labels = torch.tensor([label])
    variable = point.clone().requires_grad_()
    value = defined(loss, variable, label)
    (slope,) = torch.autograd.grad(value, variable)
    size = 1 + float(point.abs().max())
    torch.testing.assert_close(loss.values(point[None], labels).sum(), value.detach(), rtol=1e-13, atol=1e-14 * size)
    torch.testing.assert_close(loss.slopes(point[None], labels)[0], slope, rtol=1e-12, atol=1e-14 * size)
    hessian = loss.curvature(point[None], labels)
    dense = hessian.dense()[0]
    if not _at_a_kink(loss, point):
        expected = torch.autograd.functional.hessian(lambda z: defined(loss, z, label), point)
        torch.testing.assert_close(dense, expected, rtol=1e-12, atol=1e-15)
    vector = torch.linspace(-1, 1, len(point), dtype=torch.float64)
    torch.testing.assert_close(hessian.apply(vector[None])[0], dense @ vector, rtol=1e-12, atol=1e-15)
    assert float(hessian.trace()) == pytest.approx(float(dense.trace()), rel=1e-12, abs=1e-15)


def _at_a_kink(loss: Loss, point: torch.Tensor) -> bool:
    if isinstance(loss, SquaredHinge):
        return bool((point.abs() - 1).abs().min() < 1e-9)
    return isinstance(loss, HuberHinge) and bool(((point.abs() - 1).abs() - loss.smoothing).abs().min() < 1e-9)


@every_loss
def test_nothing_overflows_at_extreme_outputs(loss):
    for size in (1e4, 1e8, 1e150):
        outputs = torch.tensor([[size, -size, 0.0], [-size, -size, size], [size, size, size]], dtype=torch.float64)
        labels = torch.tensor([0, 1, 2])
        hessian = loss.curvature(outputs, labels)
        for tensor in (loss.values(outputs, labels), loss.slopes(outputs, labels), hessian.dense()):
            assert torch.isfinite(tensor).all()


def test_small_probabilities_keep_their_digits():
    """A softmax slope near certainty is minus the sum of the other probabilities, not 1 - (1 - tiny)."""
    outputs = torch.tensor([[40.0, 0.0, 0.0]], dtype=torch.float64)
    slope = Softmax().slopes(outputs, torch.tensor([0]))[0]
    assert float(slope[0]) == pytest.approx(-2 * math.exp(-40), rel=1e-12)
    curved = Logistic().curvature(torch.tensor([[40.0, -40.0]], dtype=torch.float64), torch.tensor([0])).diagonal
    torch.testing.assert_close(curved, torch.full((1, 2), math.exp(-40), dtype=torch.float64), rtol=1e-12, atol=0)


@every_loss
def test_several_points_at_once_are_one_at_a_time(loss):
    outputs = torch.randn(5, 3, 4, dtype=torch.float64)
    labels = torch.tensor([0, 3, 1, 2, 2])
    together = loss.values(outputs, labels), loss.slopes(outputs, labels), loss.curvature(outputs, labels).dense()
    for p in range(3):
        alone = outputs[:, p]
        apart = loss.values(alone, labels), loss.slopes(alone, labels), loss.curvature(alone, labels).dense()
        for one, other in zip(together, apart, strict=True):
            torch.testing.assert_close(one[:, p], other, rtol=1e-14, atol=0)


@every_loss
@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.3, 1.0, 4.0]))
def test_the_constants_bound_what_they_bound(loss, seed, spread):
    generator = torch.Generator().manual_seed(seed)
    outputs, step = (spread * torch.randn(200, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    labels = torch.randint(4, (200,), generator=generator)
    constants, here = loss.constants, loss.curvature(outputs, labels).dense()
    slopes = loss.slopes(outputs, labels)
    sizes = slopes.abs() if loss.separable else slopes.norm(dim=1)
    assert float(sizes.max()) <= constants.gradient_bound
    assert float(torch.linalg.eigvalsh(here).max()) <= constants.curvature_bound * (1 + 1e-12)
    there = loss.curvature(outputs + step, labels).dense()
    change = torch.linalg.matrix_norm(there - here, ord=2)
    length = step.abs().amax(1) if loss.separable else step.norm(dim=1)
    assert bool((change <= constants.curvature_lipschitz * length + 1e-12).all())


def test_the_lipschitz_constants_are_reached():
    """No smaller gamma would do: at the worst point a small step changes the second derivative by almost gamma."""
    s = 0.5 - 1 / (2 * math.sqrt(3))
    z, small = math.log(s / (1 - s)), 1e-5
    for loss, direction in ((Logistic(), [1.0, 0.0]), (Softmax(), [math.sqrt(0.5), -math.sqrt(0.5)])):
        at = [z, 0.0] if loss.separable else [z / 2, -z / 2]
        points = torch.tensor([at, at], dtype=torch.float64)
        points[1] += small * torch.tensor(direction)
        here, there = loss.curvature(points, torch.tensor([0, 0])).dense()
        change = float(torch.linalg.matrix_norm(there - here, ord=2)) / small
        assert change == pytest.approx(loss.constants.curvature_lipschitz, rel=1e-4)


def test_a_binary_logistic_is_two_mirrored_problems():
    outputs = torch.randn(6, 1, dtype=torch.float64)
    both, labels = torch.cat([-outputs, outputs], 1), torch.tensor([0, 1, 1, 0, 0, 1])
    values = Logistic().values(both, labels)
    torch.testing.assert_close(values[:, 0], values[:, 1], rtol=1e-14, atol=0)
    plain = torch.nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], labels.double(), reduction="none")
    torch.testing.assert_close(values[:, 1], plain, rtol=1e-12, atol=1e-15)


@every_loss
def test_a_loss_survives_its_description(loss):
    assert make_loss(**loss.as_json()) == loss
    weighted = make_loss(**{**loss.as_json(), "class_weights": [1, 2.5]})
    assert weighted.class_weights == (1.0, 2.5)
    assert make_loss(**weighted.as_json()) == weighted


def test_what_cannot_be_a_loss_is_refused():
    with pytest.raises(ConfigError, match=r"loss=l1 is unknown\. Choose one of huber_hinge, logistic"):
        make_loss("l1")
    with pytest.raises(ConfigError, match=r"loss\.smoothing is not a setting of loss=softmax\. It takes class_weights"):
        make_loss("softmax", smoothing=0.5)
    with pytest.raises(ConfigError, match=r"loss\.smoothing=2"):
        make_loss("huber_hinge", smoothing=2.0)
    with pytest.raises(ConfigError, match=r"loss\.target_scale=nan"):
        make_loss("quadratic", target_scale=math.nan)
    with pytest.raises(ConfigError, match=r"loss\.other_target=1 is not below loss\.target_scale=1"):
        make_loss("quadratic", other_target=1.0)
    with pytest.raises(ConfigError, match=r"loss\.label_smoothing=1"):
        make_loss("softmax", label_smoothing=1.0)
    with pytest.raises(ConfigError, match=r"loss\.class_weights=\[1\.0, -1\.0\]"):
        make_loss("softmax", class_weights=[1, -1])
    assert {make_loss(name).layout for name in Loss.names()} == set(Layout) - {Layout.products}  # that one is a head's
