"""Certified removal against its theorems: the measured residual stays below the bound, and the budget is kept."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from sklearn.datasets import load_digits

from sfu.errors import ConfigError, DataError, SourceFreeError
from sfu.experiment.config import RunConfig
from sfu.heads.files import load_head
from sfu.heads.optimum import rounding_bound
from sfu.heads.settings import LinearSettings
from sfu.heads.train import train_head
from sfu.losses.base import make_loss
from sfu.losses.logistic import Logistic
from sfu.losses.quadratic import Quadratic
from sfu.losses.softmax import Softmax
from sfu.operators.build import build_operator
from sfu.operators.plan import plan_structure
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.gaussian_mechanism import delta_of
from sfu.unlearning.methods import certified_removal
from sfu.unlearning.methods.certified_removal import BOUNDS, PAYMENTS, CertifiedRemoval, gradient_norm, residual_bounds
from sfu.unlearning.methods.newton import Newton
from sfu.unlearning.methods.retrained import Retrained
from tests.unlearning.cases import RETAINED_CURVATURE, relative

CONTEXT = MethodContext({"folds": 3})


def digits(classes: int = 2):
    """Rows of norm 1; two classes are the digits below and above 5."""
    data = load_digits()
    features = torch.nn.functional.normalize(torch.from_numpy(data.data), dim=1)
    labels = torch.from_numpy(data.target).long()
    return features, (labels >= 5).long() if classes == 2 else labels


def trained(loss, classes: int = 2, noise: float = 1.0, l2: float = 1e-2, weights=None, data=None, noise_seed=0):
    features, labels = data or digits(classes)
    config = LinearSettings(l2=l2, objective_noise=noise, tolerance=1e-9)
    where = {"device": torch.device("cpu"), "dtype": torch.float64, "weights_N": weights, "noise_seed": noise_seed}
    return train_head(features, labels, classes, config, loss, seed=0, **where), features, labels, config


def remove_first(head, features, labels, count: int, weights=None, **settings):
    """(result, retained) of removing the first rows."""
    parts = [None if weights is None else weights[where] for where in (slice(count), slice(count, None))]
    retained = RetainedSet(features[count:], labels[count:], parts[1])
    request = ForgetRequest(head, features[:count], labels[:count], weights_F=parts[0])
    return CertifiedRemoval(**settings).unlearn(request, CONTEXT, retained), retained


def residual(head, retained) -> float:
    """The gradient norm of the retained rows' perturbed sum objective."""
    return gradient_norm(head, head.rows(retained.features_RD, retained.labels_R, retained.weights_R))


@pytest.mark.parametrize(
    ("loss", "classes", "removals", "idle"),
    [
        (Logistic(), 2, 1000, 1e-3), (Logistic(), 10, 100, 1e-3), (Softmax(), 3, 100, 1e-3),
        (Quadratic(), 10, 100, 0.0),
    ],
    ids=["logistic-2", "logistic-10", "softmax-3", "quadratic-10"],
)  # fmt: skip
def test_sequential_removals_stay_below_the_accumulated_bound(loss, classes, removals, idle):
    """Row by row, to the last digit: rounding is in the bound."""
    features, labels = digits(10)
    if removals == 1000:  # 4 x 4 pixels, to be quick
        features = torch.nn.functional.avg_pool2d(features.reshape(-1, 1, 8, 8), 2).flatten(1)
        features = torch.nn.functional.normalize(features, dim=1)
    labels = labels if classes == 10 else (labels >= 5).long() if classes == 2 else labels % classes
    head, *_ = trained(loss, classes, noise=10.0, data=(features, labels))
    assert head.certificate.residual_bound > len(labels) * float(head.gradient_CE.norm())
    method = CertifiedRemoval(epsilon=1e4, bound="sharp")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    spent = head.certificate.residual_bound
    for k in range(removals):
        keep = order[k + 1 :]
        retained = RetainedSet(features[keep], labels[keep])
        result = method.unlearn(
            ForgetRequest(head, features[order[k : k + 1]], labels[order[k : k + 1]]), CONTEXT, retained
        )
        assert result.applied
        head = result.head
        assert result.details["residual"] <= head.certificate.residual_bound
        assert head.certificate.residual_bound > spent
        spent = head.certificate.residual_bound
        sharp, corollary, worst = (result.details[f"bound_{name}"] for name in BOUNDS)
        assert sharp <= corollary <= worst
    assert head.n_train == len(labels) - removals
    assert idle * spent < residual(head, retained) == result.details["residual"]  # the bound is no idle one


