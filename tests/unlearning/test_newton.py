from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from sfu.curvature.sampling import sampling_ratio
from sfu.curvature.settings import LowerBound, Measurement, OnDoubt, Pairs, Prior, Regularization, curvature_settings
from sfu.errors import ConfigError, SourceFreeError
from sfu.evaluation.measures import squared_norm
from sfu.heads.kept import Kept
from sfu.heads.recipe import EARLY_STOPPED, OPTIMUM, Recipe, Reference
from sfu.heads.settings import LinearSettings, Training
from sfu.heads.train import train_head, train_like
from sfu.losses.base import Layout, make_loss
from sfu.operators.build import build_operator
from sfu.operators.structure import Structure
from sfu.request import Access, ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.methods.newton import Newton
from sfu.unlearning.methods.retrained import Retrained
from tests.conftest import make_arrays
from tests.unlearning.cases import (
    CONTEXT,
    FORGET_CURVATURE,
    LOSS,
    RETAINED_CURVATURE,
    distance,
    measured_gain,
    relative,
    situation,
)


@settings(max_examples=25, deadline=None)
@given(bias=st.booleans(), l2=st.sampled_from([1e-6, 1e-3, 1.0]), n_forget=st.integers(1, 350), seed=st.integers(0, 50))
def test_unlearned_plus_is_retrained(bias, l2, n_forget, seed):
    request, retained, config = situation(bias, l2, n_forget=n_forget, seed=seed)
    retrained = Retrained(config).unlearn(request, CONTEXT, retained).head
    unlearned = Newton(RETAINED_CURVATURE).unlearn(request, CONTEXT, retained).head
    assert relative(unlearned.parameters_CE - retrained.parameters_CE, retrained.parameters_CE) < 1e-8
    assert relative(request.head.parameters_CE - retrained.parameters_CE, retrained.parameters_CE) > 1e-7
    assert unlearned.n_train == 400 - n_forget


def test_retrained_again_shows_how_far_apart_two_retrained_heads_are():
    request, retained, config = situation(training=Training.adam)
    first, repeated, again = (
        Retrained(config, again).unlearn(request, CONTEXT, retained) for again in (False, False, True)
    )
    assert torch.equal(first.head.parameters_CE, repeated.head.parameters_CE)
    assert 1e-6 < relative(again.head.parameters_CE - first.head.parameters_CE, first.head.parameters_CE) < 1
    assert first.note is None
    assert "how far apart two Retrained heads are" in again.note
    with pytest.raises(ConfigError, match=r"retrained.again=true needs head.training=adam or sgd"):
        Retrained(LinearSettings(), again=True)


@pytest.mark.parametrize("bias", [False, True])
def test_an_early_stop_is_corrected_by_the_stored_gradient(bias):
    request, retained, config = situation(bias, training=Training.adam)
    assert float(request.head.gradient_CE.norm()) > 1e-3
    config.training = Training.exact
    optimum = Retrained(config).unlearn(request, CONTEXT, retained).head
    to_optimum = Newton(RETAINED_CURVATURE, reference=Reference.optimum)
    corrected = to_optimum.unlearn(request, CONTEXT, retained).head
    assert corrected.recipe.trained == OPTIMUM
    assert relative(corrected.parameters_CE - optimum.parameters_CE, optimum.parameters_CE) < 1e-8
    forgetful = dataclasses.replace(request.head, gradient_CE=torch.zeros_like(request.head.gradient_CE))
    with pytest.raises(ConfigError, match="reference=optimum needs the gradient of the training objective"):
        to_optimum.unlearn(dataclasses.replace(request, head=forgetful), CONTEXT, retained)


