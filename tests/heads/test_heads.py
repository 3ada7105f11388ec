from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sfu.errors import ArtifactError, DataError, SingularHessianError
from sfu.heads import moments as moments_module
from sfu.heads.exact import solve_positive_definite, train_exact
from sfu.heads.linear import LinearHead
from sfu.heads.moments import Moments, compute_moments, design_matrix
from sfu.heads.train import train_head
from sfu.losses import QuadraticLoss
from sfu.settings import AdamConfig, HeadConfig, LossConfig, Training
from tests.conftest import make_arrays


def tensors(seed: int = 0, **sizes: int):
    arrays = make_arrays(seed=seed, **sizes)
    return torch.from_numpy(arrays["train_features"]), torch.from_numpy(arrays["train_labels"])


def autograd_objective(parameters, design, labels, l2, mask, scale):
    targets = torch.nn.functional.one_hot(labels, parameters.shape[0]).double() * scale
    data = 0.5 * (design @ parameters.T - targets).square().sum(1).mean()
    return data + 0.5 * l2 * (parameters.square() * mask).sum()


@pytest.mark.parametrize("bias", [False, True])
def test_loss_gradient_and_hessian_against_autograd(bias, device):
    features, labels = tensors(n_train=60, n_features=5, n_classes=3)
    design = design_matrix(features, bias, device, torch.float64)
    labels = labels.to(device)
    mask = torch.ones(design.shape[1], dtype=torch.float64, device=device)
    mask[-1] = 0.0 if bias else 1.0
    loss = QuadraticLoss(0.3, 2.0, mask, 3)
    points = torch.randn(4, 3, design.shape[1], dtype=torch.float64).to(device)
    values, gradients = loss.values(design, labels, points), loss.gradients(design, labels, points)
    for point, value, gradient in zip(points, values, gradients, strict=True):
        variable = point.clone().requires_grad_()
        objective = autograd_objective(variable, design, labels, 0.3, mask, 2.0)
        (expected,) = torch.autograd.grad(objective, variable)
        torch.testing.assert_close(value.sum(), objective.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-12)
    full = torch.autograd.functional.hessian(
        lambda w: autograd_objective(w.reshape(3, -1), design, labels, 0.3, mask, 2.0), points[0].flatten()
    )
    block = compute_moments(features, labels.cpu(), 3, bias=bias, device=device).hessian(0.3, mask)
    torch.testing.assert_close(full, torch.kron(torch.eye(3).to(block), block), rtol=1e-11, atol=1e-12)


