"""Heads whose rows no class number describes: multi-label heads, heads of one output, regressions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression, Ridge, RidgeClassifier
from sklearn.svm import LinearSVC
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import sfu
from sfu.curvature.evidence import examine
from sfu.curvature.settings import curvature_settings
from sfu.errors import ConfigError, DataError
from sfu.heads.kept import Kept
from sfu.heads.projections import projected_moments
from sfu.losses.base import Loss, make_loss
from sfu.operators.build import build_operator
from sfu.operators.structure import Structure
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.methods.newton import Newton
from tests.losses.cases import defined
from tests.losses.test_targets import drawn_targets

N, F, D = 900, 150, 6
SIGNED = make_loss("quadratic", other_target=-1.0)
CLOSED = {"estimator": "closed_form"}
EXACT = curvature_settings(estimator="exact", regularization="none")


def drawn_rows() -> tuple[Tensor, Tensor]:
    """Rows of different scales with a mean, and three numbers that they explain in part."""
    drawn = torch.Generator().manual_seed(0)
    features = torch.randn(N, D, generator=drawn).double() * torch.logspace(0.3, -0.5, D).double() + 0.2
    noise = 0.7 * torch.randn(N, 3, generator=drawn).double()
    return features, features @ torch.randn(D, 3, generator=drawn).double() + noise


FEATURES, REAL = drawn_rows()
MULTI_HOT = (REAL > 0.3).long()


def layer_of(weight: Any, bias: Any) -> torch.nn.Linear:
    weight, bias = np.atleast_2d(weight), np.atleast_1d(bias)
    layer = torch.nn.Linear(weight.shape[1], len(weight), dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weight))
        layer.bias.copy_(torch.from_numpy(bias))
    return layer


def by_scikit_learn(model: Any, features: Tensor, targets: Tensor) -> torch.nn.Linear:
    fitted = model.fit(features.numpy(), targets.numpy())
    return layer_of(fitted.coef_, fitted.intercept_)


def by_torch(loss: Callable[[Tensor, Tensor], Tensor], l2: float, features: Tensor, targets: Tensor) -> torch.nn.Linear:
    """Minimise the loss of PyTorch plus l2/2 times the squared weights, by L-BFGS."""
    layer = torch.nn.Linear(D, targets.shape[1], dtype=torch.float64)
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    optimizer = torch.optim.LBFGS(
        layer.parameters(), max_iter=500, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(layer(features), targets.double()) + 0.5 * l2 * layer.weight.square().sum()
        value.backward()
        return value

    optimizer.step(closure)
    return layer


@dataclass(frozen=True)
class Kind:
    """How a head is trained, and what its owner gives to sfu."""

    trained_on: Tensor
    told: dict[str, Any]
    model: Any = None
    loss: torch.nn.Module | None = None
    given: Tensor | None = None
    weights: Tensor | None = None

    def layer(self, rows: slice) -> torch.nn.Linear:
        features, targets = FEATURES[rows], self.trained_on[rows]
        if self.model is not None:
            return by_scikit_learn(self.model, features, targets)
        return by_torch(self.loss, 2e-3, features, targets)  # type: ignore[arg-type]

    @property
    def targets(self) -> Tensor:
        return self.trained_on if self.given is None else self.given


ONE = MULTI_HOT[:, 0]
BY_SUM = {"l2_reduction": "sum"}
LOGISTIC = BY_SUM | {"loss": "logistic", "l2": 1.0}
KINDS = {
    "Ridge, one output": Kind(REAL[:, 0], BY_SUM | {"loss": "quadratic", "l2": 2.0}, Ridge(alpha=2.0)),
    "Ridge, three outputs": Kind(REAL, BY_SUM | {"loss": "quadratic", "l2": 2.0}, Ridge(alpha=2.0)),
    "RidgeClassifier, -1 and 1": Kind(
        2 * ONE - 1, BY_SUM | {"loss": "quadratic", "l2": 2.0}, RidgeClassifier(alpha=2.0)
    ),
    "RidgeClassifier, 0 and 1": Kind(ONE, BY_SUM | {"loss": SIGNED, "l2": 2.0}, RidgeClassifier(alpha=2.0)),
    "RidgeClassifier, multi-label": Kind(MULTI_HOT, BY_SUM | {"loss": SIGNED, "l2": 2.0}, RidgeClassifier(alpha=2.0)),
    "LogisticRegression": Kind(ONE, LOGISTIC, LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000)),
    "LogisticRegression, class weights": Kind(
        ONE,
        LOGISTIC | {"weight": float((1 + 2 * ONE).sum()), "bound": float(FEATURES.square().sum(1).max() + 1) / 4},
        LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000, class_weight={0: 1.0, 1: 3.0}),
        weights=(1 + 2 * ONE).double(),
    ),
    "LinearSVC": Kind(
        ONE,
        BY_SUM | {"loss": "squared_hinge", "l2": 0.5, "penalize_bias": True},
        LinearSVC(C=1.0, tol=1e-10, dual=False, max_iter=100_000),
        given=2 * ONE - 1,
    ),
    "BCEWithLogitsLoss, multi-label": Kind(
        MULTI_HOT, {"loss": "logistic", "l2": 3 * 2e-3}, loss=torch.nn.BCEWithLogitsLoss()
    ),
    "BCEWithLogitsLoss, one logit": Kind(
        ONE[:, None], {"loss": "logistic", "l2": 2e-3}, loss=torch.nn.BCEWithLogitsLoss(), given=ONE.bool()
    ),
    "BCEWithLogitsLoss, soft": Kind(
        0.05 + 0.9 * MULTI_HOT, {"loss": "logistic", "l2": 3 * 2e-3}, loss=torch.nn.BCEWithLogitsLoss()
    ),
    "MSELoss": Kind(REAL, {"loss": "quadratic", "l2": 3 * 2e-3 / 2}, loss=torch.nn.MSELoss()),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_step_is_retraining_by_the_same_library_if_the_curvature_is_known_and_nearer_if_not(name):
    kind, rest = KINDS[name], slice(F, None)
    head = sfu.LinearHead.from_module(kind.layer(slice(None)), n_train=N, **kind.told)
    aim_CE = sfu.LinearHead.from_module(kind.layer(rest), n_train=N, **kind.told).parameters_CE
    own, others = (None, None) if kind.weights is None else (kind.weights[:F], kind.weights[rest])
    retained = RetainedSet(FEATURES[rest], kind.targets[rest], others)
    request = ForgetRequest(head, FEATURES[:F], kind.targets[:F], own)
    rows = request.retained_rows(retained)
    hessian = build_operator(request.at_retained_l2().head.objective(), rows, aim_CE, Structure.products)

    def distance(at_CE: Tensor) -> float:
        return float(((at_CE - aim_CE) * hessian.matmul(at_CE - aim_CE)).sum()) ** 0.5

    whole = distance(head.parameters_CE)
    quadratic = head.loss.name == "quadratic"
    steps, tolerance = (1, 1e-6) if quadratic else (3, 1e-3)
    known = Newton(EXACT, steps=steps).unlearn(request, MethodContext(), retained)
    assert distance(known.head.parameters_CE) < tolerance * whole
    result = sfu.unlearn(head, FEATURES[:F], kind.targets[:F], weights=own, curvature=CLOSED)
    assert result.applied
    assert distance(result.head.parameters_CE) < 0.9 * whole
    if result.predicted_share is None:  # where the growth of l2 counts as an early stop
        assert name.startswith("LogisticRegression")
        return
    low, high = result.predicted_share_interval
    assert low < 1 - (distance(result.head.parameters_CE) / whole) ** 2 < high


def test_the_weight_of_positive_rows_is_a_sample_weight():
    """Of PyTorch's loss, which divides by rows: l2 is its weight decay times rows over weights."""
    weights = (1 + 2 * ONE).double()
    layer = by_torch(torch.nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)), 2e-3, FEATURES, ONE[:, None])
    larger = {"n_train": 2 * N, "weight": 2 * float(weights.sum())}  # all rows are a part of it
    head = sfu.LinearHead.from_module(layer, l2=2e-3 * N / float(weights.sum()), loss="logistic", **larger)
    gradients = [ForgetRequest(head, FEATURES, ONE, of_rows).forget_gradient() for of_rows in (weights, weights**0)]
    assert float(gradients[0].norm()) < 1e-8 < 1e-2 < float(gradients[1].norm())