def test_the_same_recipe_keeps_what_training_left_undone():
    """A head at the optimum of a tilted objective, whose tilt is orthogonal to its weights: l2 stays as it is."""
    request, retained, _ = situation()
    head, own, others = request.head, request.data(), request.retained_rows(retained)
    objective, zero_CE = head.objective(), torch.zeros_like(head.parameters_CE)

    def hessian_and_right(parts):
        whole = sum(rows.weight for rows in parts)
        hessian_EE = sum(rows.weight * objective.data_hessian(rows, zero_CE, Layout.shared) for rows in parts) / whole
        right_CE = -sum(rows.weight * objective.gradient(rows, zero_CE) for rows in parts) / whole
        return hessian_EE + head.l2 * torch.eye(len(hessian_EE)).double(), right_CE

    (hessian_EE, right_CE), (of_retained_EE, retained_CE) = (
        hessian_and_right([own, others]),
        hessian_and_right([others]),
    )
    stopped_CE = head.parameters_CE + 0.1 * torch.randn(head.parameters_CE.shape, generator=torch.Generator()).double()
    stopped_CE *= (right_CE * stopped_CE).sum() / (stopped_CE @ hessian_EE * stopped_CE).sum()
    left_CE = stopped_CE @ hessian_EE - right_CE
    recipe = Recipe(trained=EARLY_STOPPED)
    stopped = dataclasses.replace(head, parameters_CE=stopped_CE, gradient_CE=left_CE, recipe=recipe)
    request = dataclasses.replace(request, head=stopped)
    result = Newton(RETAINED_CURVATURE).unlearn(request, CONTEXT, retained)
    wanted_CE = torch.linalg.solve(of_retained_EE, (retained_CE + left_CE).T).T
    assert relative(stopped_CE - wanted_CE, wanted_CE) > 1e-3
    assert relative(result.head.parameters_CE - wanted_CE, wanted_CE) < 1e-10
    assert result.details["l2"] == pytest.approx(head.l2)
    assert (result.head.l2, result.head.recipe, result.head.unfinished_CE) == (head.l2, recipe, None)
    torch.testing.assert_close(result.head.gradient_CE, left_CE, rtol=1e-12, atol=1e-14)
    assert Newton(FORGET_CURVATURE).unlearn(request, CONTEXT).predicted_distance_gain is None


def test_the_same_recipe_has_the_l2_under_which_the_tilt_is_smallest():
    request, retained, _ = situation(training=Training.adam)
    head, rows = request.head, torch.cat([request.features_FD, retained.features_RD])
    labels = torch.cat([request.labels_F, retained.labels_R])
    tilted = request.toward(Reference.same_recipe).head
    data_CE = head.gradient_CE - head.l2 * head.parameters_CE
    size = float(head.parameters_CE.square().sum())
    assert tilted.l2 == pytest.approx(-float((data_CE * head.parameters_CE).sum()) / size)
    assert tilted.l2 > 1.1 * head.l2
    assert float((tilted.unfinished_CE * head.parameters_CE).sum()) == pytest.approx(0, abs=1e-12)
    assert float(tilted.objective().gradient(head.rows(rows, labels), head.parameters_CE).norm()) < 1e-12
    whole = Newton(RETAINED_CURVATURE).unlearn(request, CONTEXT, retained).head
    left = whole.objective().gradient(whole.rows(retained.features_RD, retained.labels_R), whole.parameters_CE)
    torch.testing.assert_close(whole.gradient_CE, left, rtol=1e-8, atol=1e-10)


def test_forgetting_from_a_head_that_was_stopped_early_does_not_finish_its_training():
    pixels, labels = (torch.from_numpy(found) for found in load_digits(return_X_y=True))
    features, config, count = torch.nn.functional.normalize(pixels, dim=1), LinearSettings(training=Training.sgd), 180
    where = {"device": torch.device("cpu"), "dtype": torch.float64}
    head = train_head(features, labels, 10, config, make_loss("softmax"), seed=0, **where)
    assert head.recipe.trained == EARLY_STOPPED
    request = ForgetRequest(head, features[:count], labels[:count])
    retained = RetainedSet(features[count:], labels[count:])
    ends = {
        reference: Newton(FORGET_CURVATURE, reference=reference).unlearn(request, CONTEXT) for reference in Reference
    }
    same, optimum = (distance(ends[reference].head, request, retained, config) for reference in Reference)
    assert same < 1 < optimum
    assert ends[Reference.same_recipe].predicted_distance_gain is None


