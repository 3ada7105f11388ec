"""Exact training under every loss: the certificate, and scikit-learn's answers for the same objective."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from sfu.errors import ConfigError, DataError, SolverError
from sfu.heads.files import load_head
from sfu.heads.settings import Keep, LinearSettings
from sfu.heads.train import train_head
from sfu.losses import rows as rows_module
from sfu.losses.huber_hinge import HuberHinge
from sfu.losses.logistic import Logistic
from sfu.losses.quadratic import Quadratic
from sfu.losses.softmax import Softmax
from sfu.losses.squared_hinge import SquaredHinge

LOSSES = [Quadratic(), Logistic(), Softmax(), HuberHinge(), SquaredHinge()]
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)


def digits():
    data = load_digits()
    return torch.nn.functional.normalize(torch.from_numpy(data.data), dim=1), torch.from_numpy(data.target).long()


def fit(loss, features, labels, *, weights=None, dtype=torch.float64, classes=None, **settings):
    config = LinearSettings(**{"l2": 1e-3, **settings})
    return train_head(
        features, labels, classes or int(labels.max()) + 1, config, loss, seed=0, device=torch.device("cpu"),
        dtype=dtype, weights_N=weights,
    )  # fmt: skip


@every_loss
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("l2", [1e-5, 1e-3])
def test_the_optimum_of_digits_to_1e_8(loss, bias, l2):
    features, labels = digits()
    head = fit(loss, features, labels, l2=l2, bias=bias)
    rows = head.rows(features, labels)
    gradient = head.objective().gradient(rows, head.parameters_CE)
    assert float(gradient.norm()) <= 1e-8
    torch.testing.assert_close(head.gradient_CE, gradient, rtol=1e-6, atol=1e-15)
    assert float(head.parameters_CE.norm()) > 1
    if bias and loss.name == "softmax":
        assert abs(float(head.parameters_CE[:, -1].sum())) < 1e-8  # equal biases are not felt, and none are added


def logistic_regression(features, labels, l2, bias, weights=None):
    from sklearn.linear_model import LogisticRegression

    total = len(labels) if weights is None else float(weights.sum())
    model = LogisticRegression(C=1 / (l2 * total), fit_intercept=bias, solver="newton-cholesky", tol=1e-8)
    return model.fit(features.numpy(), labels.numpy(), sample_weight=None if weights is None else weights.numpy())


def close(ours: torch.Tensor, theirs: np.ndarray) -> None:
    assert float((ours - torch.from_numpy(theirs)).norm() / np.linalg.norm(theirs)) < 1e-4


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_softmax_is_scikit_learns_multinomial(bias, weighted):
    features, labels = digits()
    weights = 0.5 + torch.rand(len(labels), dtype=torch.float64) if weighted else None
    head = fit(Softmax(), features, labels, bias=bias, weights=weights)
    model = logistic_regression(features, labels, 1e-3, bias, weights)
    close(head.weight_CD, model.coef_)
    if bias:
        close(head.parameters_CE[:, -1], model.intercept_ - model.intercept_.mean())


@pytest.mark.parametrize("bias", [False, True])
def test_logistic_is_scikit_learns_one_class_at_a_time_and_binary(bias):
    features, labels = digits()
    head = fit(Logistic(), features, labels, bias=bias)
    for c in (0, 7):
        model = logistic_regression(features, (labels == c).long(), 1e-3, bias)
        close(head.weight_CD[c], model.coef_[0])
        if bias:
            close(head.parameters_CE[c, -1:], model.intercept_)
    binary = fit(Logistic(), features, (labels >= 5).long(), bias=bias)
    model = logistic_regression(features, (labels >= 5).long(), 1e-3, bias)
    close(binary.weight_CD[1], model.coef_[0])
    torch.testing.assert_close(binary.parameters_CE[0], -binary.parameters_CE[1], rtol=1e-5, atol=1e-7)


def test_class_weights_are_scikit_learns():
    from sklearn.linear_model import LogisticRegression

    features, labels = digits()
    given = {c: 0.5 + c / 5 for c in range(10)}
    head = fit(Softmax(tuple(given.values())), features, labels)
    assert head.weight == pytest.approx(sum(given[int(c)] for c in labels))
    model = LogisticRegression(
        C=1 / (1e-3 * head.total_weight), fit_intercept=False, solver="newton-cholesky", tol=1e-8, class_weight=given
    ).fit(features.numpy(), labels.numpy())
    close(head.weight_CD, model.coef_)


def test_the_quadratic_loss_is_scikit_learns_ridge_classifier():
    from sklearn.linear_model import RidgeClassifier

    features, labels = digits()
    head = fit(Quadratic(other_target=-1.0), features, labels, bias=True)
    model = RidgeClassifier(alpha=1e-3 * len(labels)).fit(features.numpy(), labels.numpy())
    close(head.weight_CD, model.coef_)
    close(head.parameters_CE[:, -1], model.intercept_)


def test_the_squared_hinge_is_scikit_learns_linear_svc():
    """Its bias is the weight of a feature that is always 1, and it has C_svc = 1 / (2 l2 N)."""
    from sklearn.svm import LinearSVC

    features, labels = digits()
    with_one = torch.cat([features, torch.ones(len(labels), 1)], dim=1)
    head = fit(SquaredHinge(), with_one, labels)
    model = LinearSVC(C=1 / (2 * 1e-3 * len(labels)), dual=False, tol=1e-8).fit(features.numpy(), labels.numpy())
    close(head.parameters_CE, np.concatenate([model.coef_, model.intercept_[:, None]], axis=1))


def test_label_smoothing_is_pytorchs():
    """Its gradient is 0 at sfu's optimum."""
    features, labels = digits()
    head = fit(Softmax(label_smoothing=0.1), features, labels, tolerance=1e-10)
    weight = head.weight_CD.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(features @ weight.T, labels, label_smoothing=0.1)
    (loss + 1e-3 / 2 * weight.square().sum()).backward()
    assert float(weight.grad.norm()) < 1e-8


