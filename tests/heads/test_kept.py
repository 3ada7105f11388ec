"""What a head keeps of its training rows, against dense references."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from sfu.curvature.estimators.base import make_estimator
from sfu.curvature.settings import curvature_settings
from sfu.errors import ConfigError, DataError
from sfu.heads import summary
from sfu.heads.kept import Kept
from sfu.heads.linear import LinearHead
from sfu.heads.projections import DIRECTIONS
from sfu.heads.settings import AdamSettings, Keep, LinearSettings, SketchKind, Training
from sfu.heads.sketch import Sketch, bytes_of_sketch
from sfu.heads.train import train_head
from sfu.losses.base import Loss, make_loss
from sfu.operators.largest_eigenvalue import bound_by_products
from sfu.request import ForgetRequest, MethodContext
from sfu.unlearning.methods.newton import Newton
from tests.conftest import make_arrays

CPU = torch.device("cpu")
STORED = curvature_settings(estimator="stored")
every_loss = pytest.mark.parametrize("name", Loss.names())


def tensors(**sizes):
    arrays = make_arrays(**sizes)
    return torch.from_numpy(arrays["train_features"]), torch.from_numpy(arrays["train_labels"])


def fit(features, labels, loss="quadratic", dtype=torch.float64, weights=None, **settings):
    config = LinearSettings(l2=1e-3, **settings)
    return train_head(features, labels, 4, config, make_loss(loss), seed=0, device=CPU, dtype=dtype, weights_N=weights)


def moments(features, bias=False, weights=None):
    rows = features.double()
    design = torch.cat([rows, torch.ones(len(rows), 1).double()], 1) if bias else rows
    share = torch.ones(len(rows)).double() if weights is None else weights
    return design.T @ (design * share[:, None]) / share.sum()


@every_loss
@pytest.mark.parametrize("bias", [False, True])
def test_the_trace_is_that_of_the_hessian_at_the_head(name, bias):
    features, labels = tensors()
    weights = torch.rand(len(labels), generator=torch.Generator().manual_seed(0)).double()
    head = fit(features, labels, name, bias=bias, weights=weights)
    hessian = head.objective().data_hessian(head.rows(features, labels, weights), head.parameters_CE, head.layout)
    blocks = 1 if name == "quadratic" else 4
    assert head.kept.trace == pytest.approx(float(hessian.diagonal(dim1=-2, dim2=-1).sum()) / blocks, rel=1e-12)
    forget = ForgetRequest(head, features[:40], labels[:40], weights[:40])
    left, without = forget.unlearned_head(head.parameters_CE).kept, head.rows(features[40:], labels[40:], weights[40:])
    assert left.trace == pytest.approx(float(head.traces(without).sum()), rel=1e-12)


@every_loss
@pytest.mark.parametrize("bias", [False, True])
def test_the_bound_is_the_largest_eigenvalue_at_the_head_and_at_others_where_curvature_does_not_change(name, bias):
    features, labels = tensors()
    weights = torch.rand(len(labels), generator=torch.Generator().manual_seed(0)).double()
    head = fit(features, labels, name, bias=bias, weights=weights)
    rows, draw = head.rows(features, labels, weights), torch.Generator().manual_seed(1)

    def largest(parameters_CE):
        return float(torch.linalg.eigvalsh(head.objective().data_hessian(rows, parameters_CE, head.layout)).max())

    others = [scale * torch.randn(head.parameters_CE.shape, generator=draw).double() for scale in (0.0, 0.1, 1.0)]
    if name in ("quadratic", "huber_hinge", "squared_hinge"):  # any parameters: curvature that jumps is at its highest
        bound = head.loss.constants.curvature_bound * float(torch.linalg.eigvalsh(moments(features, bias, weights))[-1])
        assert bound <= head.kept.bound <= 1.001 * bound
        assert max(map(largest, others)) <= head.kept.bound
    else:
        assert largest(head.parameters_CE) <= head.kept.bound <= 1.05 * largest(head.parameters_CE)
        assert max(map(largest, others)) > head.kept.bound


@pytest.mark.parametrize("training", Training)
def test_every_way_of_training_keeps_a_bound_and_the_class_shares(training):
    features, labels = tensors()
    head = fit(features, labels, dtype=torch.float32, training=training, adam=AdamSettings(max_epochs=1))
    largest = float(torch.linalg.eigvalsh(moments(features))[-1])
    assert largest <= head.kept.bound <= 1.001 * largest
    assert head.kept.shares_C.tolist() == (labels.bincount().double() / len(labels)).tolist()
    assert (head.kept.mean_D, head.kept.sketch, head.kept.data_hessian) == (None, None, None)
    along = features.double() @ torch.from_numpy(np.random.RandomState(0).standard_normal((12, DIRECTIONS)))
    expected = torch.stack([along.mean(0), along.square().mean(0)])
    torch.testing.assert_close(head.kept.projected_2K, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("formed", [True, False], ids=["moments", "products"])
def test_wide_heads_are_bounded_from_above_by_products(monkeypatch, formed):
    monkeypatch.setattr(summary, "_DECOMPOSED", 5)
    monkeypatch.setattr(summary, "_FORMED", 2000 if formed else 5)
    features, labels = tensors()
    largest = float(torch.linalg.eigvalsh(moments(features))[-1])
    head = fit(features, labels, "huber_hinge")
    bound = head.loss.constants.curvature_bound * largest
    assert bound <= head.kept.bound <= 1.05 * bound


def test_a_bound_by_products_holds_on_any_spectrum_after_any_number_of_them():
    """The largest eigenvalue is 1 throughout; it may be alone above a crowd that hides it from the random vector."""
    for width in (1, 3, 40, 2000):
        line = torch.linspace(0, 1, width, dtype=torch.float64)
        alone = torch.full((width,), 0.5, dtype=torch.float64)
        alone[-1] = 1.0
        for values in (line, line**0.05, line**20, alone, torch.ones(width).double()):
            if values[-1] < 1:  # a single 0
                continue
            calls = []

            def product(vector, values=values, calls=calls):
                calls.append(1)
                return values * vector

            found = [
                bound_by_products(product, values, near=1.01, max_products=most, eps=1e-16) for most in (1, 2, 5, 15)
            ]
            assert min(found) >= 1 - 1e-12
            assert found[-1] < 1.3
    assert bound_by_products(torch.zeros_like, torch.ones(7).double(), near=1.1, max_products=15, eps=1e-16) == 0


def test_products_stop_once_the_bound_is_near():
    calls, values = [], torch.ones(500, dtype=torch.float64) * 1e-3
    values[7] = 1.0

    def product(vector):
        calls.append(1)
        return values * vector

    assert 1 <= bound_by_products(product, values, near=1.2, max_products=50, eps=1e-16) < 1.2
    assert len(calls) <= 4


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_squares_that_float32_cannot_hold_are_bounded_too(scale):
    features, labels = tensors()
    rows = features.double() * scale
    head = LinearHead(torch.zeros(4, 12).double(), torch.zeros(4, 12).double(), 0.0, 400, loss="quadratic")
    bound = summary.curvature_bound(head, head.rows(rows, labels))
    assert bound == pytest.approx(float(torch.linalg.eigvalsh(moments(rows))[-1]), rel=1e-9)


def test_a_loss_without_a_bound_has_none(monkeypatch):
    features, labels = tensors()
    head = fit(features, labels)
    infinite = dataclasses.replace(head.loss.constants, curvature_bound=float("inf"))
    monkeypatch.setattr(type(head.loss), "constants", infinite)
    assert summary.curvature_bound(head, head.rows(features, labels)) is None


def request_of(head, features, labels, forget=40):
    return ForgetRequest(head, features[:forget], labels[:forget])


@every_loss
@pytest.mark.parametrize("keep", [Keep.sketch, Keep.full])
def test_after_a_request_it_is_that_of_the_retained_rows(name, keep):
    features, labels = tensors()
    head = fit(features, labels, name, keep=keep, bias=True)
    left = request_of(head, features, labels).unlearned_head(head.parameters_CE + 0.1).kept
    retained = fit(features[40:], labels[40:], name, keep=keep, bias=True).kept
    assert retained.bound <= left.bound == pytest.approx(head.kept.bound * 400 / 360)
    assert name != "quadratic" or left.trace == pytest.approx(retained.trace, rel=1e-12)
    torch.testing.assert_close(left.shares_C, retained.shares_C, rtol=0, atol=1e-14)
    torch.testing.assert_close(left.mean_D, retained.mean_D, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(left.projected_2K, retained.projected_2K, rtol=1e-9, atol=1e-12)
    if name != "quadratic":
        assert (left.sketch, left.data_hessian) == (None, None)
    elif keep is Keep.full:
        assert left.sketch is None
        torch.testing.assert_close(left.data_hessian, retained.data_hessian, rtol=1e-9, atol=1e-12)
    else:
        assert left.data_hessian is None
        exact = moments(features[40:], True)
        errors = [float((one.sketch.decode()[0] - exact).norm() / exact.norm()) for one in (left, retained)]
        assert 0 < errors[1] < errors[0] < 3 * errors[1] < 0.02


@pytest.mark.parametrize("kind", SketchKind)
def test_what_rounding_leaves_below_nothing_becomes_nothing(kind):
    """After nearly all rows are taken out of a sketch, its rounding is larger than what is left of some directions."""
    features, labels = tensors()
    full = fit(features, labels, keep=Keep.full)
    sketch = Sketch.encode(full.kept.data_hessian, kind)
    request = request_of(dataclasses.replace(full, kept=Kept(sketch=sketch)), features, labels, 395)
    estimator = make_estimator(STORED)
    operator = estimator.estimate(estimator.observe(request, MethodContext()), request).operator
    assert float(operator.damped().eigenvalues_BD.min()) == pytest.approx(full.l2)
    foreign = request_of(full, 10 * features, labels).unlearned_head(full.parameters_CE).kept.data_hessian
    assert float(torch.linalg.eigvalsh(foreign)[0]) >= -1e-12


def test_rows_of_weights_are_taken_out_by_weight():
    features, labels = tensors()
    weights = torch.linspace(0.5, 2, 400).double()
    head = fit(features, labels, keep=Keep.full, weights=weights)
    left = ForgetRequest(head, features[:40], labels[:40], weights[:40]).unlearned_head(head.parameters_CE).kept
    exact = moments(features[40:], weights=weights[40:])
    torch.testing.assert_close(left.data_hessian, exact, rtol=1e-9, atol=1e-12)
    assert float(torch.linalg.eigvalsh(exact)[-1]) <= left.bound
    assert left.bound == pytest.approx(head.kept.bound * float(weights.sum() / weights[40:].sum()))


def test_a_sketch_serves_several_requests():
    features, labels = tensors()
    config = {"keep": Keep.sketch}
    head = fit(features, labels, **config)
    for start in range(0, 120, 40):
        part = slice(start, start + 40)
        head = Newton(STORED).unlearn(ForgetRequest(head, features[part], labels[part]), MethodContext()).head
    retrained = fit(features[120:], labels[120:], **config)
    start = fit(features, labels).parameters_CE
    hessian = moments(features[120:]) + 1e-3 * torch.eye(12).double()
    left, nothing = (
        float(((one - retrained.parameters_CE) @ hessian * (one - retrained.parameters_CE)).sum())
        for one in (head.parameters_CE, start)
    )
    assert (left / nothing) ** 0.5 < 0.05


@pytest.mark.parametrize("kind", SketchKind)
@every_loss
def test_curvature_from_a_sketch_is_almost_the_stored_one(name, kind):
    features, labels = tensors()
    head = fit(features, labels, name, keep=Keep.full)
    sketch = Sketch.encode(head.kept.data_hessian, kind)
    sketched = dataclasses.replace(head, kept=Kept(sketch=sketch))
    exact, rough = (
        Newton(STORED).unlearn(request_of(one, features, labels), MethodContext()).head.parameters_CE
        for one in (head, sketched)
    )
    moved = float((exact - head.parameters_CE).norm())
    assert 0 < float((rough - exact).norm()) < (0.1 if kind is SketchKind.cholesky else 0.7) * moved


def test_what_is_not_kept_is_said_with_its_remedy():
    features, labels = tensors()
    given = LinearSettings(keep=Keep.bound), LinearSettings(keep=Keep.full)
    bound, full = (fit(features, labels, "softmax", keep=one.keep) for one in given)
    served = Newton(STORED).unlearn(request_of(full, features, labels), MethodContext()).head
    alone = dataclasses.replace(full, kept=Kept())
    for head, message in (
        (bound, r"only keeps an upper bound of its curvature\. Train it with head\.keep=sketch or head\.keep=full"),
        (alone, r"carries no curvature\. Train it with head\.keep=sketch"),
        (served, r"has served a request, and under loss=softmax the curvature .* belongs to the parameters before"),
    ):
        with pytest.raises(ConfigError, match=message):
            Newton(STORED).unlearn(request_of(head, features[40:], labels[40:]), MethodContext())


def test_a_bound_can_be_given_and_is_checked():
    layer = torch.nn.Linear(6, 3)
    assert LinearHead.from_module(layer, l2=0.1, n_train=9, loss="quadratic").kept == Kept()
    assert LinearHead.from_module(layer, l2=0.1, n_train=9, loss="quadratic", bound=2).kept.bound == 2
    for bound in (-1.0, float("nan"), float("inf"), True):
        with pytest.raises(ConfigError, match=r"bound=.*Give a finite number of at least 0"):
            LinearHead.from_module(layer, l2=0.1, n_train=9, loss="quadratic", bound=bound)
    zero = torch.zeros(3, 5).double()
    for kept, message in (
        (Kept(shares_C=torch.ones(2) / 2), r"class shares are \[2\]"),
        (Kept(mean_D=torch.ones(6)), r"feature mean is \[6\]"),
        (Kept(projected_2K=torch.ones(2, 5)), r"projected moments are \[2, 5\]\. Give \[2, 16\]"),
        (Kept(data_hessian=torch.eye(6)), r"data_hessian is \[6, 6\]\. Its loss needs \[5, 5\]"),
        (
            Kept(sketch=Sketch.encode(torch.eye(6), SketchKind.cholesky)),
            r"sketch has 1 x 6 rows\. Its loss needs 1 x 5",
        ),
    ):
        with pytest.raises(DataError, match=message):
            LinearHead(zero, zero, 0.1, 9, kept=kept)


# ------------------------------------------------------------------------------------------------------ the sketch


def second_moments_like(width=30, seed=0):
    """Uneven scales, a mean that dominates, and a decaying spectrum."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(500, width, generator=generator, dtype=torch.float64) * torch.arange(1, width + 1) ** -1.0
    mix = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64)).Q
    rows = rows @ mix + 0.5
    return rows.T @ rows / 500