def test_forgetting_half_then_the_other_half_is_forgetting_both():
    request, retained, _ = situation(n_forget=80)
    both = Newton(RETAINED_CURVATURE).unlearn(request, CONTEXT, retained).head
    first, second = torch.arange(40), torch.arange(40, 80)
    rest = RetainedSet(
        torch.cat([retained.features_RD, request.features_FD[second]]),
        torch.cat([retained.labels_R, request.labels_F[second]]),
    )
    half = Newton(RETAINED_CURVATURE).unlearn(request.rows(first), CONTEXT, rest).head
    then = (
        Newton(RETAINED_CURVATURE)
        .unlearn(ForgetRequest(half, request.features_FD[second], request.labels_F[second]), CONTEXT, retained)
        .head
    )
    assert relative(then.parameters_CE - both.parameters_CE, both.parameters_CE) < 1e-8


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("pairs", list(Pairs))
@pytest.mark.parametrize("per_class", [True, False])
def test_gradient_measurements_that_determine_the_hessian_give_the_closed_form(bias, pairs, per_class):
    request, _, _ = situation(bias)
    fit = curvature_settings(perturbations=60, pairs=pairs, per_class=per_class, solver="dual_newton")
    closed, fitted = (Newton(c).unlearn(request, CONTEXT) for c in (FORGET_CURVATURE, fit))
    assert fitted.details["fit_status"] == "converged"
    assert relative(fitted.head.parameters_CE - closed.head.parameters_CE, closed.head.parameters_CE) < 1e-7
    assert fitted.predicted_distance_gain == pytest.approx(closed.predicted_distance_gain, rel=1e-6)


@pytest.mark.parametrize("settings_", [{"gradient_term": "exact"}, {"pairs": "antithetic", "gradient_term": "paper"}])
def test_enough_exact_loss_measurements_give_the_closed_form(settings_):
    from omegaconf import OmegaConf

    request, _, _ = situation()
    base = curvature_settings(
        measurement=Measurement.loss, perturbations=200, per_class=False, lower_bound=LowerBound.zero, prior=Prior.zero
    )
    base.prior_strength = 1e-14
    fit = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(base), settings_))
    closed, fitted = (Newton(c).unlearn(request, CONTEXT) for c in (FORGET_CURVATURE, fit))
    assert relative(fitted.head.parameters_CE - closed.head.parameters_CE, closed.head.parameters_CE) < 1e-3


def test_the_default_brings_the_head_nearer_to_retrained_and_predicts_how_much():
    left, predicted, measured = [], 0.0, 0.0
    for seed in range(12):
        request, retained, config = situation(seed=seed, n_forget=120)
        result = Newton(curvature_settings()).unlearn(request, CONTEXT)
        assert result.applied
        left.append(distance(result.head, request, retained, config))
        predicted += result.predicted_distance_gain
        measured += measured_gain(result.head, request, retained, config)
    assert sum(left) / len(left) < 0.6
    assert predicted / measured == pytest.approx(1.0, abs=0.2)


def test_the_prediction_holds_after_an_early_stop_too():
    predicted, measured, training, needed = 0.0, 0.0, 0.0, 0.0
    for seed in range(8):
        request, retained, config = situation(seed=seed, n_forget=120, training=Training.adam)
        config.training = Training.exact
        result = Newton(FORGET_CURVATURE, reference=Reference.optimum).unlearn(request, CONTEXT)
        predicted += result.predicted_distance_gain
        measured += measured_gain(result.head, request, retained, config)
        of_training, of_forgetting = (result.details[f"gain_of_{name}"] for name in ("training", "forgetting"))
        assert 0 < of_forgetting < of_training
        assert result.predicted_share is None
        assert result.head.forgotten.removed is None
        training += of_training
        features = torch.cat([request.features_FD, retained.features_RD])
        labels = torch.cat([request.labels_F, retained.labels_R])
        finished = train_like(request.head, features, labels, config, seed=0)
        whole = finished.parameters_CE - request.head.parameters_CE
        hessian = build_operator(finished.objective(), request.retained_rows(retained), whole, Structure.shared)
        needed += squared_norm(whole, hessian)
    assert predicted / measured == pytest.approx(1.0, abs=0.2)
    assert training / needed == pytest.approx(1.0, abs=0.2)


