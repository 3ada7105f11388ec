"""Unlearning from a linearised head, each approximation against the dense p x p algebra."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy.optimize import nnls

from sfu.curvature.estimators.base import make_estimator
from sfu.curvature.estimators.diagonal_fit import DiagonalFit, fit_diagonal, groups_of
from sfu.curvature.settings import Measurement, Regularization, Subspace, curvature_settings
from sfu.curvature.subspace import make_basis, restrict
from sfu.errors import ConfigError
from sfu.losses.base import make_loss
from sfu.operators.base import DampedInverse, LinearSolution
from sfu.operators.lifted import LiftedInverse
from sfu.operators.products import ProductOperator
from sfu.operators.structure import Structure
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.methods.newton import Newton
from tests.heads.linearised.tiny import CPU, C, N, tiny_case

SEEDS = {"perturbation": 11, "folds": 5}


@pytest.fixture(scope="module")
def case():
    return tiny_case(1, batch_size=64)


@pytest.fixture(scope="module")
def deep():
    return tiny_case(2, batch_size=64)


def retained(case):
    return RetainedSet(case.features[case.keep], case.labels[case.keep])


def distance(case, head):
    """``|w - w_r|`` in the retained Hessian's norm, over that of Original, all by dense algebra."""
    w_r, w = case.optimum(case.keep), case.optimum(torch.arange(N))
    H, away = case.hessian(case.keep), head.parameters_CE[0] - w_r
    return float((away @ H @ away) / ((w - w_r) @ H @ (w - w_r))) ** 0.5


def newton_by_algebra(case, H, head, rho=0.0, scale=1.0):
    """The head after ``c (N_f / N_r) (H + rho)^-1 (g_f - N/N_f g)``."""
    w, F = head.parameters_CE, len(case.forget)
    g = case.gradient(case.forget, w) - (N / F) * case.gradient(torch.arange(N), w)
    return w[0] + scale * F / (N - F) * torch.linalg.solve(H + rho * torch.eye(len(H)).double(), g)


def newton(case, context=None, **curvature):
    estimator = curvature.pop("estimator")
    config = curvature_settings(estimator=estimator, on_doubt="apply", **curvature)
    request = case.request()
    needs = estimator in ("exact", "hutchinson")
    return Newton(config).unlearn(
        request, context or MethodContext(SEEDS), retained(case) if needs else None
    ), request.head


@pytest.mark.parametrize("which", ["case", "deep"])
def test_unlearned_plus_is_retrained(which, request):
    case = request.getfixturevalue(which)
    made, _ = newton(case, estimator="exact", regularization=Regularization.none)
    torch.testing.assert_close(made.head.parameters_CE[0], case.optimum(case.keep), rtol=1e-6, atol=1e-6)
    assert distance(case, made.head) < 1e-6
    assert made.head.n_train == len(case.keep)


def test_unlearned_plus_corrects_for_training_that_stopped_early(deep):
    early = deep.train(tolerance=0.1)
    assert float(early.gradient_CE.norm()) > 1e-3
    config = curvature_settings(estimator="exact", regularization=Regularization.none)
    made = Newton(config).unlearn(deep.request(early), MethodContext(SEEDS), retained(deep))
    torch.testing.assert_close(made.head.parameters_CE[0], deep.optimum(deep.keep), rtol=1e-6, atol=1e-6)


def test_a_step_that_was_not_solved_is_skipped(deep, monkeypatch):
    """With l2 = 0 and single-precision passes, conjugate gradients may end further off than where they began."""

    def lost(self, right_CE, rho=0.0):
        return LinearSolution(1e3 * right_CE, "conjugate_gradients", 4e2, 2000, False)

    monkeypatch.setattr(ProductOperator, "solve", lost)
    config = curvature_settings(estimator="exact", regularization=Regularization.none)
    request = deep.request()
    made = Newton(config).unlearn(request, MethodContext(SEEDS), retained(deep))
    assert not made.applied
    assert torch.equal(made.head.parameters_CE, request.head.parameters_CE)
    assert "relative residual of 4e+02, more than that of no step; raise head.l2" in made.note
    forced, _ = newton(deep, estimator="exact", regularization=Regularization.none)
    assert forced.applied
    assert "relative residual of 4e+02" in forced.note