def whitened_error(sketch, matrix):
    """Relative error of the matrix along its worst direction."""
    root = torch.linalg.cholesky(matrix)
    inner = torch.linalg.solve_triangular(root, sketch.decode()[0], upper=False)
    inner = torch.linalg.solve_triangular(root, inner.T, upper=False)
    return float((torch.linalg.eigvalsh(inner) - 1).abs().max())


def test_the_cholesky_sketch_is_right_along_every_direction_whatever_the_scales():
    matrix = second_moments_like()
    assert whitened_error(Sketch.encode(matrix, SketchKind.cholesky), matrix) < 0.2
    scales = torch.logspace(-6, 6, 30, dtype=torch.float64)
    scaled = matrix * scales[:, None] * scales
    same = Sketch.encode(scaled, SketchKind.cholesky)
    torch.testing.assert_close(same.decode()[0] / scales[:, None] / scales, matrix, rtol=0.05, atol=1e-3)
    assert whitened_error(same, scaled) < 0.2


def test_singular_matrices_stay_positive_semidefinite():
    matrix = second_moments_like()
    matrix = torch.block_diag(matrix, matrix[:1, :1] * 0)  # a feature of zeros
    twice = torch.cat([matrix, matrix[:3]]), torch.arange(34) % 31
    twin = matrix[twice[1]][:, twice[1]]  # duplicates
    for kind in SketchKind:
        for singular in (matrix, twin, torch.zeros(4, 4).double()):
            found = Sketch.encode(singular, kind).decode()[0]
            assert float(torch.linalg.eigvalsh(found)[0]) >= -1e-12 * float(singular.norm())
            torch.testing.assert_close(found, singular, rtol=0, atol=0.3 * float(singular.abs().max()) + 1e-300)


