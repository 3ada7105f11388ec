from __future__ import annotations

import pytest
import torch

import sfu
from sfu.errors import ConfigError
from sfu.experiment.schema import Estimator, Regularization
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
    assert isinstance(result, sfu.Unlearned)
    before = float((head.parameters_CE - retrained).norm())
    after = float((result.head.parameters_CE - retrained).norm())
    assert after < 0.7 * before
    assert result.predicted_gain > 0
    assert result.head.to_module().weight.shape == (4, 12)
    again = sfu.unlearn(head, features[:80], labels[:80])
    assert torch.equal(again.head.parameters_CE, result.head.parameters_CE)


def test_what_needs_the_retained_data_is_refused():
    layer, features, labels, _ = trained_layer(False)
    head = sfu.LinearHead.from_module(layer, l2=1e-3, n_train=400)
    exact = sfu.CurvatureConfig(estimator=Estimator.exact, regularization=Regularization.none)
    with pytest.raises(ConfigError, match="needs the retained data"):
        sfu.unlearn(head, features[:80], labels[:80], curvature=exact)
    with pytest.raises(ConfigError, match=r"curvature\.perturbations=0"):
        sfu.unlearn(head, features[:80], labels[:80], curvature=sfu.CurvatureConfig(perturbations=0))


def test_unknown_names_are_not_found():
    with pytest.raises(AttributeError, match="no attribute 'learn'"):
        _ = sfu.learn