@every_loss
def test_a_large_set_is_started_roughly_and_streamed_to_the_same_optimum(loss, monkeypatch):
    features, labels = digits()
    expected = fit(loss, features, labels, tolerance=1e-10)
    monkeypatch.setattr(rows_module, "CACHE_BYTES", 0)
    streamed = fit(loss, features.repeat(10, 1), labels.repeat(10), tolerance=1e-10)
    close(streamed.parameters_CE, expected.parameters_CE.numpy())


def test_a_head_rounded_to_float32_keeps_the_gradient_of_what_it_is():
    features, labels = digits()
    head = fit(Softmax(), features, labels, dtype=torch.float32)
    assert head.parameters_CE.dtype == torch.float32
    double = head.to(torch.device("cpu"), torch.float64)
    gradient = double.objective().gradient(double.rows(features, labels), double.parameters_CE)
    assert 1e-10 < float(gradient.norm()) < 1e-6
    torch.testing.assert_close(double.gradient_CE, gradient, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("loss", [Logistic(), Softmax()], ids=lambda loss: loss.name)
@pytest.mark.parametrize(("scale", "l2"), [(180.0, 1e-3), (1e4, 1e-3), (1e-4, 1e-3)])
def test_badly_scaled_features_are_no_obstacle(loss, scale, l2):
    features, labels = digits()
    head = fit(loss, features[:200] * scale, labels[:200], l2=l2, tolerance=1e-7)
    assert float(head.gradient_CE.norm()) <= 1e-7


def test_what_cannot_be_reached_is_said_with_its_remedy():
    features, labels = digits()
    with pytest.raises(
        SolverError, match=r"not head\.tolerance=1e-30, and no shorter step lowers the objective\. Raise head\.l2"
    ):
        fit(Logistic(), features, labels, tolerance=1e-30)
    with pytest.raises(SolverError, match=r"after head\.max_iterations=1 steps"):
        fit(Logistic(), features, labels, max_iterations=1)


def test_a_curvature_too_large_to_keep_is_refused_before_training():
    features, labels = torch.randn(40, 300), torch.arange(40) % 10
    with pytest.raises(ConfigError, match=r"head\.keep=full does not fit this head: C\*E = 3000 is above 2048"):
        fit(Softmax(), features, labels, keep=Keep.full)
    kept = fit(Logistic(), features, labels, keep=Keep.full)
    assert kept.kept.data_hessian.shape == (10, 300, 300)


@every_loss
def test_adam_comes_near_the_same_optimum(loss):
    from sfu.heads.settings import AdamSettings, Training

    features, labels = digits()
    adam = AdamSettings(lr=5e-2, batch_size=256, max_epochs=40, patience=40)
    head = fit(loss, features, labels, l2=1e-2, training=Training.adam, adam=adam)
    exact = fit(loss, features, labels, l2=1e-2)
    assert 1e-6 < float((head.parameters_CE - exact.parameters_CE).norm() / exact.parameters_CE.norm()) < 0.2
    rows = head.rows(features, labels)
    expected = head.objective().gradient(rows, head.parameters_CE)
    torch.testing.assert_close(head.gradient_CE, expected, rtol=1e-9, atol=1e-14)


def test_a_head_of_the_first_schema_is_still_read(tmp_path):
    import json

    from safetensors.torch import save_file

    zero = torch.zeros(2, 3).double()
    save_file(
        {"parameters": zero, "gradient": zero.clone(), "second": torch.eye(3).double()}, tmp_path / "a.safetensors"
    )
    about = {
        "schema": 1, "kind": "linear", "loss": "quadratic", "n_classes": 2, "n_features": 3, "bias": False, "l2": 0.1,
        "n_train": 9, "target_scale": 4.0,
    }  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(about))
    head = load_head(tmp_path / "a")
    assert head.loss == Quadratic(target_scale=4.0)
    assert torch.equal(head.kept.data_hessian, torch.eye(3).double())