def test_eigenpairs_take_the_bytes_of_the_factor_and_hold_the_leading_ones():
    matrix = second_moments_like(60)
    sketches = {kind: Sketch.encode(matrix, kind) for kind in SketchKind}
    bytes_of = {
        kind: sum(one.numel() * one.element_size() for one in sketch.tensors().values())
        for kind, sketch in sketches.items()
    }
    assert bytes_of == {kind: bytes_of_sketch(kind, 1, 60) for kind in SketchKind}
    factor = bytes_of[SketchKind.cholesky]
    assert factor == 60 * 59 // 2 + 3 * 4 * 60
    assert factor - 64 < bytes_of[SketchKind.eigenpairs] <= factor
    values, vectors = torch.linalg.eigh(matrix)
    found = sketches[SketchKind.eigenpairs].decode()[0]
    assert float(vectors[:, -1] @ found @ vectors[:, -1]) == pytest.approx(float(values[-1]), rel=0.01)
    errors = {kind: whitened_error(sketch, matrix) for kind, sketch in sketches.items()}
    assert errors[SketchKind.cholesky] < 0.5 * errors[SketchKind.eigenpairs]


def test_a_sketch_is_read_as_it_was_written_or_refused():
    for kind in SketchKind:
        sketch = Sketch.encode(torch.stack([second_moments_like(9), second_moments_like(9, 1)]), kind)
        written = sketch.tensors()
        assert torch.equal(Sketch.restored(written).decode(), sketch.decode())
        for name, tensor in written.items():
            for wrong in (tensor[:1], tensor[0], tensor.double(), tensor[..., :-1]):
                with pytest.raises(ValueError, match=r"the sketch's \w+ are"):
                    Sketch.restored(written | {name: wrong})
            with pytest.raises(ValueError, match=f"the sketch has no tensor {name}"):
                Sketch.restored({other: one for other, one in written.items() if other != name})
        for name in ("scales", "diagonal", "norms_BK"):
            for wrong in (-1 - written[name], written[name] * torch.nan):
                with pytest.raises(ValueError, match=f"the sketch's {name} are not"):
                    Sketch.restored(written | {name: wrong})