def test_a_krylov_basis_ends_at_the_precision_of_the_passes():
    """In single precision, the remainder of later vectors is noise, and not orthogonal to the others."""
    case = tiny_case(2, batch_size=64)
    case.core = case.core.to(CPU, torch.float32)
    request = case.request(case.train(tolerance=1e-2))
    hessian, generator = request.hessian(Structure.products), torch.Generator()
    basis = make_basis(Subspace.krylov, request, hessian, case.core.n_parameters, generator, largest_double=1)
    assert 10 < basis.shape[0] < case.core.n_parameters
    torch.testing.assert_close(basis @ basis.T, torch.eye(len(basis)), rtol=0, atol=1e-5)


def test_the_closed_form_with_its_rho_and_c(case):
    made, head = newton(case, estimator="closed_form")
    assert made.details["structure"] == "products"
    wanted = newton_by_algebra(
        case, case.hessian(case.forget), head, made.details["rho"], made.details["step_scale"]
    )  # fmt: skip
    torch.testing.assert_close(made.head.parameters_CE[0], wanted, rtol=1e-5, atol=1e-7)
    assert distance(case, made.head) < 1


def test_a_fit_in_all_of_a_small_space_is_the_closed_form(case):
    request = case.request()
    estimator = make_estimator(curvature_settings(dimension=case.core.n_parameters, subspace=Subspace.random))
    found = estimator.estimate(estimator.observe(request, MethodContext(SEEDS)), request)
    some = torch.randn(1, case.core.n_parameters).double()
    assert found.details["subspace_dimension"] == case.core.n_parameters
    torch.testing.assert_close(
        found.operator.matmul(some)[0], case.hessian(case.forget) @ some[0], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("kind", list(Subspace))
def test_a_fit_in_a_subspace_is_the_hessian_there_and_the_identity_elsewhere(deep, kind):
    request, k = deep.request(), 6
    estimator = make_estimator(curvature_settings(dimension=k, subspace=kind))
    operator = estimator.estimate(estimator.observe(request, MethodContext(SEEDS)), request).operator
    Q, H, p = operator.basis_KP, deep.hessian(deep.forget), deep.core.n_parameters
    torch.testing.assert_close(Q @ Q.T, torch.eye(k).double(), rtol=0, atol=1e-10)
    X = Q @ H @ Q.T
    wanted = Q.T @ X @ Q + operator.rest * (torch.eye(p).double() - Q.T @ Q)
    some = torch.randn(3, 1, p).double()
    torch.testing.assert_close(operator.matmul(some)[:, 0], some[:, 0] @ wanted, rtol=1e-5, atol=1e-5)
    solved = torch.linalg.solve(wanted + 0.3 * torch.eye(p).double(), some[0, 0])
    torch.testing.assert_close(operator.damped().solve(some[0], 0.3)[0], solved, rtol=1e-5, atol=1e-6)
    assert operator.solve(some[0], 0.3).residual < 1e-9
    assert operator.damped().invertible
    assert not dataclasses.replace(operator, rest=0.0).damped().invertible
    assert operator.trace() == pytest.approx(float(wanted.trace()), rel=1e-6)
    places = min(p, len(deep.forget) * C) - k
    trace = request.hessian(Structure.products).trace()  # by random signs, the same ones every time
    rest = deep.l2 + max(0.0, trace - float(X.trace()) - deep.l2 * (p - k)) / places
    assert operator.rest == pytest.approx(rest, rel=1e-6)


@pytest.mark.parametrize("kind", list(Subspace))
def test_steps_of_a_subspace_are_scored_without_being_formed(deep, kind, monkeypatch):
    request = deep.request(deep.train(tolerance=1e-2))
    one, other = (request.rows(index) for index in torch.arange(24).split(15))
    estimator = make_estimator(curvature_settings(dimension=5, subspace=kind))
    inverse = estimator.estimate(estimator.observe(one, MethodContext(SEEDS)), one).operator.damped()
    right, held_out = request.newton_gradient(), other.hessian(Structure.products)
    rhos = [0.0, 1e-2, 1.0, 100.0]
    wanted = DampedInverse.scores(inverse, right, rhos, held_out, floor=0.02)
    monkeypatch.setattr(LiftedInverse, "solutions", None)
    found = inverse.scores(right, rhos, held_out, floor=0.02)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)