@every_loss
def test_a_saved_head_keeps_its_loss_weights_and_curvature(loss, tmp_path):
    from dataclasses import replace

    features, labels = digits()
    weighted = replace(loss, class_weights=(1.0, 2.0))
    head = fit(weighted, features[:, :8], (labels >= 5).long(), keep=Keep.full)
    head.save(tmp_path / "head")
    back = load_head(tmp_path / "head")
    assert (back.loss, back.weight) == (weighted, head.weight)
    assert torch.equal(back.kept.data_hessian, head.kept.data_hessian)


@pytest.mark.parametrize(
    "weights",
    [torch.full((1797,), torch.nan), -torch.ones(1797), torch.ones(5), torch.zeros(1797), torch.linspace(-1, 1, 1797)],
    ids=["nan", "negative", "too few", "all zero", "mixed signs"],
)
def test_sample_weights_that_cannot_be_are_refused(weights):
    with pytest.raises(DataError, match="must be 1797 finite numbers of at least 0, not all 0"):
        fit(Logistic(), *digits(), weights=weights)


@pytest.mark.parametrize("loss", [Logistic(), Softmax()], ids=lambda loss: loss.name)
def test_an_optimum_that_does_not_exist_is_warned_of(loss, caplog):
    features, labels = digits()
    kept = labels != 3
    fit(loss, features[kept], labels[kept], bias=True, l2=1e-2, tolerance=1e-4)
    assert "class 3" in caplog.text
    assert "Set head.bias=false" in caplog.text
    caplog.clear()
    fit(loss, features, labels, bias=True, l2=1e-2, tolerance=1e-4)
    fit(loss, features[kept], labels[kept], l2=1e-2, tolerance=1e-4)
    assert not caplog.text
    few = torch.cat([(labels == c).nonzero()[:4, 0] for c in range(10)])
    fit(loss, features[few], labels[few], l2=0.0, tolerance=1e-3)
    assert "head.l2=0 and the training rows can be separated" in caplog.text
    caplog.clear()
    twice, wrong = torch.cat([few, few[:1]]), torch.cat([labels[few], (labels[few[:1]] + 1) % 10])
    weights = torch.ones(41).double()
    weights[-1] = 0
    fit(loss, features[twice], wrong, l2=0.0, tolerance=1e-3, weights=weights)
    assert "can be separated" in caplog.text  # a row without weight does not hold the weights back


def test_losses_with_a_minimum_need_no_warning(caplog):
    features, labels = digits()
    kept = labels != 3
    for loss in (Quadratic(), HuberHinge()):
        fit(loss, features[kept], labels[kept], bias=True, l2=1e-2, tolerance=1e-4)
    assert not caplog.text


def test_overlapping_classes_have_an_optimum_without_a_ridge(caplog):
    features, labels = digits()
    mixed = (labels + torch.arange(1797)) % 2
    fit(Logistic(), features[:, 20:24], mixed, l2=0.0, tolerance=1e-6)
    assert not caplog.text
