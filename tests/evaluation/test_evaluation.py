from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import expit
from sklearn.model_selection import StratifiedKFold

from sfu.data.feature_data import make_feature_data
from sfu.data.split import ForgetSplit
from sfu.evaluation.evaluate import Evaluator
from sfu.evaluation.measures import accuracies, accuracy, agreement, mean_kl, squared_norm
from sfu.evaluation.membership import cross_entropy_per_sample, fit_attack, membership_attack
from sfu.heads.linear import LinearHead
from sfu.operators.explicit import ExplicitOperator


def test_accuracy_and_agreement_by_hand():
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0], [1.0, 2.0]])
    assert accuracy(logits, torch.tensor([0, 1, 1, 1])) == 75.0
    assert agreement(logits, -logits) == 0.0
    assert agreement(logits, logits * 3) == 100.0


def test_accuracies_of_many_points_are_those_of_each():
    drawn = torch.Generator().manual_seed(0)
    features, points = torch.randn(30, 4, generator=drawn).double(), torch.randn(5, 3, 5, generator=drawn).double()
    labels = torch.arange(30) % 3
    head = LinearHead(points[0], torch.zeros(3, 5).double(), 0.0, 30, bias=True)
    each = [accuracy(replace(head, parameters_CE=point).logits(features), labels) for point in points]
    assert accuracies(head.rows(features, labels, chunk_rows=7), points) == pytest.approx(each)
    assert len(set(each)) > 1


def test_kl_by_hand():
    reference, other = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3.0), 0.0]])
    expected = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert mean_kl(reference, other) == pytest.approx(expected, rel=1e-6)
    assert mean_kl(other, other) == 0.0


def test_squared_norm_sums_over_classes():
    difference = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    hessian = ExplicitOperator(torch.tensor([[2.0, 1.0], [1.0, 3.0]]), 2, torch.ones(2))
    assert squared_norm(difference, hessian) == pytest.approx((2 + 4 + 12) + 3)


def test_cross_entropy_by_hand():
    loss = cross_entropy_per_sample(torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([0]))
    assert float(loss) == pytest.approx(math.log(4.0))


def test_the_attack_sees_what_is_there_and_nothing_else():
    rng = np.random.default_rng(0)
    same = [torch.from_numpy(rng.exponential(size=n)) for n in (3000, 500)]
    score = membership_attack(*same, n_splits=5, seed=0)
    assert abs(score.mean - 50) < 5
    apart = membership_attack(same[0] * 0.01, same[1] + 1, n_splits=5, seed=0)
    assert (apart.mean, apart.std) == (100.0, 0.0)
    assert membership_attack(*same, n_splits=5, seed=0) == score


def test_half_the_members_far_away_gives_three_quarters():
    """Half of the forget losses lie apart, the rest look like test losses: the best threshold scores 75 %."""
    forget = torch.cat([torch.zeros(200), torch.ones(200)])
    score = membership_attack(forget, torch.ones(400), n_splits=5, seed=1)
    assert score.mean == pytest.approx(75.0, abs=0.01)


def independent_optimum(losses, member):
    """Weight and intercept of the attack's objective, in standardised losses, by nested bisection."""
    mean, spread = losses.mean(), losses.std()
    at, penalty = (losses - mean) / spread, 1 / spread**2

    def intercept(weight):
        reach = abs(weight) * np.abs(at).max() + 40
        return brentq(lambda b: (expit(weight * at + b) - member).sum(), -reach, reach, xtol=1e-14, rtol=1e-14)

    def slope(weight):  # of the objective, minimised over the intercept: it increases
        return ((expit(weight * at + intercept(weight)) - member) * at).sum() + penalty * weight

    low, high = -1.0, 1.0
    while slope(low) > 0:
        low *= 2
    while slope(high) < 0:
        high *= 2
    weight = brentq(slope, low, high, xtol=1e-14, rtol=1e-14)
    return weight, intercept(weight), mean, spread