def test_a_subspace_that_does_not_fit_the_machine_is_refused(deep, monkeypatch):
    from sfu.curvature import subspace

    monkeypatch.setattr(subspace, "available_memory", lambda device: 1000)
    with pytest.raises(ConfigError, match=r"curvature\.dimension=6 needs about .* once for each fold"):
        newton(deep, estimator="psd_fit", dimension=6)


def test_the_step_of_a_fit_in_a_subspace(case):
    made, _ = newton(case, estimator="psd_fit", dimension=6)
    assert made.details["structure"] == "subspace"
    assert distance(case, made.head) < 1


def test_a_krylov_basis_contains_the_gradient_and_ends_where_the_space_does(case):
    request = case.request()
    hessian = request.hessian(Structure.products)
    generator = torch.Generator().manual_seed(0)
    basis = make_basis(Subspace.krylov, request, hessian, case.core.n_parameters, generator)
    assert basis.shape[0] <= case.core.n_parameters
    gradient = request.newton_gradient()[0]
    torch.testing.assert_close((basis @ gradient) @ basis, gradient)
    with pytest.raises(ConfigError, match=rf"curvature\.dimension=999 but the head has {case.core.n_parameters} "):
        make_basis(Subspace.random, request, hessian, 999, generator)


def test_a_restricted_head_is_the_head_in_its_subspace(deep):
    request = deep.request()
    basis = torch.linalg.qr(torch.randn(deep.core.n_parameters, 4).double()).Q.T
    small = restrict(request, basis)
    moved = torch.randn(1, 4).double()
    whole = request.head.parameters_CE + (moved - small.head.parameters_CE) @ basis
    torch.testing.assert_close(
        small.head.outputs(small.features_FD, moved), request.head.outputs(request.features_FD, whole)
    )
    torch.testing.assert_close(small.forget_gradient(), request.forget_gradient() @ basis.T)
    dense = basis @ deep.hessian(deep.forget) @ basis.T
    torch.testing.assert_close(small.hessian(Structure.dense).blocks_BKK[0], dense)


@pytest.mark.parametrize("measurement", list(Measurement))
def test_losses_and_gradients_can_be_measured_under_another_loss(measurement):
    case = tiny_case(1, batch_size=64)
    case.loss = make_loss("softmax")
    head = case.train(tolerance=1e-8)
    request = ForgetRequest(head, case.features[case.forget], case.labels[case.forget])
    config = curvature_settings(dimension=4, measurement=measurement, perturbations=40)
    estimator = make_estimator(config)
    found = estimator.estimate(estimator.observe(request, MethodContext(SEEDS)), request).operator
    dense = found.basis_KP @ request.hessian(Structure.products).matmul(found.basis_KP[:, None])[:, 0].T
    torch.testing.assert_close(found.inner.blocks_BKK[0], dense, rtol=0.05, atol=0.02 * float(dense.norm()))


@pytest.mark.parametrize("count", [120, 600])
def test_the_diagonal_is_the_non_negative_least_squares_solution(case, count):
    request = case.request()
    config = curvature_settings(estimator="diagonal", perturbations=count, prior_strength=1e-12)
    estimator = make_estimator(config)
    seen = estimator.observe(request, MethodContext(SEEDS))
    drawn, p = torch.Generator().manual_seed(SEEDS["perturbation"]), case.core.n_parameters
    delta = torch.stack([torch.randn(1, p, generator=drawn, dtype=torch.float64)[0] for _ in range(count)])
    target = 0.5 * torch.einsum("ip,pq,iq->i", delta, case.hessian(case.forget), delta)
    torch.testing.assert_close(seen.target_P, target, rtol=1e-7, atol=1e-7)
    found = estimator.estimate(seen, request).operator
    wanted, _ = nnls(0.5 * delta.square().numpy(), (target - case.l2 * 0.5 * delta.square().sum(1)).numpy())
    np.testing.assert_allclose(found.values_CE[0].numpy(), wanted + case.l2, rtol=1e-4, atol=1e-5)
    made, head = newton(case, estimator="diagonal", perturbations=120)
    H = torch.diag(make_values(case, head, made))
    torch.testing.assert_close(
        made.head.parameters_CE[0],
        newton_by_algebra(case, H, head, made.details["rho"], made.details["step_scale"]),
        rtol=1e-6, atol=1e-8,
    )  # fmt: skip


