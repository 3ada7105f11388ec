"""The l2 that forget rows show: its interval, what contradicts a stated one, and what unlearn does with it."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch

import sfu
from sfu.curvature.effective_l2 import EffectiveL2, effective_l2
from sfu.curvature.statement import check_l2
from sfu.errors import ConfigError, DataError
from sfu.heads.recipe import Recipe
from sfu.heads.settings import AdamSettings, LinearSettings, SgdSettings, Training
from sfu.heads.train import train_like
from sfu.losses.base import make_loss
from sfu.request import ForgetRequest
from sfu.unlearning.methods.newton import Newton
from tests.conftest import make_arrays
from tests.unlearning.cases import CONTEXT, RETAINED_CURVATURE

L2, N, CLASSES = 1e-2, 1200, 4
CLOSED = {"estimator": "closed_form"}
LOSSES = {
    "quadratic": make_loss("quadratic", target_scale=2.0, other_target=-0.5),
    "logistic": make_loss("logistic"),
    "softmax": make_loss("softmax", label_smoothing=0.1, class_weights=(1.0, 2.0, 1.0, 0.5)),
    "huber_hinge": make_loss("huber_hinge"),
    "squared_hinge": make_loss("squared_hinge"),
}
TRAINED = {
    "sgd": {"training": Training.sgd, "sgd": SgdSettings(epochs=10, milestones=[8])},
    "adam": {"training": Training.adam, "adam": AdamSettings(max_epochs=10)},
}


@cache
def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that are not separable, in random order."""
    arrays = make_arrays(N, n_features=8)
    features, labels = (torch.from_numpy(arrays[f"train_{name}"]) for name in ("features", "labels"))
    wrong = torch.randperm(N, generator=torch.Generator().manual_seed(12345))[: N // 10]
    labels = labels.clone()
    labels[wrong] = (labels[wrong] + 1) % CLASSES
    return features.double(), labels


@cache
def trained(loss: str, how: str = "exact", penalize_bias: bool = False) -> sfu.LinearHead:
    features, labels = rows()
    config = LinearSettings(l2=L2, bias=True, **TRAINED.get(how, {}))
    blank = sfu.LinearHead.untrained(config, LOSSES[loss], 8, CLASSES, None)
    blank = replace(blank, recipe=Recipe(penalize_bias))
    return train_like(blank, features, labels, config, seed=0)


def request_of(head: sfu.Head, index: torch.Tensor, **changes: object) -> ForgetRequest:
    features, labels = rows()
    return ForgetRequest(head, features[index], labels[index], **changes)


def of_all(head: sfu.Head) -> float:
    """kappa of all training rows."""
    endless = replace(head, n_train=10 * N, weight=None if head.weight is None else 10 * head.weight)
    return effective_l2(request_of(endless, torch.arange(N))).value


def random_set(count: int, seed: int) -> torch.Tensor:
    return torch.randperm(N, generator=torch.Generator().manual_seed(seed))[:count]


def layer_of(head: sfu.LinearHead) -> torch.nn.Linear:
    layer = torch.nn.Linear(8, CLASSES, dtype=torch.float64)
    head.copy_to(layer)
    return layer


@pytest.mark.parametrize("penalize_bias", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_all_rows_of_a_head_at_its_optimum_show_its_l2(loss, penalize_bias):
    assert of_all(trained(loss, penalize_bias=penalize_bias)) == pytest.approx(L2, rel=1e-4)


@pytest.mark.parametrize(
    ("loss", "how"), [*((loss, "exact") for loss in LOSSES), ("softmax", "sgd"), ("softmax", "adam")]
)
def test_the_interval_has_the_coverage_that_it_claims(loss, how):
    head, draws = trained(loss, how), 300
    truth, covered = of_all(head), 0
    for seed in range(draws):
        low, high = effective_l2(request_of(head, random_set(60 + seed, seed))).interval
        covered += low <= truth <= high
    assert 0.85 * draws <= covered <= 0.95 * draws


def test_what_all_classes_share_is_no_weight_under_cross_entropy():
    head = trained("softmax")
    moved = replace(head, parameters_CE=head.parameters_CE + torch.linspace(-3, 3, 9, dtype=torch.float64))
    torch.testing.assert_close(of_all(moved), of_all(head))


def test_sample_weights_count():
    """Whole weights are copies of rows."""
    features, labels = rows()
    head, times = trained("logistic"), torch.arange(50) % 3 + 1
    weighted = ForgetRequest(replace(head, weight=5e9), features[:50], labels[:50], times)
    copied = ForgetRequest(
        replace(head, weight=None), features[:50].repeat_interleave(times, 0), labels[:50].repeat_interleave(times)
    )
    assert effective_l2(weighted).value == pytest.approx(effective_l2(copied).value, rel=1e-12)
    assert effective_l2(weighted).error > effective_l2(copied).error  # copies are no further rows


def test_the_further_off_an_l2_the_more_it_is_contradicted():
    """Values are skewed, which must not hide gross errors; the message counts plain standard errors."""
    found = EffectiveL2(1e-2, 1e-3, (0.0, 0.0), -6e-10)
    counted = [found.deviations(expected) for expected in torch.linspace(-0.1, 0.1, 50).tolist()]
    assert all(later < earlier for earlier, later in pairwise(counted))
    head = trained("softmax")
    with pytest.raises(ConfigError, match="standard errors away") as raised:
        check_l2(request_of(replace(head, l2=10 * L2), random_set(800, 0)))
    shown = effective_l2(request_of(head, random_set(800, 0)))
    told = float(re.search(r"(\S+) standard errors away", str(raised.value))[1])
    assert told == pytest.approx((10 * L2 - shown.value) / shown.error, rel=0.02)


def test_few_rows_show_no_l2():
    head, sets = trained("quadratic"), (random_set(19, seed) for seed in range(200))
    index = next(one for one in sets if effective_l2(request_of(head, one)).interval[0] > 0)
    features, labels = (part[index] for part in rows())
    with pytest.raises(DataError, match=r"19 rows do not show that it is above 0: .* They are fewer than 20"):
        sfu.unlearn(replace(head, recipe=Recipe(estimate_l2=True)), features, labels, curvature=CLOSED)


@pytest.mark.parametrize("loss", ["quadratic", "softmax"])
def test_a_right_l2_is_almost_never_contradicted(loss):
    head, raised = trained(loss), 0
    for seed in range(1000):
        try:
            check_l2(request_of(head, random_set(100, seed)))
        except (ConfigError, DataError):
            raised += 1
    assert raised <= 10


def test_a_wrong_l2_is_an_error_with_both_numbers():
    head = trained("softmax")
    for wrong in (L2 / 10, 10 * L2, 0.0):
        with pytest.raises(ConfigError, match=rf"^l2={wrong:.3g} contradicts .* as if l2 were 0\.0[01]\d+ \(0\.0"):
            check_l2(request_of(replace(head, l2=wrong), random_set(800, 0)))
    features, labels = (part[random_set(300, 0)] for part in rows())
    with pytest.raises(ConfigError, match='Give l2="estimate"'):
        sfu.unlearn(replace(head, l2=10 * L2), features, labels, curvature=CLOSED)
    check_l2(request_of(replace(head, l2=1.1 * L2), torch.arange(N - 1)))  # sure, but too small to matter
    check_l2(request_of(replace(head, l2=10 * L2), random_set(300, 0), kind="person"))
    check_l2(request_of(replace(head, l2=10 * L2), random_set(99, 0)))
    served = request_of(head, random_set(300, 1)).unlearned_head(head.parameters_CE)
    check_l2(request_of(replace(served, l2=10 * L2), random_set(300, 0)))  # it is near an optimum only
    forced = sfu.unlearn(replace(head, l2=10 * L2), features, labels, curvature={**CLOSED, "on_doubt": "apply"})
    assert forced.applied


def test_rows_that_are_not_as_in_training_are_refused():
    features, labels = rows()
    head, index = trained("logistic"), random_set(300, 0)
    shifted, larger = (features[index], (labels[index] + 1) % CLASSES), (1.6 * features[index], labels[index])
    assert effective_l2(ForgetRequest(head, *larger)).value < 0
    with pytest.raises(DataError, match=r"smaller weights .*the l2 that is stated, .* multiplied by 0\.64"):
        check_l2(ForgetRequest(head, *larger))
    with pytest.raises(DataError, match="do not show that it is above 0"):
        sfu.unlearn(replace(head, recipe=Recipe(estimate_l2=True)), *shifted, curvature=CLOSED)


def test_a_stored_gradient_explains_what_the_rows_show():
    head = trained("softmax", "adam")
    assert of_all(head) != pytest.approx(L2, rel=0.5)
    check_l2(request_of(head, random_set(1000, 0)))
    with pytest.raises(ConfigError, match="contradicts"):
        check_l2(request_of(replace(head, gradient_CE=torch.zeros_like(head.gradient_CE)), random_set(1000, 0)))


def test_rows_that_are_no_random_sample_contradict_nothing():
    """The hardest rows say what they like of l2; what kappa leaves of their gradient gives them away."""
    features, labels = rows()
    head = trained("softmax")
    losses = head.loss.values(head.logits(features), labels).sum(1)
    hardest = request_of(head, losses.argsort(descending=True)[:200])
    assert effective_l2(hardest).deviations(L2) < -3
    check_l2(hardest)


def test_unlearn_estimates_an_l2_that_is_not_known(tmp_path):
    features, labels = rows()
    known, index = trained("softmax"), random_set(300, 0)
    about = {"n_train": N, "loss": known.loss, "weight": known.total_weight}
    given = sfu.LinearHead.from_module(layer_of(known), l2="estimate", **about)
    given.save(tmp_path / "head")
    loaded = sfu.load_head(tmp_path / "head").to(torch.device("cpu"), torch.float32)
    found = effective_l2(request_of(given, index))
    for head in (given, loaded):
        assert "l2=estimate" in repr(head)
        with pytest.raises(ConfigError, match="l2 is to be estimated"):
            head.objective()
        result = sfu.unlearn(head, features[index], labels[index], curvature=CLOSED)
        assert result.applied
        assert result.details["l2"] == pytest.approx(found.value, rel=1e-5)
        assert result.details["l2_interval"] == pytest.approx(found.interval, rel=1e-5)
        assert result.note.startswith(f"l2 = {found.value:.3g} ({found.interval[0]:.3g} to {found.interval[1]:.3g})")
        assert result.head.l2 == result.details["l2"]
        assert not result.head.recipe.estimate_l2
    stated = sfu.LinearHead.from_module(layer_of(known), l2=found.value, trained="early_stopped", **about)
    wanted = sfu.unlearn(stated, features[index], labels[index], curvature=CLOSED)
    result = sfu.unlearn(given, features[index], labels[index], curvature=CLOSED)
    assert torch.equal(result.head.parameters_CE, wanted.head.parameters_CE)
    noisy = sfu.unlearn(given, features[index], labels[index], curvature=CLOSED, noise_sigma=1e3)
    assert not noisy.applied
    assert noisy.head.recipe.estimate_l2  # for the next request
    assert noisy.details["l2"] == found.value


def test_only_a_random_sample_shows_an_l2():
    features, labels = rows()
    head = replace(trained("quadratic"), recipe=Recipe(estimate_l2=True))
    index = random_set(300, 0)
    with pytest.raises(DataError, match=r"the request is of kind person\. Give l2 as a number"):
        sfu.unlearn(head, features[index], labels[index], request="person", curvature=CLOSED)
    with pytest.raises(DataError, match="do not show that it is above 0"):
        sfu.unlearn(head, features[:2], labels[:2], curvature=CLOSED)
    with pytest.raises(DataError, match="cannot be read off a single row"):
        sfu.unlearn(head, features[:1], labels[:1], curvature=CLOSED)
    easiest = head.loss.values(head.logits(features), labels).sum(1).argsort()[:200]
    with pytest.raises(DataError, match=r"only a random sample .*, and the gradient of the forget rows deviates"):
        sfu.unlearn(head, features[easiest], labels[easiest], curvature=CLOSED)
    forced = sfu.unlearn(head, features[easiest], labels[easiest], curvature={**CLOSED, "on_doubt": "apply"})
    assert forced.applied
    with pytest.raises(DataError, match="a head whose weights are all 0"):
        sfu.unlearn(replace(head, parameters_CE=0 * head.parameters_CE), features[index], labels[index])
    with pytest.raises(ConfigError, match="gradient_CE is the gradient of an objective with its l2"):
        sfu.LinearHead.from_module(
            layer_of(head), l2="estimate", n_train=N, loss="quadratic", gradient_CE=head.gradient_CE
        )


@pytest.mark.parametrize("penalize_bias", [False, True])
@pytest.mark.parametrize("l2_reduction", ["mean", "sum"])
def test_the_exact_step_leads_to_the_head_that_is_retrained_so(tmp_path, l2_reduction, penalize_bias):
    features, labels = rows()
    n_forget = 300
    design = torch.cat([features, torch.ones(N, 1, dtype=torch.float64)], 1)
    ridge = torch.ones(9, dtype=torch.float64)
    ridge[-1] = float(penalize_bias)

    def fit(start: int) -> torch.Tensor:
        part, hot = design[start:], torch.nn.functional.one_hot(labels[start:], CLASSES).double()
        l2 = L2 * (N / len(part) if l2_reduction == "sum" else 1)
        return torch.linalg.solve(part.T @ part / len(part) + l2 * ridge.diag(), part.T @ hot / len(part)).T

    layer = torch.nn.Linear(8, CLASSES, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(fit(0)[:, :8])
        layer.bias.copy_(fit(0)[:, 8])
    stated = L2 * N if l2_reduction == "sum" else L2
    made = sfu.LinearHead.from_module(
        layer, l2=stated, n_train=N, loss="quadratic", penalize_bias=penalize_bias, l2_reduction=l2_reduction
    )
    assert made.l2 == pytest.approx(L2)
    made.save(tmp_path / "head")
    for head in (made, sfu.load_head(tmp_path / "head")):
        request = request_of(head, torch.arange(n_forget))
        retained = sfu.RetainedSet(features[n_forget:], labels[n_forget:])
        unlearned = Newton(RETAINED_CURVATURE).unlearn(request, CONTEXT, retained).head
        torch.testing.assert_close(unlearned.parameters_CE, fit(n_forget), rtol=1e-8, atol=1e-10)
        assert unlearned.l2 == pytest.approx(L2 * (N / (N - n_forget) if l2_reduction == "sum" else 1))
    result = sfu.unlearn(made, features[:n_forget], labels[:n_forget], curvature=CLOSED)
    assert result.head.l2 == unlearned.l2
    result.head.copy_to(layer)
    left, before = ((one - fit(n_forget)).norm() for one in (result.head.parameters_CE, fit(0)))
    assert left < 0.6 * before


def test_a_safe_step_is_no_longer_for_a_head_that_was_stopped_early():
    features, labels = 0.05 * rows()[0], rows()[1]
    blank = sfu.LinearHead.untrained(LinearSettings(l2=L2), LOSSES["quadratic"], 8, CLASSES, None)
    converged = train_like(blank, features, labels, LinearSettings(l2=L2), seed=0)
    about = {"features": features[:300], "labels": labels[:300], "request": "selected", "curvature": CLOSED}
    whole, same = (
        sfu.unlearn(replace(converged, recipe=Recipe(trained=trained)), **about)
        for trained in ("optimum", "early_stopped")
    )
    assert whole.details["solver"] == "bound"
    assert whole.details["step_scale"] > 1
    torch.testing.assert_close(whole.head.parameters_CE, same.head.parameters_CE, rtol=1e-9, atol=1e-12)


def test_a_head_whose_l2_is_unknown_is_taken_to_have_been_stopped_early():
    about = {"n_train": 9, "loss": "softmax"}
    for given, found in (
        ({"l2": "estimate"}, "early_stopped"), ({"l2": "estimate", "trained": "optimum"}, "optimum"),
        ({"l2": 0.1}, "optimum"), ({"l2": 0.1, "trained": "early_stopped"}, "early_stopped"),
    ):  # fmt: skip
        assert sfu.LinearHead.from_module(torch.nn.Linear(3, 2), **about, **given).recipe.trained == found


def test_how_a_head_was_trained_is_checked():
    with pytest.raises(ConfigError, match=r"penalize_bias='no'\. Give True or False"):
        Recipe(penalize_bias="no")
    for key in ("l2_reduction", "trained"):
        with pytest.raises(ConfigError, match=f"{key}='so' is unknown"):
            sfu.LinearHead.from_module(torch.nn.Linear(3, 2), l2=1.0, n_train=9, loss="softmax", **{key: "so"})


@pytest.mark.parametrize("in_the_span", [False, True])
def test_a_head_that_was_stopped_early_gets_no_stretched_step_and_no_prediction(tmp_path, in_the_span):
    features, labels = rows()
    count = 40 if in_the_span else 300
    wide = torch.nn.functional.pad(features, (0, 100 if in_the_span else 0))
    converged = sfu.LinearHead.untrained(LinearSettings(l2=L2), LOSSES["quadratic"], wide.shape[1], CLASSES, None)
    converged = train_like(converged, wide, labels, LinearSettings(l2=L2), seed=0)
    stopped = replace(converged, recipe=Recipe(trained="early_stopped"))
    stopped.save(tmp_path / "head")
    about = {"features": wide[:count], "labels": labels[:count], "curvature": CLOSED}
    whole, cut = sfu.unlearn(converged, **about), sfu.unlearn(sfu.load_head(tmp_path / "head"), **about)
    scale = whole.details["step_scale"]
    assert ("reduced_features" in whole.details) is in_the_span
    assert scale > 1.01
    assert cut.details["step_scale"] == 1
    moved, less = (one.head.parameters_CE - converged.parameters_CE for one in (whole, cut))
    torch.testing.assert_close(less, moved / scale)
    assert whole.predicted_distance_gain > 0
    assert cut.predicted_distance_gain is None
    assert "no gain is predicted, because the head may have been stopped" in cut.note