SHAPES = {
    "alike": lambda rng, n: (rng.exponential(size=n), rng.exponential(size=n)),
    "shifted": lambda rng, n: (rng.exponential(size=n), rng.exponential(size=n) + 1),
    "separable": lambda rng, n: (rng.random(n), rng.random(n) + 1),
    "one far away": lambda rng, n: (np.append(rng.random(n - 1), 1e6), rng.random(n)),
    "heavy tails": lambda rng, n: (rng.standard_cauchy(n) ** 2, rng.standard_cauchy(n) ** 2),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_attack_is_at_its_optimum(shape):
    """The score is that of an independent optimum of the stated objective, whatever the size and the scale."""
    for n, scale, seed in itertools.product((10, 53), (1e-6, 1e-2, 1.0, 1e4), (0, 1)):
        forget, test = (scale * side for side in SHAPES[shape](np.random.default_rng(seed), n))
        losses, member = np.concatenate([forget, test]), np.repeat([1, 0], n)
        expected = []
        for others, held_out in StratifiedKFold(5, shuffle=True, random_state=seed).split(losses, member):
            weight, intercept, mean, spread = independent_optimum(losses[others], member[others])
            decision = weight * (losses[held_out] - mean) / spread + intercept
            expected.append(((decision > 0) == member[held_out]).mean())
        score = membership_attack(torch.from_numpy(forget), torch.from_numpy(test), n_splits=5, seed=seed)
        assert score.mean == pytest.approx(100 * np.mean(expected), abs=1e-9), (n, scale, seed)
        assert score.std == pytest.approx(100 * np.std(expected), abs=1e-9), (n, scale, seed)


def test_the_attack_on_losses_without_any_spread_is_a_guess():
    assert membership_attack(torch.full((50,), 0.1), torch.full((50,), 0.1), n_splits=5, seed=0).mean == 50.0


def test_an_attack_that_stops_early_is_no_attack():
    rng = np.random.default_rng(0)
    losses, member = rng.random(40) + np.repeat([0.0, 1.0], 20), np.repeat([1, 0], 20)
    assert fit_attack(losses, member, max_iter=1) is None
    assert fit_attack(losses, member).score(losses, member) > 0.9


@pytest.mark.parametrize("lost", [math.inf, math.nan, 1e200])
def test_an_attack_on_losses_that_have_no_variance_is_not_reported(lost, caplog):
    losses = torch.rand(40, dtype=torch.float64)
    losses[3] = lost
    assert membership_attack(losses, torch.rand(40), n_splits=5, seed=0).mean is None
    assert "did not converge, so this head gets no score" in caplog.text


def test_an_attack_on_too_few_is_not_reported():
    score = membership_attack(torch.rand(9), torch.rand(100), n_splits=5, seed=0)
    assert (score.mean, score.std) == (None, None)
    assert membership_attack(torch.rand(10), torch.rand(100), n_splits=5, seed=0).mean is not None


def test_the_spread_of_the_attack_is_in_per_cent():
    losses = torch.rand(100, generator=torch.Generator().manual_seed(0)).double()
    score = membership_attack(losses[:40], losses[40:], n_splits=5, seed=0)
    assert score.std > 1
    assert (score.mean * 16 / 100) == pytest.approx(round(score.mean * 16 / 100, 1))  # 16 rows a fold, five folds


def tiny():
    """Two classes in the plane; everything below is worked out by hand."""
    train = np.array([[1, 0], [0, 1], [1, 0], [0, 1], [2, 0]], dtype=np.float32)
    data = make_feature_data(
        "tiny", train, np.array([0, 1, 0, 1, 1]), np.array([[1, 0], [0, 1]], dtype=np.float32), np.array([0, 1])
    )
    split = ForgetSplit(torch.tensor([4]), torch.tensor([0, 1, 2, 3]), "indices")
    heads = [
        LinearHead(torch.tensor(p).double(), torch.zeros(2, 2).double(), 0.5, 5)
        for p in ([[0.2, 0.0], [0.4, 0.3]], [[0.5, 0.0], [0.0, 0.5]], [[0.5, 0.0], [0.0, 0.3]])
    ]
    return data, split, heads


def test_every_metric_by_hand():
    data, split, (original, retrained, unlearned) = tiny()
    metrics = Evaluator(data, split, original, retrained).evaluate(unlearned)[0]
    # retained rows (1,0) (0,1) twice each: second moments I/2, Hessian I
    nothing = 0.3**2 + 0.4**2 + 0.2**2
    assert metrics["distance"] == pytest.approx(math.sqrt(0.2**2 / nothing))
    assert metrics["measured_distance_gain"] == pytest.approx(nothing - 0.2**2)
    # gradient W (I/2) - I/2 + W/2 = W - I/2
    assert metrics["retain_gradient_norm"] == pytest.approx(0.2)
    assert (metrics["test_accuracy"], metrics["remain_accuracy"], metrics["forget_accuracy"]) == (100.0, 100.0, 0.0)
    assert (metrics["test_gap"], metrics["forget_gap"], metrics["agreement"]) == (0.0, 0.0, 100.0)
    assert metrics["mia"] is None  # one forget row is too few
    assert metrics["forget_kl"] == pytest.approx(0.0)  # both heads say (1, 0) for the row (2, 0)


def test_original_and_retrained_are_the_ends_of_the_scale():
    data, split, (original, retrained, _) = tiny()
    evaluator = Evaluator(data, split, original, retrained)
    first, last = evaluator.evaluate(original, retrained)
    assert (first["distance"], last["distance"]) == (1.0, 0.0)
    assert first["measured_distance_gain"] == 0.0
    assert first["test_accuracy"] == 50.0
    assert first["test_gap"] == -50.0
    assert last["retain_gradient_norm"] == pytest.approx(0.0, abs=1e-12)


def test_the_divergence_on_the_forget_set_is_from_retrained():
    """KL(Retrained || head), not the other way round, by hand: the forget row is (2, 0)."""
    data, split, (original, retrained, _) = tiny()
    head = replace(original, parameters_CE=torch.tensor([[0.0, 0.0], [0.5 * math.log(3.0), 0.0]]).double())
    uniform = replace(retrained, parameters_CE=torch.zeros(2, 2).double())
    found = Evaluator(data, split, original, uniform).evaluate(head)[0]["forget_kl"]
    assert found == pytest.approx(0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75), rel=1e-6)
    swapped = Evaluator(data, split, original, head).evaluate(uniform)[0]["forget_kl"]
    assert swapped == pytest.approx(0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5), rel=1e-6)
    assert found != pytest.approx(swapped, rel=0.05)