def test_a_step_predicted_to_do_harm_is_withheld_unless_forced():
    request, retained, config = situation(n_forget=13)  # 12 features: the forget Hessian is almost singular
    harmful = curvature_settings(estimator="closed_form", regularization=Regularization.none, folds=5)
    withheld = Newton(harmful, noise_sigma=1.0).unlearn(request, CONTEXT)
    assert not withheld.applied
    assert withheld.predicted_distance_gain < 0
    assert "no better than nothing" in withheld.note
    assert torch.equal(withheld.head.parameters_CE, request.head.parameters_CE)
    forced = Newton(dataclasses.replace(harmful, on_doubt=OnDoubt.apply)).unlearn(request, CONTEXT)
    assert forced.applied
    assert "curvature.on_doubt=apply" in forced.note
    assert distance(forced.head, request, retained, config) > 1


def class_request(request_seed: int = 0):
    arrays = make_arrays(n_train=4000, seed=request_seed)
    features, labels = torch.from_numpy(arrays["train_features"]), torch.from_numpy(arrays["train_labels"])
    config = LinearSettings(l2=1e-3)
    head = train_head(features, labels, 4, config, LOSS, seed=1, device=torch.device("cpu"), dtype=torch.float64)
    of_class = labels == 2
    return (
        ForgetRequest(head, features[of_class], labels[of_class]),
        RetainedSet(features[~of_class], labels[~of_class]),
        config,
    )


def test_a_forget_set_unlike_a_random_sample_is_noticed():
    """The step is as short as it must be to do no harm, and no gain is predicted."""
    request, retained, config = class_request()
    for curvature in (curvature_settings(), FORGET_CURVATURE):
        careful = Newton(curvature).unlearn(request, CONTEXT)
        assert careful.applied
        assert careful.predicted_distance_gain is None
        assert "the forget set is no random sample" in careful.note
        assert "so short that it can do" in careful.note
        assert careful.details["unseen_share"] == 1
        assert distance(careful.head, request, retained, config) < 1
        forced = Newton(dataclasses.replace(curvature, on_doubt=OnDoubt.apply)).unlearn(request, CONTEXT)
        assert forced.applied
        assert "curvature.on_doubt=apply, although the forget set is no random sample" in forced.note
        assert forced.details["unseen_share"] == 0
    assert (
        distance(Newton(RETAINED_CURVATURE).unlearn(request, CONTEXT, retained).head, request, retained, config) < 1e-6
    )


def test_without_a_bound_a_step_on_such_a_set_is_withheld():
    request, _, _ = class_request()
    unknown = dataclasses.replace(request, head=dataclasses.replace(request.head, kept=Kept()))
    withheld = Newton(FORGET_CURVATURE).unlearn(unknown, CONTEXT)
    assert not withheld.applied
    assert withheld.predicted_distance_gain is None
    assert "No bound of the training rows' curvature is known" in withheld.note
    assert "Give the head's bound" in withheld.note
    assert torch.equal(withheld.head.parameters_CE, request.head.parameters_CE)
    assert withheld.details["sampling_ratio"] > 50


@pytest.mark.slow
def test_the_sampling_ratio_is_one_for_random_samples_and_large_for_a_class():
    for training in Training:
        ratios = [
            sampling_ratio(situation(seed=seed, n_forget=n, training=training)[0])
            for seed in range(20)
            for n in (20, 300)
        ]
        assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.2)
    assert sampling_ratio(class_request()[0]) > 50
    assert sampling_ratio(situation(n_forget=1)[0]) is None