# Derivatives and steps of tiny heads, against autograd of the plain loss


FORMS = {
    "bool": lambda t: t.bool(), "int": lambda t: t.int(), "float32": lambda t: t.float(), "numpy": lambda t: t.numpy(),
    "list": lambda t: t.tolist(), "signed": lambda t: 2 * t.int() - 1, "float64": lambda t: t,
}  # fmt: skip
SMALL_LOSSES = [make_loss(name) for name in ("logistic", "quadratic", "softmax", "huber_hinge", "squared_hinge")]


def mean_objective(loss: Loss, design: Tensor, targets: Tensor, l2: float, mask: Tensor, flat: Tensor) -> Tensor:
    parameters = flat.view(targets.shape[1], -1)
    rows = [defined(loss, row @ parameters.T, target) for row, target in zip(design, targets, strict=True)]
    return torch.stack(rows).mean() + 0.5 * l2 * (parameters.square() @ mask).sum()


@settings(max_examples=40, deadline=None)
@given(
    loss=st.sampled_from([*SMALL_LOSSES, SIGNED]), n_outputs=st.integers(1, 3), bias=st.booleans(),
    form=st.sampled_from(sorted(FORMS)), flat=st.booleans(), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_gradient_hessian_and_step_are_those_of_the_plain_loss(loss, n_outputs, bias, form, flat, seed):
    n_outputs = max(n_outputs, 2) if loss.name == "softmax" else n_outputs
    drawn, width = torch.Generator().manual_seed(seed), 2 + bias
    features, parameters = (torch.randn(*shape, generator=drawn).double() for shape in ((9, 2), (n_outputs, width)))
    targets = drawn_targets(loss, 9, n_outputs, seed)
    exact = form not in ("float64", "numpy", "list")
    if exact and loss.name != "softmax":
        targets = (targets > 0.5).double()
    given_form = FORMS[form] if not exact or loss.name != "softmax" else FORMS["float64"]
    given = given_form(targets[:, 0] if n_outputs == 1 and flat else targets)
    real = targets if (form, loss.targets.name) != ("signed", "real") else 2 * targets - 1
    design, mask = torch.nn.functional.pad(features, (0, int(bias)), value=1.0), torch.ones(width).double()
    mask[2:] = 0.0
    head = sfu.LinearHead(parameters, torch.zeros_like(parameters), 0.1, 9, bias, loss)
    request = ForgetRequest(head, features[:4], torch.as_tensor(given)[:4])

    def plain(rows: slice) -> Any:
        return lambda flat: mean_objective(loss, design[rows], real[rows], 0.1, mask, flat)

    at, own, rest = parameters.reshape(-1), plain(slice(4)), plain(slice(4, None))
    gradient = torch.autograd.functional.jacobian(own, at).view_as(parameters)
    torch.testing.assert_close(request.forget_gradient(), gradient, rtol=1e-10, atol=1e-12)
    for structure in (Structure.products, {"quadratic": Structure.shared}.get(loss.name, Structure.dense)):
        vector = torch.randn(parameters.shape, generator=drawn).double()
        expected = torch.autograd.functional.hessian(own, at) @ vector.reshape(-1)
        found = request.hessian(structure).matmul(vector)
        torch.testing.assert_close(found, expected.view_as(parameters), rtol=1e-10, atol=1e-12)
    retained = RetainedSet(features[4:], torch.as_tensor(given)[4:])
    hessian = torch.autograd.functional.hessian(rest, at)
    if not bias and float(torch.linalg.eigvalsh(hessian).min()) > 0.05:
        moved = Newton(EXACT).unlearn(request, MethodContext(), retained).head.parameters_CE
        step = torch.linalg.solve(hessian, gradient.reshape(-1)) * 4 / 5
        torch.testing.assert_close(moved, parameters + step.view_as(parameters), rtol=1e-8, atol=1e-10)


# One output against the two mirrored ones that are the same problem


@pytest.mark.parametrize(
    "curvature",
    [CLOSED, {"estimator": "psd_fit"}, {"estimator": "ledoit_wolf"}, CLOSED | {"structure": "products"}],
    ids=["closed_form", "psd_fit", "ledoit_wolf", "products"],
)
@pytest.mark.parametrize(
    "loss", ["logistic", "squared_hinge", "huber_hinge", SIGNED], ids=lambda loss: getattr(loss, "name", loss)
)
def test_a_head_of_one_output_moves_as_two_mirrored_outputs_do(loss, curvature):
    layer = by_torch(torch.nn.BCEWithLogitsLoss(), 2e-3, FEATURES, ONE[:, None])
    parameters = torch.cat([layer.weight, layer.bias[:, None]], 1).detach()
    found, unlabelled = [], FEATURES[-300:] + 0.01
    for of_head, labels in ((parameters, ONE.float()), (torch.cat([-parameters, parameters]), ONE)):
        head = sfu.LinearHead(of_head, torch.zeros_like(of_head), 2e-3, N, bias=True, loss=loss, kept=Kept(bound=10.0))
        further = {"curvature": curvature | {"on_doubt": "apply"}, "unlabelled": unlabelled}
        result = sfu.unlearn(head, FEATURES[:F], labels[:F], **further)
        l2 = sfu.effective_l2(ForgetRequest(head, FEATURES[:F], labels[:F]))
        found.append((result, l2, examine(ForgetRequest(head, FEATURES[:F], labels[:F]))["gradient"]))
    (one, l2, gradient), (two, other_l2, other_gradient) = found
    torch.testing.assert_close(one.head.parameters_CE, two.head.parameters_CE[1:], rtol=1e-6, atol=1e-7)
    assert one.applied
    assert (l2.value, l2.error) == pytest.approx((other_l2.value, other_l2.error), rel=1e-9)
    assert gradient.value == pytest.approx(other_gradient.value, rel=1e-9)


def squared_hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (1 - (2 * targets - 1) * outputs).clamp(min=0).square().mean()


def test_what_unlabelled_rows_show_is_that_of_two_mirrored_outputs():
    """At an optimum of a hinge, so that the evidence, the likeness of the rows and the share depend on predictions."""
    layer = by_torch(squared_hinge, 2e-3, FEATURES, ONE[:, None])
    parameters = torch.cat([layer.weight, layer.bias[:, None]], 1).detach()
    kept, results = Kept(bound=10.0, projected_2K=projected_moments(FEATURES)), []
    for of_head, labels in ((parameters, ONE.float()), (torch.cat([-parameters, parameters]), ONE)):
        head = sfu.LinearHead(of_head, torch.zeros_like(of_head), 2e-3, N, bias=True, loss="squared_hinge", kept=kept)
        rows = FEATURES[-300:] + 0.01
        results.append(sfu.unlearn(head, FEATURES[:F], labels[:F], unlabelled=rows, curvature=CLOSED))
    one, two = results
    torch.testing.assert_close(one.head.parameters_CE, two.head.parameters_CE[1:], rtol=1e-6, atol=1e-7)
    assert one.predicted_share == pytest.approx(two.predicted_share, rel=1e-6)
    assert one.details["weight_unlabelled"] == pytest.approx(two.details["weight_unlabelled"], rel=1e-6)
    assert one.details["unseen_share"] == pytest.approx(two.details["unseen_share"], rel=1e-6)


def test_views_have_the_targets_of_their_rows():
    """Views that are the rows themselves show what these show."""
    layer = by_torch(squared_hinge, 2e-3, FEATURES, ONE[:, None])
    head = sfu.LinearHead.from_module(layer, l2=2e-3, n_train=N, loss="squared_hinge", bound=10.0)
    plain = sfu.unlearn(head, FEATURES[:F], ONE[:F], curvature=CLOSED)
    same = sfu.unlearn(head, FEATURES[:F], ONE[:F], views=FEATURES[None, :F], curvature=CLOSED)
    assert plain.applied
    torch.testing.assert_close(same.head.parameters_CE, plain.head.parameters_CE, rtol=1e-6, atol=1e-8)


def test_predictions_stand_for_the_targets_of_unlabelled_rows():
    """Of a hinge, whose curvature depends on them: with one output, the largest output is no prediction."""
    weights = torch.linspace(-1, 1, D).double()[None]
    head = sfu.LinearHead(weights, torch.zeros_like(weights), 2e-3, N, loss="squared_hinge")
    request = ForgetRequest(head, FEATURES[:4], ONE[:4])
    outputs, rows = FEATURES @ weights[0], request.unlabelled_rows(FEATURES)
    assert torch.equal(rows.labels_N, (outputs > 0).double()[:, None])
    expected = (FEATURES.square().sum(1) * (outputs.abs() <= 1)).sum() / N
    assert float(head.traces(rows).sum()) == pytest.approx(float(expected), rel=1e-12)
    several = sfu.LinearHead(weights.repeat(2, 1), torch.zeros(2, D).double(), 2e-3, N, loss="squared_hinge")
    assert ForgetRequest(several, FEATURES[:4], ONE[:4]).unlabelled_rows(FEATURES).labels_N.shape == (N,)


# What a head of a multi-label or regression task remembers


def multi_label_head(**changes: Any) -> sfu.LinearHead:
    parameters = torch.randn(3, D, generator=torch.Generator().manual_seed(1)).double()
    return sfu.LinearHead(parameters, torch.zeros_like(parameters), 0.1, N, **{"loss": "logistic"} | changes)


def test_one_hot_rows_and_class_numbers_are_the_same_request():
    classes = REAL.argmax(1)
    hot = torch.eye(3).double()[classes]
    for loss in ("logistic", "softmax", "quadratic"):
        head = multi_label_head(loss=loss)
        by_number, by_row = (
            sfu.unlearn(head, FEATURES[:F], labels[:F], curvature=CLOSED | {"on_doubt": "apply"})
            for labels in (classes, hot)
        )
        assert torch.equal(by_number.head.parameters_CE, by_row.head.parameters_CE)
        among_others = ForgetRequest(head, FEATURES[:F], hot[:F])  # as they are beside rows of several classes
        assert among_others.has_targets
        gradients = (one.forget_gradient() for one in (among_others, ForgetRequest(head, FEATURES[:F], classes[:F])))
        assert torch.equal(*gradients)


def test_rows_with_targets_are_recognised_and_their_copies_count_once():
    head, force = multi_label_head(), CLOSED | {"on_doubt": "apply"}
    first = sfu.unlearn(head, FEATURES[:40], MULTI_HOT[:40], curvature=force)
    assert first.head.forgotten.rows == 40
    one_hot = MULTI_HOT[:40].sum(1) == 1
    assert 0 < int(one_hot.sum()) < 40
    for labels in (MULTI_HOT[:40].bool(), MULTI_HOT[:40].float(), (2 * MULTI_HOT[:40] - 1).numpy()):
        again = sfu.unlearn(first.head, FEATURES[:40], labels, curvature=force)
        assert again.note.startswith("not applied: 40 of 40 rows had been forgotten")
    alone = sfu.unlearn(first.head, FEATURES[:40][one_hot], MULTI_HOT[:40][one_hot].argmax(1), curvature=force)
    assert "so there is nothing left to do" in alone.note
    others = MULTI_HOT[:40].clone()
    others[:3, 0] = 1 - others[:3, 0]
    assert sfu.unlearn(first.head, FEATURES[:40], others, curvature=force).head.forgotten.rows == 43
    twice = sfu.unlearn(head, FEATURES[:40].repeat(2, 1), MULTI_HOT[:40].repeat(2, 1), curvature=force)
    assert twice.note.startswith("40 rows given again in this request count once")
    assert torch.equal(twice.head.parameters_CE, first.head.parameters_CE)


def test_the_memory_of_a_regression_is_in_its_files(tmp_path):
    layer = by_scikit_learn(Ridge(alpha=2.0), FEATURES, REAL[:, 0])
    head = sfu.LinearHead.from_module(layer, l2=2.0, l2_reduction="sum", n_train=N, loss="quadratic")
    targets = (8 * REAL[:, 0]).round() / 8
    targets[0], targets[1] = 1.0, 0.0
    sfu.unlearn(head, FEATURES[:60], targets[:60], curvature=CLOSED).head.save(tmp_path / "head")
    back = sfu.load_head(tmp_path / "head")
    assert (back.n_classes, back.forgotten.rows) == (1, 60)
    for same in (targets[:60, None], targets[:60].float(), targets[:60].tolist(), -targets[:60].neg()):
        assert "nothing left to do" in sfu.unlearn(back, FEATURES[:60], same, curvature=CLOSED).note
    others = targets[:60].clone()
    others[0], others[1] = 0.0, 1.0  # not the class number 0 of a row of ones
    assert sfu.unlearn(back, FEATURES[:60], others, curvature=CLOSED | {"on_doubt": "apply"}).head.forgotten.rows == 62


@pytest.mark.parametrize("targets", [REAL, REAL[:, :1]], ids=["three outputs", "one output"])
def test_the_ledger_of_a_regression_makes_two_requests_one(targets, tmp_path):
    layer = by_scikit_learn(Ridge(alpha=2.0), FEATURES, targets)
    head = sfu.LinearHead.from_module(
        layer, l2=2.0 / N, n_train=N, loss="quadratic", ledger=True, bound=float(FEATURES.square().sum(1).max()) + 1
    )
    fixed = CLOSED | {"regularization": "fixed", "rho": 0.01}
    parts = slice(0, 90), slice(90, F)
    after = head
    for part in parts:
        sfu.unlearn(after, FEATURES[part], targets[part], curvature=fixed).head.save(tmp_path / "head")
        after = sfu.load_head(tmp_path / "head")
    sums = after.forgotten.ledger.parts
    design = torch.nn.functional.pad(FEATURES[:F], (0, 1), value=1.0)
    residuals = design @ head.parameters_CE.T - targets[:F]
    torch.testing.assert_close(sum(one.gradient_CE for one in sums), residuals.T @ design, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(sum(one.hessian_EE for one in sums), design.T @ design, rtol=1e-9, atol=1e-9)
    at_once = sfu.unlearn(head, FEATURES[:F], targets[:F], curvature=fixed).head
    torch.testing.assert_close(after.parameters_CE, at_once.parameters_CE, rtol=1e-10, atol=1e-11)


def test_what_counts_classes_leaves_rows_with_targets_out():
    kept = Kept(shares_C=torch.tensor([0.5, 0.25, 0.25]).double())
    head = multi_label_head(kept=kept)
    request = ForgetRequest(head, FEATURES[:F], MULTI_HOT[:F])
    finding = examine(request, shares_C=kept.shares_C)["classes"]
    assert (finding.value, finding.p, finding.alarm) == (None, None, False)
    assert finding.reason == "the forget rows have targets and no class numbers that can be counted"
    assert request.unlearned_head(head.parameters_CE).kept.shares_C is None
    numbered = ForgetRequest(head, FEATURES[:F], REAL[:F].argmax(1))
    assert numbered.unlearned_head(head.parameters_CE).kept.shares_C is not None


# Forms of a request, and refusals


def test_every_form_of_targets_gives_the_same_head():
    head = multi_label_head()
    features, targets = FEATURES[:F], MULTI_HOT[:F]
    wanted = sfu.unlearn(head, features, targets, curvature=CLOSED | {"on_doubt": "apply"}).head.parameters_CE
    rows = TensorDataset(features, targets)
    for form in (
        (features.numpy(), targets.numpy().astype(np.float32)), (features.tolist(), targets.bool().tolist()),
        (rows,), (DataLoader(rows, batch_size=32),), ([*rows],),
    ):  # fmt: skip
        found = sfu.unlearn(head, *form, curvature=CLOSED | {"on_doubt": "apply"})
        assert torch.equal(found.head.parameters_CE, wanted)
    one = replace(head, parameters_CE=head.parameters_CE[:1], gradient_CE=head.gradient_CE[:1])
    wanted = sfu.unlearn(one, features, targets[:, 0], curvature=CLOSED | {"on_doubt": "apply"}).head.parameters_CE
    for rows in (TensorDataset(features, targets[:, 0]), TensorDataset(features, targets[:, :1].float())):
        for form in (rows, DataLoader(rows, batch_size=32)):
            found = sfu.unlearn(one, form, curvature=CLOSED | {"on_doubt": "apply"})
            assert torch.equal(found.head.parameters_CE, wanted)


def test_views_folds_batches_and_weights_go_with_targets():
    head, weights = multi_label_head(weight=1000.0), torch.linspace(0.5, 1.5, F).double()
    views = torch.stack([FEATURES[:F] + 0.1, FEATURES[:F] - 0.1])
    partners = torch.arange(F).roll(1).repeat(2, 1)
    request = ForgetRequest(head, FEATURES[:F], MULTI_HOT[:F], weights_F=weights, views_VFD=views, partners_VF=partners)
    part = request.rows(torch.tensor([3, 2]))
    assert torch.equal(part.labels_F, MULTI_HOT[[3, 2]].double())
    assert part.partners_VF.tolist() == [[1, 1], [1, 1]]
    curvature = curvature_settings(**CLOSED, on_doubt="apply")
    result = Newton(curvature).unlearn(request, MethodContext())
    assert result.applied
    assert 0 < result.details["weight_views"] < 1
    whole = sfu.unlearn(
        head, FEATURES[:F], MULTI_HOT[:F], weights=weights, batches=3, curvature=CLOSED | {"on_doubt": "apply"}
    )
    assert (whole.applied, whole.head.forgotten.rows, whole.head.n_train) == (True, F, N - F)


def test_a_known_curvature_in_batches_is_one_at_once():
    layer = by_scikit_learn(Ridge(alpha=2.0), FEATURES, REAL[:, 0])
    head = sfu.LinearHead.from_module(layer, l2=2.0 / N, n_train=N, loss="quadratic")
    request, retained = ForgetRequest(head, FEATURES[:F], REAL[:F, 0]), RetainedSet(FEATURES[F:], REAL[F:, 0])
    batched, at_once = (Newton(EXACT, batches=n).unlearn(request, MethodContext(), retained).head for n in (3, 1))
    torch.testing.assert_close(batched.parameters_CE, at_once.parameters_CE, rtol=1e-9, atol=1e-10)


def test_l2_of_a_head_of_one_output_is_read_off_its_rows():
    layer = by_torch(torch.nn.BCEWithLogitsLoss(), 2e-2, FEATURES, ONE[:, None])
    head = sfu.LinearHead.from_module(layer, l2="estimate", n_train=N, loss="logistic", trained="optimum")
    result = sfu.unlearn(head, FEATURES[:400], ONE[:400], curvature=CLOSED)
    low, high = result.details["l2_interval"]
    assert low < 2e-2 < high
    wrong = sfu.LinearHead.from_module(layer, l2=0.2, n_train=N, loss="logistic")
    with pytest.raises(ConfigError, match=r"l2=0\.2 contradicts the rows to forget"):
        sfu.unlearn(wrong, FEATURES[:400], ONE[:400], curvature=CLOSED)


@pytest.mark.parametrize(
    ("loss", "targets", "l2"),
    [
        (torch.nn.BCEWithLogitsLoss(), ONE[:, None], 2e-3),
        (torch.nn.BCEWithLogitsLoss(), MULTI_HOT, 3 * 2e-3),
        (torch.nn.MSELoss(), REAL, 3 * 2e-3 / 2),
        (torch.nn.MSELoss(), REAL[:, :1], 2e-3 / 2),
    ],
    ids=["one logit", "multi-label", "regression", "one number"],
)
def test_a_training_record_knows_that_the_losses_of_pytorch_divide_by_rows_and_outputs(loss, targets, l2):
    layer = by_torch(loss, 2e-3, FEATURES, targets)
    groups = [{"params": [layer.weight], "weight_decay": 2e-3}, {"params": [layer.bias], "weight_decay": 0.0}]
    record = sfu.TrainingRecord(n_train=N, loss=loss, optimizer=torch.optim.SGD(groups, lr=0.1), trained="optimum")
    head = record.head(layer)
    assert head.l2 == pytest.approx(l2, rel=1e-12)
    larger = replace(head, n_train=2 * N)
    assert float(ForgetRequest(larger, FEATURES, targets).forget_gradient().norm()) < 1e-7


def test_the_two_classes_of_one_output_have_names():
    layer = by_torch(torch.nn.BCEWithLogitsLoss(), 2e-3, FEATURES, ONE[:, None])
    record = sfu.TrainingRecord(n_train=N, loss="logistic", l2=2e-3, classes=["no", "yes"])
    names = np.array(["no", "yes"])[ONE[:F].numpy()]
    one, other = (
        sfu.unlearn(record.head(layer), FEATURES[:F], labels, curvature=CLOSED).head for labels in (names, ONE[:F])
    )
    assert one.forgotten.rows == F
    assert torch.equal(one.parameters_CE, other.parameters_CE)
    with pytest.raises(ConfigError, match=r"are 1 names, but the head has 2 classes\. Give one for each"):
        replace(record, classes=["yes"]).head(layer)


def test_requests_and_heads_that_cannot_have_targets():
    head, rows = multi_label_head(), (FEATURES[:F], MULTI_HOT[:F])
    with pytest.raises(
        ConfigError, match=r"is for a class, but its rows have targets .* Give request='selected', which"
    ):
        sfu.unlearn(head, *rows, request="class")
    with pytest.raises(ConfigError, match="is for a class, but its rows have targets"):
        ForgetRequest(head, *rows, classes=(1,))
    weighted = multi_label_head(loss=make_loss("logistic", class_weights=[1, 1, 2]), weight=1000.0)
    with pytest.raises(ConfigError, match=r"class_weights=.* these rows have targets"):
        sfu.unlearn(weighted, *rows)
    assert sfu.unlearn(weighted, FEATURES[:F], torch.eye(3)[REAL[:F].argmax(1)]).method  # they are class numbers
    with pytest.raises(ConfigError, match=r"one output cannot have loss=softmax, .* always 0\. Give loss='logistic'"):
        sfu.LinearHead.from_module(torch.nn.Linear(D, 1), l2=0.1, n_train=N, loss="softmax")
    with pytest.raises(DataError, match=r"retained targets hold 2"):
        Newton(EXACT).unlearn(ForgetRequest(head, *rows), MethodContext(), RetainedSet(FEATURES[F:], 2 * MULTI_HOT[F:]))
    with pytest.raises(DataError, match=r"the sample weights must be 150 finite numbers"):
        sfu.unlearn(replace(head, weight=1000.0), *rows, weights=torch.ones(F, 3))