def make_values(case, head, made):
    estimator = make_estimator(curvature_settings(estimator="diagonal", perturbations=120))
    request = case.request(head)
    return estimator.estimate(estimator.observe(request, MethodContext(SEEDS)), request).operator.values_CE[0]


def test_enough_losses_of_a_diagonal_hessian_determine_it():
    rng = np.random.default_rng(0)
    squares, truth = rng.chisquare(1, (60, 20)) / 2, rng.uniform(0.05, 2.0, size=20)
    found, status = fit_diagonal(squares, squares @ truth, floor=0.01, strength=1e-14)
    assert status == "converged"
    np.testing.assert_allclose(found, truth, rtol=1e-9)


def test_parameters_beyond_what_can_be_held_share_a_value_by_channel(case):
    head = case.train(tolerance=1e-4)
    group, count = groups_of(head, 5, numbers=10)
    assert count == sum(tensor.shape[0] for tensor in case.core.parameters.values())
    assert group.shape == head.parameters_CE.shape
    assert len(group.unique()) == count
    shared = DiagonalFit(curvature_settings(estimator="diagonal", perturbations=20), numbers=10)
    request = case.request(head)
    found = shared.estimate(shared.observe(request, MethodContext(SEEDS)), request)
    assert found.details["groups"] == count
    assert found.details["fit_status"] == "converged"
    for index in range(count):  # one value a group
        assert len(found.operator.values_CE[group == index].unique()) == 1


def test_large_fits_of_a_diagonal_agree_with_small_ones():
    rng = np.random.default_rng(0)
    squares, truth = rng.chisquare(1, (80, 20)), np.maximum(rng.normal(size=20), 0)
    target = squares @ truth + 0.1 * rng.normal(size=80)
    exact, _ = fit_diagonal(squares, target, floor=0.01, strength=1e-8)
    found, status = fit_diagonal(squares, target, floor=0.01, strength=1e-8, active_set_groups=1)
    assert status == "converged"
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-5)
    assert exact.min() == pytest.approx(0.01)


def test_the_diagonal_by_random_signs_and_its_step(case):
    made, head = newton(case, estimator="hutchinson", regularization=Regularization.none, probes=3)
    drawn, H = torch.Generator().manual_seed(SEEDS["perturbation"]), case.hessian(case.keep)
    signs = [torch.randint(0, 2, (1, len(H)), generator=drawn, dtype=torch.int8).double()[0] * 2 - 1 for _ in range(3)]
    diagonal = (sum(v * (H @ v) for v in signs) / 3).clamp(min=case.l2)
    wanted = newton_by_algebra(case, torch.diag(diagonal), head)
    torch.testing.assert_close(made.head.parameters_CE[0], wanted, rtol=1e-6, atol=1e-8)
    assert made.details["structure"] == "diagonal"


@pytest.mark.parametrize("estimator", ["ledoit_wolf", "oas"])
def test_estimators_that_need_feature_rows_say_so(case, estimator):
    with pytest.raises(ConfigError, match=rf"{estimator} shrinks the covariance of feature rows"):
        Newton(curvature_settings(estimator=estimator, on_doubt="apply")).unlearn(case.request(), MethodContext(SEEDS))


def test_structures_with_matrices_are_refused(case):
    with pytest.raises(ConfigError, match=r"curvature\.structure=shared does not fit .*Choose one of auto, products"):
        newton(case, estimator="closed_form", structure=Structure.shared)
