from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
import torch

from sfu.config_files import group_options
from sfu.curvature.estimators.base import CurvatureEstimator, make_estimator
from sfu.curvature.estimators.psd_fit import CLOSED_FORM, FitProblem
from sfu.curvature.observations import draw_perturbations, observe
from sfu.curvature.settings import (
    CurvatureSettings,
    GradientTerm,
    LowerBound,
    Measurement,
    OnDoubt,
    Pairs,
    Prior,
    Regularization,
    Solver,
    curvature_settings,
)
from sfu.curvature.unlabelled import read_unlabelled
from sfu.errors import ConfigError, DataError, SolverError
from sfu.heads.kept import Kept
from sfu.heads.linear import LinearHead
from sfu.operators.structure import Structure
from sfu.request import Access, ForgetRequest, MethodContext
from sfu.unlearning.methods.newton import Newton
from sfu.unlearning.methods.retrained import Retrained
from tests.unlearning.cases import CONTEXT, LOSS, distance, relative, situation


def second_moments(rows: torch.Tensor) -> torch.Tensor:
    return rows.double().T @ rows.double() / rows.shape[0]


def estimate(config: CurvatureSettings, request):
    estimator = make_estimator(config)
    return estimator.estimate(estimator.observe(request, CONTEXT), request)


def test_every_estimator_is_registered_and_has_a_config():
    assert CurvatureEstimator.names() == CurvatureSettings.names()
    assert set(CurvatureEstimator.names()) <= set(group_options("curvature"))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("per_class", [True, False])
def test_what_is_observed_is_what_the_expansion_says(bias, per_class):
    """dJ_f = g.d + 1/2 d^T H d and grad J(w + d) - grad J(w) = H d, exactly, for the quadratic loss."""
    request, _, _ = situation(bias)
    hessian = request.hessian(Structure.shared).blocks_BKK[0]
    for measurement in Measurement:
        config = curvature_settings(measurement=measurement, perturbations=5, per_class=per_class, scale=0.3)
        delta = draw_perturbations(config, *request.head.parameters_CE.shape, torch.Generator().manual_seed(0))
        observed = observe(config, request, delta, Structure.shared)
        assert observed.delta_KQS.shape == (1, 5 * (4 if per_class else 1), 12 + bias)
        curved = 0.5 * ((observed.delta_KQS[0] @ hessian) * observed.delta_KQS[0]).sum(1)
        expected = curved + observed.slope_KQ[0] if measurement is Measurement.loss else observed.delta_KQS[0] @ hessian
        torch.testing.assert_close(observed.response[0], expected, rtol=1e-9, atol=1e-11)
        both = observe(dataclasses.replace(config, pairs=Pairs.antithetic), request, delta, Structure.shared)
        even = curved if measurement is Measurement.loss else observed.delta_KQS[0] @ hessian
        torch.testing.assert_close(both.response[0], even, rtol=1e-9, atol=1e-11)


def test_observations_of_parts_merge_into_that_of_the_whole():
    request, _, _ = situation()
    for kind, more in (("psd_fit", {"perturbations": 30}), ("closed_form", {}), ("oas", {})):
        estimator = make_estimator(curvature_settings(estimator=kind, **more))
        whole = estimator.estimate(estimator.observe(request, CONTEXT), request).operator.blocks_BKK[0]
        parts = [estimator.observe(request.rows(i), CONTEXT) for i in (torch.arange(17), torch.arange(17, 60))]
        torch.testing.assert_close(
            estimator.estimate(estimator.merge(parts), request).operator.blocks_BKK[0], whole, rtol=1e-8, atol=1e-10
        )