def test_the_sampling_ratio_by_autograd():
    request, _, _ = situation(bias=True, n_forget=9)
    objective, point = request.head.objective(), request.head.parameters_CE
    rows = [objective.gradient(request.rows(torch.tensor([i])).data(), point) for i in range(9)]
    stacked = torch.stack(rows).flatten(1)
    expected = float(stacked.var(0).sum()) / 9 * (1 - 9 / 400)
    assert sampling_ratio(request) == pytest.approx(float(stacked.mean(0).square().sum()) / expected, rel=1e-6)


def test_the_noise_is_counted_in_the_prediction():
    request, retained, config = situation(n_forget=120)
    sigma = 0.003
    plain, noisy = (Newton(FORGET_CURVATURE, noise_sigma=s).unlearn(request, CONTEXT) for s in (0.0, sigma))

    def noisy_head(k: int):
        return (
            Newton(FORGET_CURVATURE, noise_sigma=sigma)
            .unlearn(request, MethodContext({**CONTEXT.seeds, "noise": k}))
            .head
        )

    losses = [
        measured_gain(plain.head, request, retained, config) - measured_gain(noisy_head(k), request, retained, config)
        for k in range(40)
    ]
    assert plain.predicted_distance_gain - noisy.predicted_distance_gain == pytest.approx(sum(losses) / 40, rel=0.3)
    drowned = Newton(FORGET_CURVATURE, noise_sigma=1.0).unlearn(request, CONTEXT)
    assert not drowned.applied


@pytest.mark.parametrize("n_forget", [1, 2, 3, 5, 8, 12])
def test_very_few_rows_are_forgotten_without_settings(n_forget):
    """The fewer the rows, the more cautious the step; fewer than folds take the one that needs no curvature."""
    left = []
    for seed in range(10):
        request, retained, config = situation(n_forget=n_forget, seed=seed)
        result = Newton(curvature_settings()).unlearn(request, CONTEXT)
        left.append(distance(result.head, request, retained, config))
        assert result.applied
        assert result.predicted_distance_gain is None
        if n_forget < 5:
            assert (result.details["solver"], result.details["rho"]) == ("bound", None)
            length = n_forget / (400 - n_forget) * result.details["step_scale"]
            step = result.head.parameters_CE - request.head.parameters_CE
            torch.testing.assert_close(step, length * request.newton_gradient(), rtol=1e-9, atol=1e-12)
            bound = request.head.kept.bound * 400 / (400 - n_forget) / 2
            assert result.details["step_scale"] == pytest.approx(1 / (bound + request.head.l2))
    assert max(left) < 1


@pytest.mark.parametrize("bias", [False, True])
def test_a_step_that_nobody_predicts_is_the_same(bias):
    request, _, _ = situation(n_forget=60, bias=bias)
    method = Newton(curvature_settings())
    whole, alone = (method.unlearn(request, dataclasses.replace(CONTEXT, predict=predict)) for predict in (True, False))
    torch.testing.assert_close(alone.head.parameters_CE, whole.head.parameters_CE, rtol=1e-10, atol=1e-13)
    assert alone.predicted_distance_gain == whole.predicted_distance_gain
    assert whole.predicted_share is not None
    assert alone.predicted_share is None


def test_damping_rules():
    request, _, _ = situation()
    results = {}
    for rule in (Regularization.fixed, Regularization.mean_eigenvalue, Regularization.none):
        config = curvature_settings(estimator="closed_form", regularization=rule, rho=0.25, folds=0)
        results[rule] = Newton(config).unlearn(request, CONTEXT)
        assert results[rule].predicted_distance_gain is None
    hessian = request.hessian(Structure.shared).blocks_BKK[0]
    assert results[Regularization.fixed].details["rho"] == 0.25
    assert results[Regularization.mean_eigenvalue].details["rho"] == pytest.approx(float(hessian.trace()) / 12)
    expected = (
        request.head.parameters_CE + request.step_ratio * torch.linalg.solve(hessian, request.newton_gradient().T).T
    )
    torch.testing.assert_close(results[Regularization.none].head.parameters_CE, expected, rtol=1e-9, atol=1e-12)


