from __future__ import annotations

import pytest
import torch

import sfu
from sfu.curvature.settings import Regularization
from sfu.errors import ConfigError, DataError
from sfu.losses.logistic import Logistic
from tests.conftest import make_arrays


def trained_layer(bias: bool):
    """A torch layer at the optimum of the ridge objective, trained without sfu."""
    arrays = make_arrays()
    features = torch.from_numpy(arrays["train_features"]).double()
    labels = torch.from_numpy(arrays["train_labels"])
    design = torch.cat([features, torch.ones(400, 1).double()], 1) if bias else features
    penalty = 1e-3 * torch.eye(design.shape[1]).double()
    if bias:
        penalty[-1, -1] = 0

    def fit(rows: slice | torch.Tensor) -> torch.Tensor:
        x, y = design[rows], torch.nn.functional.one_hot(labels[rows], 4).double()
        return torch.linalg.solve(x.T @ x / len(x) + penalty, x.T @ y / len(x)).T

    layer = torch.nn.Linear(12, 4, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        optimum = fit(slice(None))
        layer.weight.copy_(optimum[:, :12])
        if bias:
            layer.bias.copy_(optimum[:, 12])
    return layer, features, labels, fit(slice(80, None))


@pytest.mark.parametrize("bias", [False, True])
def test_a_torch_layer_is_brought_nearer_to_its_retrained_self(bias):
    layer, features, labels, retrained = trained_layer(bias)
    head = sfu.LinearHead.from_module(layer, l2=1e-3, n_train=400)
    result = sfu.unlearn(head, features[:80], labels[:80])
    assert isinstance(result, sfu.UnlearningResult)
    before = float((head.parameters_CE - retrained).norm())
    after = float((result.head.parameters_CE - retrained).norm())
    assert after < 0.7 * before
    assert result.predicted_distance_gain > 0
    again = sfu.unlearn(head, features[:80], labels[:80])
    assert torch.equal(again.head.parameters_CE, result.head.parameters_CE)


def test_what_needs_the_retained_data_is_refused():
    layer, features, labels, _ = trained_layer(False)
    head = sfu.LinearHead.from_module(layer, l2=1e-3, n_train=400)
    exact = sfu.curvature_settings(estimator="exact", regularization=Regularization.none)
    with pytest.raises(ConfigError, match="needs the retained data"):
        sfu.unlearn(head, features[:80], labels[:80], curvature=exact)
    with pytest.raises(ConfigError, match=r"curvature\.perturbations=0"):
        sfu.unlearn(head, features[:80], labels[:80], curvature=sfu.curvature_settings(perturbations=0))


def test_a_float32_model_goes_on_working_after_the_swap():
    layer, features, labels, _ = trained_layer(True)
    model = torch.nn.Sequential(torch.nn.Flatten(), layer).float()
    before = model(features[:5].float())
    result = sfu.unlearn(sfu.LinearHead.from_module(model[1], l2=1e-3, n_train=400), features[:80], labels[:80])
    result.head.copy_to(model[1])
    after = model(features[:5].float())
    assert after.dtype == torch.float32
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, result.head.logits(features[:5]).float(), rtol=1e-5, atol=1e-5)
    with pytest.raises(DataError, match="without bias"):
        result.head.copy_to(torch.nn.Linear(12, 4, bias=False))


def test_settings_by_name_mean_what_they_say():
    layer, features, labels, _ = trained_layer(False)
    head = sfu.LinearHead.from_module(layer, l2=1e-3, n_train=400)
    typed = sfu.unlearn(head, features[:80], labels[:80], curvature=sfu.curvature_settings(estimator="closed_form"))
    for named in (
        {"estimator": "closed_form"},
        sfu.curvature_settings(estimator="closed_form", regularization="cross_validated", structure="auto"),
    ):
        again = sfu.unlearn(head, features[:80].numpy(), labels[:80].numpy(), curvature=named)
        assert torch.equal(again.head.parameters_CE, typed.head.parameters_CE)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"curvature": {"estimater": "oas"}}, ConfigError, "estimater.*takes estimator"),
        ({"curvature": {"estimator": "best"}}, ConfigError, r"curvature=best is unknown\. Choose one of closed_form"),
        ({"curvature": {"perturbations": 10.5}}, ConfigError, "perturbations|10.5"),
        ({"curvature": "closed_form"}, ConfigError, "curvature must be settings or a mapping of them, not str"),
        ({"noise_sigma": float("nan")}, ConfigError, "noise_sigma=nan"),
        ({"noise_sigma": -1.0}, ConfigError, r"noise_sigma=-1"),
        ({"seed": -1}, ConfigError, "seed=-1"),
        ({"seed": 0.5}, ConfigError, r"seed=0\.5"),
        ({"labels": torch.zeros(80, dtype=torch.bool)}, DataError, "must be 80 integers"),
        ({"features": torch.zeros(80, 12, dtype=torch.complex64)}, DataError, "real numbers"),
        ({"features": torch.zeros(80, 11)}, DataError, "11 wide"),
    ],
)
def test_python_settings_and_data_are_checked_like_the_command_lines(change, error, message):
    layer, features, labels, _ = trained_layer(False)
    head = sfu.LinearHead.from_module(layer, l2=1e-3, n_train=400)
    arguments = {"features": features[:80], "labels": labels[:80], **change}
    with pytest.raises(error, match=message):
        sfu.unlearn(head, **arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"l2": -1.0}, ConfigError, "l2=-1"),
        ({"l2": float("nan")}, ConfigError, "l2=nan"),
        ({"l2": "small"}, ConfigError, "l2=small. Give a finite number of at least 0."),
        ({"n_train": 300.5}, ConfigError, r"n_train=300\.5"),
        ({"n_train": 0}, ConfigError, "n_train=0"),
        ({"weight": -1.0}, ConfigError, r"weight=-1\.0"),
        ({"loss": "cross_entropy"}, ConfigError, r"loss=cross_entropy is unknown\..* Did you mean softmax\?"),
        (
            {"loss": torch.nn.CrossEntropyLoss()},
            ConfigError,
            r"^loss=CrossEntropyLoss is not a loss of sfu\. Give a name, such as loss='softmax'",
        ),
        ({"loss": torch.nn.MSELoss}, ConfigError, r"MSELoss'> is not a loss of sfu\. .* such as loss='quadratic'"),
        ({"loss": Logistic}, ConfigError, r"Logistic'> is not a loss of sfu\. .* such as loss='logistic'"),
        ({"module": torch.nn.Conv2d(3, 4, 1)}, DataError, "not a Conv2d"),
    ],
)
def test_heads_are_checked(change, error, message):
    arguments = {"module": torch.nn.Linear(12, 4), "l2": 0.1, "n_train": 400, **change}
    with pytest.raises(error, match=message):
        sfu.LinearHead.from_module(arguments.pop("module"), **arguments)


def test_dead_features_have_nothing_to_unlearn():
    head = sfu.LinearHead.from_module(torch.nn.Linear(12, 4, bias=False), l2=0.0, n_train=400)
    result = sfu.unlearn(head, torch.zeros(40, 12), torch.arange(40) % 4)
    assert torch.equal(result.head.parameters_CE, head.parameters_CE)
    assert not result.applied


def test_unknown_names_are_not_found():
    with pytest.raises(AttributeError, match="no attribute 'learn'"):
        _ = sfu.learn