def test_the_sign_of_the_papers_gradient_term():
    """As published the target keeps 2 g.d; with the sign of the expansion it is the quadratic form alone."""
    request, _, _ = situation()
    base = curvature_settings(measurement=Measurement.loss, perturbations=40, per_class=False)
    delta = draw_perturbations(base, 4, 12, torch.Generator().manual_seed(0))
    observed = observe(base, request, delta, Structure.shared)
    hessian = request.hessian(Structure.shared).blocks_BKK[0]
    quadratic = 0.5 * ((observed.delta_KQS[0] @ hessian) * observed.delta_KQS[0]).sum(1)
    odd = {GradientTerm.paper: 2.0, GradientTerm.exact: 0.0, GradientTerm.none: 1.0}
    for term, times in odd.items():
        problem = FitProblem(dataclasses.replace(base, gradient_term=term), observed, request, 0)
        torch.testing.assert_close(problem.targets(), quadratic + times * observed.slope_KQ[0], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("measurement", list(Measurement))
@pytest.mark.parametrize("prior", list(Prior))
@pytest.mark.parametrize("bound", list(LowerBound))
def test_the_estimate_respects_its_bound(measurement, prior, bound):
    request, _, _ = situation(bias=True)
    config = curvature_settings(
        measurement=measurement, perturbations=9, per_class=False, prior=prior, lower_bound=bound
    )
    result = estimate(config, request)
    least = {
        LowerBound.zero: torch.zeros(13, 13).double(),
        LowerBound.l2: torch.diag(1e-3 * request.head.regularized_E),
        LowerBound.forget_share: request.hessian(Structure.shared).blocks_BKK[0] * 60 / 400,
    }[bound]
    assert float(torch.linalg.eigvalsh(result.operator.blocks_BKK[0] - least)[0]) > -1e-9
    assert result.details["fit_status"] == "converged"


def test_the_diagonal_prior_is_the_measured_diagonal():
    """By its moments: the mean of ``d (H d)`` over that of ``d^2``, and of ``t (d^2 - v)`` over ``v^2``."""
    request, _, _ = situation()
    hessian = request.hessian(Structure.shared).blocks_BKK[0]
    for measurement in Measurement:
        config = curvature_settings(
            measurement=measurement, perturbations=50, per_class=False, prior=Prior.diagonal, solver=Solver.dual_newton
        )
        observed = make_estimator(config).observe(request, CONTEXT)
        delta = observed.delta_KQS[0]
        square = delta.square()
        if measurement is Measurement.gradient:
            expected = (delta * (delta @ hessian)).mean(0) / square.mean(0)
        else:
            half = 0.5 * ((delta @ hessian) * delta).sum(1, keepdim=True)
            expected = (half * (square - square.mean())).mean(0) / square.mean() ** 2
        problem = FitProblem(config, observed, request, 0)
        torch.testing.assert_close(problem.measured_diagonal(), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("measurement", list(Measurement))
@pytest.mark.parametrize("response", [1.0, -1.0])
def test_the_identity_prior_is_the_mean_curvature_and_at_least_l2(measurement, response):
    """The mean of ``d H d`` over that of ``d d``; noise can make it negative, and H never is."""
    request, _, _ = situation()
    config = curvature_settings(measurement=measurement, perturbations=20, per_class=False)
    observed = make_estimator(config).observe(request, CONTEXT)
    changed = {"response": response * observed.response, "slope_KQ": response * observed.slope_KQ}
    observed = dataclasses.replace(observed, **changed)
    delta, hessian = observed.delta_KQS[0], request.hessian(Structure.shared).blocks_BKK[0]
    mean = float(((delta @ hessian) * delta).sum() / delta.square().sum())
    expected = mean if response > 0 else request.head.l2
    assert FitProblem(config, observed, request, 0).prior() == pytest.approx(expected, rel=1e-9)


def test_cvxpylayers_gives_the_same_estimate():
    pytest.importorskip("cvxpylayers")  # not for Python 3.14
    request, _, _ = situation()
    ours = curvature_settings(measurement=Measurement.loss, perturbations=30, per_class=False, prior_strength=1e-2)
    theirs = dataclasses.replace(ours, solver=Solver.cvxpylayers)
    first, second = estimate(ours, request).operator.blocks_BKK[0], estimate(theirs, request).operator.blocks_BKK[0]
    assert relative(first - second, first) < 1e-4
    hasty = dataclasses.replace(theirs, max_iterations=1)
    assert relative(estimate(hasty, request).operator.blocks_BKK[0] - second, second) > 1e-2


def test_cvxpylayers_that_is_not_installed_is_named_with_its_python(monkeypatch):
    monkeypatch.setitem(sys.modules, "cvxpylayers.torch", None)
    config = curvature_settings(measurement="loss", perturbations=30, per_class=False, solver="cvxpylayers")
    with pytest.raises(ConfigError, match=r"curvature\.solver=cvxpylayers needs the package .* Python 3\.13 and older"):
        estimate(config, situation()[0])


UNFINISHED = curvature_settings(
    measurement=Measurement.loss, perturbations=60, per_class=False, gradient_term=GradientTerm.paper, scale=1e-2,
    max_iterations=1, tolerance=1e-14,
)  # fmt: skip


def test_a_fit_that_does_not_converge_is_said_and_one_that_fails_is_an_error():
    request, _, _ = situation()
    config = dataclasses.replace(UNFINISHED, regularization=Regularization.mean_eigenvalue, folds=0)
    result = Newton(config).unlearn(request, CONTEXT)
    assert result.details["fit_status"] == "max_iterations"
    assert "the fit did not converge" in result.note
    with pytest.raises(SolverError, match="rescale the perturbations"):  # products of such losses overflow
        Newton(dataclasses.replace(config, scale=1e90)).unlearn(request, CONTEXT)


def test_fits_to_folds_that_do_not_converge_reach_the_reader():
    request, _, _ = situation()
    result = Newton(dataclasses.replace(UNFINISHED, on_doubt=OnDoubt.apply)).unlearn(request, CONTEXT)
    assert "5 of the fits to 5 folds did not converge, so the choice may be off" in result.note
    assert "the fit did not converge" in result.note


@pytest.mark.parametrize("kind", ["ledoit_wolf", "oas"])
def test_shrinkage_is_scikit_learns(kind):
    from sklearn import covariance

    request, _, _ = situation()
    rows = request.features_FD.double().numpy()
    expected = getattr(covariance, kind)(rows, assume_centered=True)
    result = estimate(curvature_settings(estimator=kind), request)
    np.testing.assert_allclose(
        result.operator.blocks_BKK[0].numpy(), expected[0] + 1e-3 * np.eye(12), rtol=1e-12, atol=1e-14
    )
    assert result.details["shrinkage"] == pytest.approx(expected[1])
    with_bias = estimate(curvature_settings(estimator=kind), situation(bias=True)[0]).operator.blocks_BKK[0].numpy()
    centred = getattr(covariance, kind)(rows)[0]
    mean = rows.mean(0)
    np.testing.assert_allclose(
        with_bias[:12, :12], centred + np.outer(mean, mean) + 1e-3 * np.eye(12), rtol=1e-9, atol=1e-12
    )
    np.testing.assert_allclose(with_bias[12], [*mean, 1.0], rtol=1e-12)


STORED = curvature_settings(estimator="stored", regularization=Regularization.none)


@pytest.mark.parametrize("bias", [False, True])
def test_stored_curvature_gives_retrained_exactly(bias, tmp_path):
    request, retained, config = situation(bias)
    features = torch.cat([request.features_FD, retained.features_RD])
    second = second_moments(torch.cat([features, torch.ones(400, 1)], 1) if bias else features)
    head = dataclasses.replace(request.head, kept=Kept(data_hessian=second))
    head.save(tmp_path / "head")
    from sfu.heads.files import load_head

    loaded = load_head(tmp_path / "head")
    request = type(request)(loaded, request.features_FD, request.labels_F)
    method = Newton(STORED)
    assert method.access is Access.STORED
    result = method.unlearn(request, CONTEXT).head
    retrained = Retrained(config).unlearn(request, CONTEXT, retained).head
    assert relative(result.parameters_CE - retrained.parameters_CE, retrained.parameters_CE) < 1e-8
    with pytest.raises(ConfigError, match=r"head\.keep=full"):
        method.unlearn(request.without_summary(), CONTEXT)


def test_training_stores_the_curvature_when_asked():
    from sfu.heads.settings import Keep, LinearSettings, Training
    from sfu.heads.train import train_head
    from tests.conftest import make_arrays

    arrays = make_arrays()
    features, labels = torch.from_numpy(arrays["train_features"]), torch.from_numpy(arrays["train_labels"])
    for training in Training:
        config = LinearSettings(training=training, keep=Keep.full)
        config.adam.max_epochs = 2
        head = train_head(features, labels, 4, config, LOSS, seed=0, device=torch.device("cpu"), dtype=torch.float64)
        torch.testing.assert_close(
            head.kept.data_hessian, features.double().T @ features.double() / 400, rtol=1e-9, atol=1e-11
        )


def unlabelled(tmp_path, *sets: np.ndarray, **settings) -> CurvatureSettings:
    """Settings whose unlabelled rows come from a file for each set."""
    files = [tmp_path / f"rows_{n}.npz" for n in range(len(sets))]
    for file, rows in zip(files, sets, strict=True):
        np.savez(file, features=rows)
    return curvature_settings(**{"estimator": "closed_form", **settings}, unlabelled=[str(file) for file in files])


def test_unlabelled_rows_like_the_training_data_help_and_unlike_ones_are_ignored(tmp_path):
    """Without a shift, the forget rows are what the sources are scored by."""
    left = {"alone": [], "alike": [], "unlike": [], "both": []}
    weights = {"alike": [], "unlike": []}
    for seed in range(8):
        request, retained, config = situation(n_forget=30, seed=seed)
        alike = retained.features_RD.numpy()[:200]
        unlike = np.random.default_rng(seed).normal(size=(200, 12)).astype(np.float32) * np.geomspace(0.1, 30, 12)
        for name, sets in (("alone", []), ("alike", [alike]), ("unlike", [unlike]), ("both", [alike, unlike])):
            given = unlabelled(tmp_path, *sets) if sets else curvature_settings(estimator="closed_form")
            result = Newton(given).unlearn(request, CONTEXT)
            left[name].append(distance(result.head, request, retained, config))
            if name in weights:
                weights[name].append(1 - result.details["weight_forget"])
    mean = {name: float(np.mean(values)) for name, values in left.items()}
    assert mean["alike"] < 0.8 * mean["alone"]
    assert mean["both"] < 0.8 * mean["alone"]  # a foreign set takes no trust from the other
    assert mean["unlike"] < 1.02 * mean["alone"]
    assert np.mean(weights["alike"]) > 0.5 > np.mean(weights["unlike"])


def test_files_of_unlabelled_rows_are_read_and_normalised_like_the_dataset(tmp_path):
    request, retained, _ = situation(n_forget=30)
    rows = retained.features_RD.numpy()[:300]
    np.savez(tmp_path / "split.npz", train_features=rows, test_features=rows[:200])
    np.savez(tmp_path / "both.npz", features=rows[:30], test_features=rows)
    files = [str(tmp_path / name) for name in ("split.npz", "both.npz")]
    first, second = read_unlabelled(files, 12)
    np.testing.assert_array_equal(first.numpy(), rows[:200])
    np.testing.assert_array_equal(second.numpy(), rows[:30])
    (unit,) = read_unlabelled(files[:1], 12, normalize_rows=True)
    norms = np.linalg.norm(rows[:200], axis=1, keepdims=True)
    np.testing.assert_allclose(unit.numpy(), rows[:200] / norms, rtol=1e-6)
    given, as_they_are = (
        Newton(curvature_settings(estimator="closed_form", unlabelled=files[0])).unlearn(request, context)
        for context in (MethodContext(CONTEXT.seeds, normalize_rows=True), CONTEXT)
    )
    alone = Newton(curvature_settings(estimator="closed_form"))
    by_hand = alone.unlearn(dataclasses.replace(request, unlabelled=(unit,)), CONTEXT)
    assert torch.equal(given.head.parameters_CE, by_hand.head.parameters_CE)
    assert not torch.equal(given.head.parameters_CE, as_they_are.head.parameters_CE)


def test_files_of_unlabelled_rows_that_cannot_work(tmp_path):
    request, _, _ = situation()
    for named, message in ((3, r"unlabelled=3 names no files"), ([""], r"unlabelled=\[''\] names no files")):
        with pytest.raises(ConfigError, match=message):
            curvature_settings(unlabelled=named)
    for files in ("nowhere.npz", ["nowhere.npz"]):
        with pytest.raises(DataError, match=r"curvature\.unlabelled=nowhere\.npz does not exist"):
            Newton(curvature_settings(unlabelled=files))
    for rows, message in (
        (np.zeros((5, 3), np.float32), r"rows_0\.npz: features is 3 wide but the head takes 12"),
        (np.full((5, 12), np.nan, np.float32), "NaN or infinite"),
        (np.zeros((0, 12), np.float32), r"rows_0\.npz"),
    ):
        with pytest.raises(DataError, match=message):
            Newton(unlabelled(tmp_path, rows)).unlearn(request, CONTEXT)
    np.savez(tmp_path / "other.npz", rows=np.zeros((5, 12), np.float32))
    with pytest.raises(DataError, match=r"no 'features', but .*\. Save the rows \[rows, 12\] under that name"):
        Newton(curvature_settings(unlabelled=str(tmp_path / "other.npz"))).unlearn(request, CONTEXT)


def test_a_forget_hessian_of_rank_one_still_gives_a_step():
    request, _, _ = situation(n_forget=30)
    scales = torch.linspace(0.5, 1.5, 30)[:, None]
    one = type(request)(request.head, request.features_FD[:1] * scales, request.labels_F)
    assert int(torch.linalg.matrix_rank(second_moments(one.features_FD))) == 1
    for kind in ("closed_form", "psd_fit", "oas"):
        result = Newton(curvature_settings(estimator=kind, on_doubt="apply")).unlearn(one, CONTEXT)
        assert result.applied
        assert torch.isfinite(result.head.parameters_CE).all()


def test_copies_of_one_row_are_not_taken_for_a_sample():
    """There is nothing to hold out, so the step is the one that can do no harm."""
    request, _, _ = situation(n_forget=30)
    copies = type(request)(request.head, request.features_FD[:1].repeat(30, 1), request.labels_F[:1].repeat(30))
    for kind in ("closed_form", "psd_fit"):
        result = Newton(curvature_settings(estimator=kind)).unlearn(copies, CONTEXT)
        assert "no random sample of the training data" in result.note
        assert result.details["solver"] == "bound"
        assert result.predicted_distance_gain is None
        largest = request.head.kept.bound * 400 / 370 / 2 + request.head.l2
        step = 30 / 370 * copies.newton_gradient() / largest
        torch.testing.assert_close(result.head.parameters_CE, request.head.parameters_CE + step, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", sorted({*CurvatureSettings.names()} - {"exact", "hutchinson"}))
def test_a_float32_head_gets_the_float64_step(kind):
    request, _, _ = situation()
    head = dataclasses.replace(request.head, kept=Kept(data_hessian=second_moments(request.features_FD)))
    request = type(request)(head, request.features_FD, request.labels_F)
    single = type(request)(head.to(torch.device("cpu"), torch.float32), request.features_FD, request.labels_F)
    config = curvature_settings(estimator=kind, **({"perturbations": 60} if kind in ("psd_fit", "diagonal") else {}))
    double, rounded = (Newton(config).unlearn(r, CONTEXT).head.parameters_CE for r in (request, single))
    assert rounded.dtype == torch.float32
    assert relative(rounded.double() - double, double) < 1e-4


def test_with_few_rows_unlabelled_data_speak_for_themselves(tmp_path):
    left = {"alone": [], "given": []}
    for seed in range(10):
        request, retained, config = situation(n_forget=3, seed=seed)
        given = Newton(unlabelled(tmp_path, retained.features_RD.numpy()[:200])).unlearn(request, CONTEXT)
        assert given.details["weight_forget"] < 0.1
        assert given.predicted_distance_gain > 0
        left["given"].append(distance(given.head, request, retained, config))
        alone = Newton(curvature_settings(estimator="closed_form")).unlearn(request, CONTEXT)
        left["alone"].append(distance(alone.head, request, retained, config))
    assert np.mean(left["given"]) < 0.6 * np.mean(left["alone"])


def test_more_gradients_than_can_tell_anything_are_not_drawn():
    request, _, _ = situation()
    few, many = (curvature_settings(perturbations=p, solver="dual_newton") for p in (6, 10_000))
    observed = [estimate(config, request) for config in (few, many)]
    assert [result.details["measurements"] for result in observed] == [24, 24]  # 2 E, four classes at a time
    assert torch.equal(observed[0].operator.blocks_BKK[0], observed[1].operator.blocks_BKK[0])
    closed = [estimate(curvature_settings(perturbations=p), request) for p in (None, 6, 5)]
    assert [result.details["fit_status"] for result in closed] == [CLOSED_FORM, CLOSED_FORM, "converged"]
    weak, strong = (curvature_settings(prior_strength=mu) for mu in (1e-6, 1e-5))
    assert "fits" not in estimate(weak, request).details
    assert "fits" in estimate(strong, request).details
    loss = curvature_settings(measurement=Measurement.loss, perturbations=77, per_class=False)
    assert estimate(loss, request).details["measurements"] == 77


def test_perturbations_that_would_not_fit_in_memory_are_refused():
    config = curvature_settings(measurement=Measurement.loss, perturbations=10**11)
    with pytest.raises(ConfigError, match=r"perturbations=100000000000 need \d+ GiB"):
        draw_perturbations(config, 10, 512, torch.Generator())


@pytest.mark.parametrize("name", CurvatureEstimator.names())
def test_every_estimator_returns_a_symmetric_positive_operator(name):
    """Whoever registered it: products that are symmetric, and at least ``l2`` along every direction."""
    request, retained, _ = situation(n_forget=100)
    head = dataclasses.replace(request.head, kept=Kept(data_hessian=second_moments(request.features_FD)))
    request = dataclasses.replace(request, head=head)
    estimator = make_estimator(curvature_settings(estimator=name))
    given = retained if estimator.access is Access.RETAINED else None
    observation = estimator.observe(request, CONTEXT, given)
    operator = estimator.estimate(estimator.merge([observation]), request).operator
    drawn = torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, other = (operator.matmul(vector) for vector in drawn)
    assert float((drawn[1] * one).sum()) == pytest.approx(float((drawn[0] * other).sum()), rel=1e-9)
    assert float((drawn[0] * one).sum()) >= request.head.l2 * float(drawn[0].square().sum()) * (1 - 1e-9)


def test_with_further_sources_the_structure_is_not_chosen_for_the_forget_rows_alone():
    """Products of one source share a subspace between the folds, which those of several do not."""
    zeros, rows = torch.zeros(10, 1024), torch.rand(50, 1024, generator=torch.Generator().manual_seed(0))
    request = ForgetRequest(LinearHead(zeros, zeros, 1e-2, 300), rows, torch.arange(50) % 10)
    estimator = make_estimator(curvature_settings(estimator="closed_form"))
    assert estimator.plan(request).structure is Structure.products
    for more in ({"unlabelled": (rows,)}, {"views_VFD": rows[None]}):
        assert estimator.plan(dataclasses.replace(request, **more)).structure is Structure.shared