def test_the_authors_notebook_bound_is_subtracted():
    request, _, _ = situation()
    config = curvature_settings(
        measurement=Measurement.gradient, perturbations=60, lower_bound=LowerBound.forget_share,
        subtract_lower_bound=True, regularization=Regularization.none, folds=0,
    )  # fmt: skip
    hessian = request.hessian(Structure.shared).blocks_BKK[0] * (1 - 60 / 400)
    step = torch.linalg.solve(hessian, request.newton_gradient().T).T * request.step_ratio
    result = Newton(config).unlearn(request, CONTEXT)
    torch.testing.assert_close(result.head.parameters_CE, request.head.parameters_CE + step, rtol=1e-6, atol=1e-9)


def test_noise_has_the_size_asked_for_and_follows_its_seed():
    request, _, _ = situation()
    forced = dataclasses.replace(FORGET_CURVATURE, on_doubt=OnDoubt.apply)  # so much noise is predicted to do harm
    plain = Newton(forced).unlearn(request, CONTEXT).head.parameters_CE
    noisy = [Newton(forced, noise_sigma=0.5).unlearn(request, CONTEXT).head.parameters_CE for _ in range(2)]
    other = (
        Newton(forced, noise_sigma=0.5)
        .unlearn(request, MethodContext({**CONTEXT.seeds, "noise": 9}))
        .head.parameters_CE
    )
    assert torch.equal(*noisy)
    assert not torch.equal(noisy[0], other)
    assert float((noisy[0] - plain).std()) == pytest.approx(0.5, rel=0.3)
    with pytest.raises(ConfigError, match=r"newton\.noise_sigma=-1"):
        Newton(FORGET_CURVATURE, noise_sigma=-1)


def test_more_folds_than_rows_are_refused():
    request, _, _ = situation(n_forget=4)
    with pytest.raises(ConfigError, match=r"curvature\.folds=5 but there are only 4 rows"):
        Newton(dataclasses.replace(FORGET_CURVATURE, folds=5)).unlearn(request, CONTEXT)


def test_exact_curvature_needs_the_retained_data():
    request, _, config = situation()
    assert Newton(RETAINED_CURVATURE).access is Access.RETAINED
    for method in (Newton(RETAINED_CURVATURE), Retrained(config)):
        with pytest.raises(SourceFreeError, match="needs the retained data"):
            method.unlearn(request, CONTEXT)


def test_same_result_on_every_device(device):
    request, _, _ = situation()
    here = ForgetRequest(request.head.to(device), request.features_FD, request.labels_F)
    results = [
        Newton(curvature_settings(perturbations=60)).unlearn(r, CONTEXT).head.parameters_CE.cpu()
        for r in (request, here)
    ]
    assert relative(results[0] - results[1], results[0]) < 1e-9


def test_unlabelled_rows_are_not_used_where_they_do_harm_to_a_head_that_was_stopped_early():
    request, retained, _ = situation(n_forget=120, training=Training.adam)
    rows = (retained.features_RD[:100],)
    method = Newton(FORGET_CURVATURE)
    alone, given = (method.unlearn(dataclasses.replace(request, unlabelled=some), CONTEXT) for some in ((), rows))
    assert torch.equal(alone.head.parameters_CE, given.head.parameters_CE)
    assert "the unlabelled rows are not used" in given.note
    assert "weight_unlabelled" not in given.details
    few = request.rows(torch.arange(10))
    for other in (
        dataclasses.replace(request, kind="selected", unlabelled=rows),
        dataclasses.replace(few, unlabelled=rows),
    ):
        used = method.unlearn(other, CONTEXT)
        assert "weight_unlabelled" in used.details
        assert "not used" not in (used.note or "")
