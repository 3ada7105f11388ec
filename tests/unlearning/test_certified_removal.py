"""Certified removal against its theorems: the measured residual stays below the bound, and the budget is kept."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from sklearn.datasets import load_digits

from sfu.errors import ConfigError, SourceFreeError
from sfu.heads.train import train_head
from sfu.losses import Logistic, Quadratic, Softmax, make_loss
from sfu.settings import HeadConfig
from sfu.unlearning.method import RetainedSet, Tools
from sfu.unlearning.methods.certified_removal import BOUNDS, CertifiedRemoval, residual
from sfu.unlearning.methods.newton import Newton
from sfu.unlearning.methods.retrained import Retrained
from sfu.unlearning.request import ForgetRequest
from tests.unlearning.test_newton import EXACT, relative

TOOLS = Tools({"folds": 3})


def digits(classes: int = 2):
    """Rows of norm 1; two classes are the digits below and above 5."""
    data = load_digits()
    features = torch.nn.functional.normalize(torch.from_numpy(data.data), dim=1)
    labels = torch.from_numpy(data.target).long()
    return features, (labels >= 5).long() if classes == 2 else labels


def trained(loss, classes: int = 2, noise: float = 1.0, l2: float = 1e-2, weights=None):
    features, labels = digits(classes)
    config = HeadConfig(name="linear", l2=l2, objective_noise=noise, tolerance=1e-10)
    where = {"device": torch.device("cpu"), "dtype": torch.float64, "weights_N": weights}
    return train_head(features, labels, classes, config, loss, seed=0, **where), features, labels, config


def test_a_thousand_removals_stay_below_the_accumulated_bound():
    head, features, labels, _ = trained(Logistic(), noise=10.0)
    assert head.certificate.residual_bound == len(labels) * float(head.gradient_CE.norm())
    method = CertifiedRemoval(epsilon=1e4, bound="sharp")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    spent = 0.0
    for k in range(1000):
        keep = order[k + 1 :]
        retained = RetainedSet(features[keep], labels[keep])
        result = method.unlearn(
            ForgetRequest(head, features[order[k : k + 1]], labels[order[k : k + 1]]), TOOLS, retained
        )
        assert result.applied
        head = result.head
        assert residual(head, retained) <= head.certificate.residual_bound
        assert head.certificate.residual_bound > spent
        spent = head.certificate.residual_bound
        assert (
            result.details["bound_sharp"]
            <= result.details["bound_data_dependent"]
            <= result.details["bound_worst_case"]
        )
    assert head.n_train == len(labels) - 1000
    assert residual(head, retained) > 1e-3 * spent  # the bound is no idle one


@pytest.mark.parametrize("loss", [Logistic(), Softmax(), Quadratic(), Softmax((1.0, 2.0))], ids=str)
@pytest.mark.parametrize("count", [1, 200])
def test_every_bound_holds_for_a_batch(loss, count):
    weights = 0.5 + torch.rand(1797, dtype=torch.float64)
    head, features, labels, config = trained(loss, weights=weights)
    forget, keep = torch.arange(count), torch.arange(count, 1797)
    request = ForgetRequest(head, features[forget], labels[forget], weights_F=weights[forget])
    retained = RetainedSet(features[keep], labels[keep], weights[keep])
    result = CertifiedRemoval(epsilon=1e9).unlearn(request, TOOLS, retained)
    left = residual(result.head, retained)
    for name in BOUNDS:
        assert left <= result.details[f"bound_{name}"] + head.certificate.residual_bound + 1e-9
    retrained = Retrained(config).unlearn(request, TOOLS, retained).head
    moved = relative(result.head.parameters_CE - retrained.parameters_CE, head.parameters_CE - retrained.parameters_CE)
    assert moved < (1e-6 if loss.name == "quadratic" else 0.3)


def test_the_budget_refuses_what_would_break_it_and_what_is_left_is_as_it_was():
    head, features, labels, _ = trained(Logistic(), noise=0.5)
    forget, keep = torch.arange(400), torch.arange(400, 1797)
    request, retained = ForgetRequest(head, features[forget], labels[forget]), RetainedSet(features[keep], labels[keep])
    method = CertifiedRemoval(epsilon=0.5, delta=1e-3, batches=40)
    budget = 0.5 * 0.5 / math.sqrt(2 * math.log(1.5 / 1e-3))
    assert method.budget(0.5) == pytest.approx(budget)
    result = method.unlearn(request, TOOLS, retained)
    applied = result.details["batches_applied"]
    assert 0 < applied < 40
    assert result.head.n_train == 1797 - 10 * applied
    bound = result.head.certificate.residual_bound
    assert bound <= budget < bound + result.details["last_cost"]
    assert result.details["epsilon_spent"] == pytest.approx(0.5 * bound / budget)
    assert (result.details["epsilon"], result.details["delta"]) == (0.5, 1e-3)
    assert f"{40 - applied} of 40 batches: refused" in result.note
    assert result.note.endswith("retrain")
    # the refused rows are still in the training set: the residual is that of all rows but the removed ones
    order = torch.randperm(400, generator=TOOLS.generator("folds"))
    gone = order[: 10 * applied]  # the costs are alike: the first are removed, the rest refused
    stay = torch.tensor([i for i in range(1797) if i not in set(gone.tolist())])
    assert residual(result.head, RetainedSet(features[stay], labels[stay])) <= bound
    broke = dataclasses.replace(method, epsilon=1e-9).unlearn(request, TOOLS, retained)
    assert not broke.applied
    assert torch.equal(broke.head.parameters_CE, head.parameters_CE)


def test_training_noise_moves_the_optimum_as_its_linear_term_does():
    head, features, labels, _ = trained(Logistic(), noise=3.0)
    plain, *_ = trained(Logistic(), noise=0.0)
    gradient = plain.objective().gradient(plain.rows(features, labels), head.parameters_CE)
    torch.testing.assert_close(gradient, -head.certificate.noise_CE / 1797, rtol=1e-6, atol=1e-9)
    assert float(head.certificate.noise_CE.std()) == pytest.approx(3.0, rel=0.3)
    assert plain.certificate is None


def test_a_certified_head_comes_back_from_disk(tmp_path):
    head, *_ = trained(Logistic())
    head.save(tmp_path / "head")
    back = type(head).load(tmp_path / "head")
    assert torch.equal(back.certificate.noise_CE, head.certificate.noise_CE)
    assert (back.certificate.noise_std, back.certificate.residual_bound) == (1.0, head.certificate.residual_bound)


def test_what_no_certificate_covers_is_refused():
    head, features, labels, _ = trained(Logistic())
    request, retained = ForgetRequest(head, features[:5], labels[:5]), RetainedSet(features[5:], labels[5:])
    with pytest.raises(SourceFreeError, match="needs the retained data"):
        CertifiedRemoval().unlearn(request, TOOLS)
    plain = dataclasses.replace(head, certificate=None)
    moved = Newton(EXACT).unlearn(request, TOOLS, retained).head
    assert moved.certificate.residual_bound is None
    for other in (plain, moved):
        with pytest.raises(ConfigError, match=r"head\.objective_noise above 0"):
            CertifiedRemoval().unlearn(ForgetRequest(other, features[:5], labels[:5]), TOOLS, retained)
    hinge = dataclasses.replace(head, loss=make_loss("huber_hinge"))
    with pytest.raises(ConfigError, match="loss=huber_hinge has not; use logistic"):
        CertifiedRemoval().unlearn(ForgetRequest(hinge, features[:5], labels[:5]), TOOLS, retained)
    for settings, message in (
        ({"epsilon": 0.0}, "epsilon=0"), ({"delta": 1.0}, "delta=1"), ({"bound": "loose"}, "bound=loose is unknown"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            CertifiedRemoval(**settings)


def test_newton_on_a_perturbed_head_goes_to_the_perturbed_optimum():
    """Original, Retrained and every method share b, so the rows of a table are comparable."""
    head, features, labels, config = trained(Quadratic(), noise=5.0)
    request, retained = ForgetRequest(head, features[:90], labels[:90]), RetainedSet(features[90:], labels[90:])
    retrained = Retrained(config).unlearn(request, TOOLS, retained).head
    newton = Newton(EXACT).unlearn(request, TOOLS, retained).head
    assert relative(newton.parameters_CE - retrained.parameters_CE, retrained.parameters_CE) < 1e-8