def test_gaps_are_the_heads_minus_retrained():
    drawn = torch.Generator().manual_seed(0)
    train, test = torch.randn(80, 3, generator=drawn).numpy(), torch.randn(60, 3, generator=drawn).numpy()
    data = make_feature_data("drawn", train, np.arange(80) % 2, test, np.arange(60) % 2)
    split = ForgetSplit(torch.arange(30), torch.arange(30, 80), "indices")
    original, retrained, unlearned = (
        LinearHead(torch.randn(2, 3, generator=drawn).double(), torch.zeros(2, 3).double(), 0.5, 80) for _ in range(3)
    )
    evaluator = Evaluator(data, split, original, retrained)
    own, reference = evaluator.evaluate(unlearned, retrained)
    for name, value in (
        ("test_gap", "test_accuracy"), ("remain_gap", "remain_accuracy"), ("forget_gap", "forget_accuracy"),
        ("mia_gap", "mia"),
    ):  # fmt: skip
        assert own[name] == own[value] - reference[value] != 0
    losses = [
        cross_entropy_per_sample(unlearned.logits(features), labels)
        for features, labels in (
            (data.train_features_ND[:30], data.train_labels_N[:30]), (data.test_features_TD, data.test_labels_T)
        )
    ]  # fmt: skip
    score = membership_attack(*losses, n_splits=5, seed=0)
    assert (own["mia"], own["mia_std"]) == (score.mean, score.std)
    agree = unlearned.logits(data.test_features_TD).argmax(1) == retrained.logits(data.test_features_TD).argmax(1)
    assert own["agreement"] == pytest.approx(100 * float(agree.double().mean()))
    assert own["agreement"] < 100


def test_no_distance_when_retraining_changes_nothing():
    data, split, (original, _, unlearned) = tiny()
    assert Evaluator(data, split, original, original).evaluate(unlearned)[0]["distance"] is None


def test_the_attack_uses_test_rows_of_the_forgotten_classes_only(monkeypatch):
    from sfu.evaluation import evaluate

    seen = []
    real = evaluate.membership_attack
    monkeypatch.setattr(
        evaluate, "membership_attack", lambda f, t, **k: seen.append((f.numel(), t.numel())) or real(f, t, **k)
    )
    data, split, heads = tiny()
    Evaluator(data, split, heads[0], heads[1])
    assert seen == [(1, 1)]  # the forgotten row is of class 1; one of the two test rows is