@pytest.mark.parametrize("loss", [Logistic(), Softmax(), Quadratic(), Softmax((1.0, 2.0))], ids=str)
@pytest.mark.parametrize("count", [1, 200])
def test_every_bound_holds_for_a_batch(loss, count):
    weights = 0.5 + torch.rand(1797, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    head, features, labels, config = trained(loss, weights=weights)
    for name in PAYMENTS:
        result, retained = remove_first(head, features, labels, count, weights, epsilon=1e15, bound=name)
        assert residual(result.head, retained) <= result.head.certificate.residual_bound
        if name in BOUNDS:
            cost = result.details["last_cost"] - result.details[f"bound_{name}"]
            assert 0 < cost < 1e-5  # solve and rounding
    request = ForgetRequest(head, features[:count], labels[:count], weights_F=weights[:count])
    retrained = Retrained(config).unlearn(request, CONTEXT, retained).head
    moved = relative(result.head.parameters_CE - retrained.parameters_CE, head.parameters_CE - retrained.parameters_CE)
    assert moved < (1e-6 if loss.name == "quadratic" else 0.3)


def test_the_budget_refuses_what_would_break_it_and_what_is_left_is_as_it_was():
    head, features, labels, _ = trained(Logistic(), noise=0.5)
    forget, keep = torch.arange(400), torch.arange(400, 1797)
    request, retained = ForgetRequest(head, features[forget], labels[forget]), RetainedSet(features[keep], labels[keep])
    applied_to = []

    class Recording(CertifiedRemoval):
        def _remove(self, request, context, retained):
            result = super()._remove(request, context, retained)
            if result.applied:
                applied_to.append(request.features_FD)
            return result

    method = Recording(epsilon=0.5, delta=1e-3, batches=40)
    budget = method.budget(0.5)
    assert budget > 0.5 * 0.5 / math.sqrt(2 * math.log(1.5 / 1e-3))  # theorem 3's
    result = method.unlearn(request, CONTEXT, retained)
    applied = result.details["batches_applied"]
    assert 0 < applied < 40
    assert result.head.n_train == 1797 - 10 * applied
    bound = result.head.certificate.residual_bound
    assert bound <= budget < bound + result.details["last_cost"]
    assert delta_of(bound / 0.5, result.details["epsilon_spent"]) == pytest.approx(1e-3, rel=1e-9)
    assert not result.applied  # not wholly
    assert f"incomplete: {applied} of 40 batches were forgotten" in result.note
    assert f"of 0.5 (delta 0.001) spent, {applied} of 40 batches" in result.note
    assert (result.details["epsilon"], result.details["delta"]) == (0.5, 1e-3)
    assert f"{40 - applied} of 40 batches: refused" in result.note
    assert "; retrain;" in result.note
    # the refused rows are still in the training set: the residual is that of all rows but the removed ones
    gone = {tuple(row) for row in torch.cat(applied_to).tolist()}
    stay = torch.tensor([i for i, row in enumerate(features.tolist()) if tuple(row) not in gone])
    assert len(stay) == 1797 - 10 * applied
    assert residual(result.head, RetainedSet(features[stay], labels[stay])) <= bound
    broke = dataclasses.replace(method, epsilon=1e-9).unlearn(request, CONTEXT, retained)
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
    back = load_head(tmp_path / "head")
    assert torch.equal(back.certificate.noise_CE, head.certificate.noise_CE)
    assert back.certificate.seeded
    assert (back.certificate.noise_std, back.certificate.residual_bound) == (1.0, head.certificate.residual_bound)


def test_what_no_certificate_covers_is_refused():
    head, features, labels, _ = trained(Logistic())
    request, retained = ForgetRequest(head, features[:5], labels[:5]), RetainedSet(features[5:], labels[5:])
    with pytest.raises(SourceFreeError, match="needs the retained data"):
        CertifiedRemoval().unlearn(request, CONTEXT)
    plain = dataclasses.replace(head, certificate=None)
    moved = Newton(RETAINED_CURVATURE).unlearn(request, CONTEXT, retained).head
    assert moved.certificate.residual_bound is None
    for other in (plain, moved):
        with pytest.raises(ConfigError, match=r"head\.objective_noise above 0"):
            CertifiedRemoval().unlearn(ForgetRequest(other, features[:5], labels[:5]), CONTEXT, retained)
    hinge = dataclasses.replace(head, loss=make_loss("huber_hinge"))
    with pytest.raises(ConfigError, match=r"loss=huber_hinge has none\. Use logistic"):
        CertifiedRemoval().unlearn(ForgetRequest(hinge, features[:5], labels[:5]), CONTEXT, retained)
    for settings, message in (
        ({"epsilon": 0.0}, "epsilon=0"), ({"delta": 1.0}, "delta=1"), ({"bound": "loose"}, "bound=loose is unknown"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            CertifiedRemoval(**settings)


def test_newton_on_a_perturbed_head_goes_to_the_perturbed_optimum():
    """Original, Retrained and every method share b, so the rows of a table are comparable."""
    head, features, labels, config = trained(Quadratic(), noise=5.0)
    request, retained = ForgetRequest(head, features[:90], labels[:90]), RetainedSet(features[90:], labels[90:])
    retrained = Retrained(config).unlearn(request, CONTEXT, retained).head
    newton = Newton(RETAINED_CURVATURE).unlearn(request, CONTEXT, retained).head
    assert relative(newton.parameters_CE - retrained.parameters_CE, retrained.parameters_CE) < 1e-8


@pytest.mark.parametrize("loss", [Logistic(), Softmax()], ids=lambda loss: loss.name)
def test_a_removed_row_larger_than_the_rest_is_paid_for(loss):
    features, labels = digits()
    features, labels = 0.01 * features, labels.clone()
    features[0] *= 1000.0
    labels[0] = 1 - labels[0]
    head, *_ = trained(loss, l2=1e-4, data=(features, labels))
    for name in PAYMENTS:
        result, retained = remove_first(head, features, labels, 1, epsilon=1e15, bound=name)
        assert residual(result.head, retained) <= result.head.certificate.residual_bound
    assert result.details["bound_sharp"] <= result.details["bound_data_dependent"] <= result.details["bound_worst_case"]


def test_a_measured_residual_is_paid_as_it_is_and_not_added_up():
    head, features, labels, _ = trained(Logistic(), noise=0.5)
    settings = {"epsilon": 0.5, "delta": 1e-3, "batches": 40}
    bounded, _ = remove_first(head, features, labels, 400, **settings)
    measured, retained = remove_first(head, features, labels, 400, bound="measured", **settings)
    assert measured.details["batches_applied"] > 2 * bounded.details["batches_applied"]
    left = measured.details["budget_spent"]
    assert left <= measured.details["budget"]
    if measured.applied:
        assert residual(measured.head, retained) <= left < residual(measured.head, retained) + 1e-6
    poor, _ = remove_first(head, features, labels, 400, bound="measured", epsilon=1e-3, delta=1e-9)
    assert not poor.applied
    assert poor.head is head


def test_the_noise_is_the_systems_unless_a_seed_is_given_and_retrained_shares_it():
    drawn = [trained(Logistic(), noise_seed=None)[0] for _ in range(2)]
    assert not torch.equal(drawn[0].certificate.noise_CE, drawn[1].certificate.noise_CE)
    assert not drawn[0].certificate.seeded
    head, features, labels, config = trained(Logistic(), noise_seed=7)
    assert torch.equal(head.certificate.noise_CE, trained(Logistic(), noise_seed=7)[0].certificate.noise_CE)
    result, retained = remove_first(head, features, labels, 5, epsilon=1e4)
    assert "nothing is certified to anyone who knows seed_for.objective" in result.note
    secret, _ = remove_first(drawn[0], features, labels, 5, epsilon=1e4)
    assert "seed_for.objective" not in secret.note
    assert secret.note.startswith("epsilon ")
    assert secret.note.endswith("of 10000 (delta 0.0001) spent, 1 of 1 batch")
    request = ForgetRequest(drawn[0], features[:5], labels[:5])
    assert torch.equal(
        Retrained(config).unlearn(request, CONTEXT, retained).head.certificate.noise_CE, drawn[0].certificate.noise_CE
    )


def test_retained_data_that_are_not_what_is_left_are_refused():
    head, features, labels, _ = trained(Logistic())
    request = ForgetRequest(head, features[:50], labels[:50])
    for start in (0, 550):
        wrong = RetainedSet(features[start:], labels[start:])
        for method in (
            CertifiedRemoval(epsilon=1e4),
            Newton(RETAINED_CURVATURE),
            CertifiedRemoval(epsilon=1e4, batches=5),
        ):
            with pytest.raises(DataError, match=rf"has {1797 - start}\b.* rows .* has 1747 |has {1837 - start} rows"):
                method.unlearn(request, CONTEXT, wrong)
    heavy = RetainedSet(features[50:], labels[50:], torch.full((1747,), 2.0))
    with pytest.raises(DataError, match=r"total weight 3494; .* has 1747 of 1747"):
        CertifiedRemoval(epsilon=1e4).unlearn(request, CONTEXT, heavy)


def test_weights_on_one_side_alone_count_one_on_the_other():
    weights = torch.ones(1797, dtype=torch.float64)
    weights[100:] = 1.5
    head, features, labels, _ = trained(Logistic(), weights=weights)
    request = ForgetRequest(head, features[:100], labels[:100])
    retained = RetainedSet(features[100:], labels[100:], weights[100:])
    one_sided = CertifiedRemoval(epsilon=1e4, batches=4).unlearn(request, CONTEXT, retained)
    both = ForgetRequest(head, features[:100], labels[:100], weights_F=weights[:100])
    full = CertifiedRemoval(epsilon=1e4, batches=4).unlearn(both, CONTEXT, retained)
    assert torch.equal(one_sided.head.parameters_CE, full.head.parameters_CE)


def test_a_head_in_float32_and_balanced_weights_are_refused():
    head, features, labels, _ = trained(Logistic())
    with pytest.raises(ConfigError, match=r"float64, not torch\.float32"):
        remove_first(head.to(torch.device("cpu"), torch.float32), features, labels, 5)
    run = RunConfig(
        head=LinearSettings(objective_noise=1.0),
        loss=make_loss(name="logistic", class_weights="balanced"),
    )
    with pytest.raises(ConfigError, match="class_weights=balanced: the weights are counted from the removed"):
        CertifiedRemoval.from_config(run, None, {})


def small_removal(loss, n_forget: int = 30):
    """(head, request, retained rows, move, solution) of one removal, step by step."""
    weights = 0.5 + torch.rand(1797, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    head, features, labels, _ = trained(loss, classes=3, weights=weights, data=(digits(10)[0], digits(10)[1] % 3))
    request = ForgetRequest(head, features[:n_forget], labels[:n_forget], weights_F=weights[:n_forget])
    retained = RetainedSet(features[n_forget:], labels[n_forget:], weights[n_forget:])
    rows = request.retained_rows(retained)
    plan = plan_structure(head.layout, head.n_classes, rows.width, rows.count, rows.device)
    operator = build_operator(head.objective(), rows, head.parameters_CE, plan.structure)
    solution = operator.solve(request.forget_gradient())
    return request, retained, rows, request.step_ratio * solution.value_CE, solution


@pytest.mark.parametrize("loss", [Logistic(), Softmax()], ids=lambda loss: loss.name)
def test_the_bounds_by_their_definitions(loss):
    request, retained, rows, move, _ = small_removal(loss)
    head, gamma = request.head, loss.constants.curvature_lipschitz
    features, weights = retained.features_RD.double(), retained.weights_R
    spectral = float(torch.linalg.matrix_norm(features * weights[:, None].sqrt(), 2))
    change = (features @ move.T).norm(dim=1)
    radius, length = float(features.norm(dim=1).max()), float(move.norm())
    classes = math.sqrt(3) if loss.name == "logistic" else 1.0
    removed = float(request.features_FD.double().norm(dim=1).max())
    largest = loss.constants.gradient_bound * classes * removed + head.l2 * float(head.parameters_CE.norm())
    step = 1.25 * request.weight * largest / (head.l2 * rows.weight)
    found = residual_bounds(request, rows, move, unsolved=0.25)
    assert found["sharp"] == pytest.approx(gamma / 2 * spectral * float(weights @ change**4) ** 0.5, rel=1e-9)
    corollary = gamma * spectral * radius * length * float(weights @ change**2) ** 0.5
    assert found["data_dependent"] == pytest.approx(corollary, rel=1e-9)
    assert found["worst_case"] == pytest.approx(gamma * rows.weight * radius**3 * step**2, rel=1e-9)


def test_what_is_paid_is_the_bound_the_unsolved_part_and_rounding():
    request, retained, rows, move, solution = small_removal(Logistic())
    head = request.head
    left = request.unlearned_head(head.parameters_CE + move)
    rounding = rounding_bound(left, rows)
    unsolved = solution.residual * request.weight * float(request.forget_gradient().norm())
    whole = unsolved + rounding_bound(head, request.data()) + rounding_bound(head, rows) + 2 * rounding
    assert unsolved > 0
    for name in BOUNDS:
        details = CertifiedRemoval(epsilon=1e15, bound=name).unlearn(request, CONTEXT, retained).details
        assert details["last_cost"] - details[f"bound_{name}"] == pytest.approx(whole, rel=1e-3)
    measured = CertifiedRemoval(epsilon=1e15, bound="measured").unlearn(request, CONTEXT, retained)
    assert measured.head.certificate.residual_bound == pytest.approx(
        residual(measured.head, retained) + rounding, rel=1e-12
    )
    refused = CertifiedRemoval(epsilon=1e-9, bound="sharp").unlearn(request, CONTEXT, retained)
    assert refused.details["budget_spent"] == head.certificate.residual_bound


def test_what_the_solver_leaves_is_paid_for(monkeypatch):
    request, retained, _, _, solution = small_removal(Logistic())
    rough = SimpleNamespace(solve=lambda right_CE: dataclasses.replace(solution, residual=1e-3))
    monkeypatch.setattr(certified_removal, "build_operator", lambda *given: rough)
    details = CertifiedRemoval(epsilon=1e15, bound="sharp").unlearn(request, CONTEXT, retained).details
    left = 1e-3 * request.weight * float(request.forget_gradient().norm())
    assert details["last_cost"] - details["bound_sharp"] == pytest.approx(left, rel=1e-4)