def test_streamed_moments_equal_one_product_whatever_the_chunk(monkeypatch):
    features, labels = tensors()
    design = torch.cat([features.double(), torch.ones(400, 1, dtype=torch.float64)], 1)
    hot = torch.nn.functional.one_hot(labels, 4).double()
    rows = torch.tensor([3, 399, 17])
    for chunk in (1, 7, 400, 4096):
        monkeypatch.setattr(moments_module, "CHUNK_ROWS", chunk)
        ticks: list[tuple[int, int]] = []
        moments = compute_moments(
            features, labels, 4, bias=True, device=torch.device("cpu"), progress=lambda *t, ticks=ticks: ticks.append(t)
        )
        torch.testing.assert_close(moments.second_EE, design.T @ design / 400, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(moments.cross_CE, hot.T @ design / 400, rtol=1e-12, atol=1e-12)
        assert ticks[-1] == (400, 400)
        some = compute_moments(features, labels, 4, bias=True, device=torch.device("cpu"), rows=rows)
        torch.testing.assert_close(some.second_EE, design[rows].T @ design[rows] / 3, rtol=1e-12, atol=1e-12)


@given(cut=st.integers(1, 399))
def test_merged_moments_are_those_of_the_union(cut):
    features, labels = tensors()
    cpu = torch.device("cpu")
    parts = [compute_moments(features[i], labels[i], 4, bias=False, device=cpu) for i in (slice(cut), slice(cut, None))]
    whole = compute_moments(features, labels, 4, bias=False, device=cpu)
    merged = Moments.merge(parts)
    assert merged.count == 400
    torch.testing.assert_close(merged.second_EE, whole.second_EE, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(merged.cross_CE, whole.cross_CE, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("bias", [False, True])
def test_exact_training_agrees_with_scikit_learn(bias):
    from sklearn.linear_model import Ridge

    features, labels = tensors()
    head = train_exact(
        compute_moments(features, labels, 4, bias=bias, device=torch.device("cpu")),
        l2=1e-2,
        bias=bias,
        target_scale=3.0,
    )
    hot = 3.0 * np.eye(4)[labels.numpy()]
    ridge = Ridge(alpha=400 * 1e-2, fit_intercept=bias).fit(features.double().numpy(), hot)
    np.testing.assert_allclose(head.weight_CD.numpy(), ridge.coef_, rtol=1e-9, atol=1e-11)
    if bias:
        np.testing.assert_allclose(head.parameters_CE[:, -1].numpy(), ridge.intercept_, rtol=1e-9, atol=1e-11)
    assert float(head.gradient_CE.norm()) < 1e-13


def test_a_singular_gram_matrix_is_refused_and_l2_is_the_remedy():
    features, labels = tensors()
    features = torch.cat([features, features[:, :1]], 1)
    moments = compute_moments(features, labels, 4, bias=False, device=torch.device("cpu"))
    with pytest.raises(SingularHessianError, match=r"400 training rows plus head\.l2=0 .*Set head\.l2"):
        train_exact(moments, l2=0.0, bias=False, target_scale=1.0)
    assert train_exact(moments, l2=1e-6, bias=False, target_scale=1.0).n_train == 400


@pytest.mark.parametrize("spectrum", [[0.0, 1.0, 2.0], [-1.0, 1.0, 1.0], [1e-18, 1.0, 1.0]])
def test_solve_refuses_what_is_not_positive_definite(spectrum):
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        basis = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64)).Q
        matrix = basis @ torch.diag(torch.tensor(spectrum).double()) @ basis.T
        with pytest.raises(SingularHessianError, match="the thing is singular"):
            solve_positive_definite(matrix, torch.eye(3).double(), "the thing")
        sound = matrix + (1.0 - min(spectrum)) * torch.eye(3).double()
        solved = solve_positive_definite(sound, torch.eye(3).double(), "the thing")
        torch.testing.assert_close(solved @ sound, torch.eye(3).double(), rtol=1e-9, atol=1e-9)


def test_adam_comes_near_the_optimum_and_keeps_its_true_gradient():
    features, labels = tensors()
    head, loss = HeadConfig(name="linear", l2=1e-2, training=Training.adam), LossConfig(name="quadratic")
    head.adam = AdamConfig(lr=1e-2, batch_size=64, max_epochs=30, patience=30, tolerance=0.0)
    where = {"device": torch.device("cpu"), "dtype": torch.float64}
    adam = train_head(features, labels, 4, head, loss, seed=1, **where)
    same = train_head(features, labels, 4, head, loss, seed=1, **where)
    other = train_head(features, labels, 4, head, loss, seed=2, **where)
    assert torch.equal(adam.parameters_CE, same.parameters_CE)
    assert not torch.equal(adam.parameters_CE, other.parameters_CE)
    head.training = Training.exact
    exact = train_head(features, labels, 4, head, loss, seed=1, **where)
    assert 0 < float((adam.parameters_CE - exact.parameters_CE).norm() / exact.parameters_CE.norm()) < 0.1
    moments = compute_moments(features, labels, 4, bias=False, device=torch.device("cpu"))
    expected = moments.gradient(adam.parameters_CE, 1e-2, adam.regularized_E, 1.0)
    torch.testing.assert_close(adam.gradient_CE, expected, rtol=1e-9, atol=1e-13)


def test_adam_stops_early_when_nothing_improves():
    features, labels = tensors()
    config = AdamConfig(lr=1e-2, batch_size=64, max_epochs=500, patience=2, tolerance=0.05)
    epochs: list[tuple[int, int]] = []
    head = HeadConfig(name="linear", l2=1e-2, training=Training.adam, adam=config)
    train_head(
        features, labels, 4, head, LossConfig(name="quadratic"), seed=0,
        device=torch.device("cpu"), dtype=torch.float64, progress=lambda *t: epochs.append(t),
    )  # fmt: skip
    assert len(epochs) < 100


@pytest.mark.parametrize("bias", [False, True])
def test_a_saved_head_comes_back_whole(tmp_path, bias):
    torch.manual_seed(0)
    head = LinearHead(torch.randn(3, 5).double(), torch.randn(3, 5).double(), 0.01, 77, bias, 2.0)
    paths = head.save(tmp_path / "deep" / "head.v1")
    back = LinearHead.load(tmp_path / "deep" / "head.v1")
    assert all(path.is_file() for path in paths)
    assert torch.equal(back.parameters_CE, head.parameters_CE)
    assert torch.equal(back.gradient_CE, head.gradient_CE)
    assert (back.l2, back.n_train, back.bias, back.target_scale) == (0.01, 77, bias, 2.0)


def test_damaged_missing_foreign_and_mismatched_heads_are_refused(tmp_path):
    zero = torch.zeros(2, 3).double()
    LinearHead(zero, zero, 0.0, 5).save(tmp_path / "a")
    LinearHead(torch.zeros(2, 4).double(), torch.zeros(2, 4).double(), 0.0, 5).save(tmp_path / "b")
    with pytest.raises(ArtifactError, match="no head at"):
        LinearHead.load(tmp_path / "c")
    (tmp_path / "a.json").write_text((tmp_path / "b.json").read_text())
    with pytest.raises(ArtifactError, match="do not belong together"):
        LinearHead.load(tmp_path / "a")
    about = json.loads((tmp_path / "b.json").read_text())
    (tmp_path / "b.json").write_text(json.dumps(about | {"schema": 99}))
    with pytest.raises(ArtifactError, match="schema 99"):
        LinearHead.load(tmp_path / "b")
    (tmp_path / "a.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(ArtifactError, match="cannot be read"):
        LinearHead.load(tmp_path / "a")


@pytest.mark.parametrize("bias", [False, True])
def test_a_torch_layer_goes_in_and_comes_out(bias):
    layer = torch.nn.Linear(6, 3, bias=bias)
    head = LinearHead.from_module(layer, l2=0.1, n_train=9)
    rows = torch.randn(7, 6)
    torch.testing.assert_close(head.logits(rows), layer(rows).double(), rtol=1e-5, atol=1e-6)
    twin = torch.nn.Linear(6, 3, bias=bias)
    head.copy_to(twin)
    assert torch.equal(twin(rows), layer(rows))
    assert head.n_features == 6


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_heads_that_are_not_finite_are_refused(value):
    zero = torch.zeros(2, 3)
    with pytest.raises(DataError, match="NaN or infinite"):
        LinearHead(zero + value, zero, 0.0, 5)
    with pytest.raises(DataError, match="both be"):
        LinearHead(zero, zero[:, :2], 0.0, 5)
