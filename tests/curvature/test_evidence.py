"""What a request shows of itself: no alarm for random sets, and an alarm for each kind of set that is not random."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from scipy.special import fdtrc

from sfu.curvature.evidence import Evidence, _gradient_gram, examine
from sfu.curvature.sampling import sampling_ratio
from sfu.curvature.shifts import Moments, compare_means, moments, p_value
from sfu.errors import DataError
from sfu.heads.linear import LinearHead
from sfu.heads.projections import DIRECTIONS, projected, projected_moments
from sfu.heads.settings import LinearSettings
from sfu.heads.train import train_head
from sfu.losses.base import Loss, make_loss
from sfu.operators.build import build_operator
from sfu.operators.structure import Structure
from sfu.request import ForgetRequest
from sfu.unlearning.unlearn import unlearn
from tests.heads.linearised.tiny import tiny_case

N, D, C = 600, 10, 4
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


class Made:
    """Rows of unequal classes, a head trained on them, what such a head may keep, and rows like them."""

    def __init__(self, loss: Loss | None = None, bias: bool = True, width: int = D, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.generator = generator
        self.centres_CD = torch.randn(C, width, generator=generator).double()
        self.scales_D = torch.logspace(0.3, -0.7, width).double()
        self.features, self.labels = self.draw(N)
        self.unlabelled, _ = self.draw(400)
        self.kept = {
            "mean_D": self.features.mean(0), "shares_C": self.labels.bincount(minlength=C) / N,
            "projected_2K": projected_moments(self.features),
        }  # fmt: skip
        where = {"seed": 0, "device": torch.device("cpu"), "dtype": torch.float64}
        config, loss = LinearSettings(l2=1e-3, bias=bias), loss or make_loss("quadratic")
        self.head = train_head(self.features, self.labels, C, config, loss, **where)

    def draw(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.multinomial(torch.tensor([0.4, 0.3, 0.2, 0.1]), count, True, generator=self.generator)
        noise = torch.randn(count, len(self.scales_D), generator=self.generator).double()
        return self.centres_CD[labels] + self.scales_D * noise, labels

    def request(self, rows: torch.Tensor, **changes: object) -> ForgetRequest:
        return ForgetRequest(self.head, self.features[rows], self.labels[rows], **changes)

    def random(self, count: int) -> torch.Tensor:
        return torch.randperm(N, generator=self.generator)[:count]

    def evidence(self, rows: torch.Tensor) -> Evidence:
        return examine(self.request(rows), [self.unlabelled], **self.kept)


@pytest.fixture(scope="module")
def made() -> Made:
    return Made()


def alarms(evidence: Evidence) -> set[str]:
    return {finding.name for finding in evidence.alarms}


# --- random sets


@pytest.mark.parametrize(("count", "width", "loss"), [(20, 60, "softmax"), (20, 3, "quadratic"), (120, D, "quadratic")])
def test_random_sets_raise_no_alarm_and_their_p_values_are_uniform(count, width, loss):
    """20 rows in 60 dimensions, too; unlabelled rows are drawn anew each time, and what is kept varies."""
    made, draws, found = Made(make_loss(loss), width=width, seed=count + 2), 40, {}
    raised = 0
    for draw in range(draws):
        kept = {name: one for name, one in made.kept.items() if name != ("mean_D", "projected_2K", None)[draw % 3]}
        evidence = examine(made.request(made.random(count)), [made.draw(200)[0]], **kept)
        raised += bool(evidence.alarms)
        for finding in evidence.findings:
            if finding.p is not None:
                found.setdefault(finding.name, []).append(finding.p)
    assert raised == 0
    assert set(found) == {"gradient", "mean", "classes", "norms", "drift"}
    for values in found.values():
        assert len(values) == draws
        assert sum(values) / draws == pytest.approx(0.5, abs=4 / math.sqrt(12 * draws))
        assert min(values) > 0.05 / draws / 5


def test_the_p_value_is_that_of_an_f_distribution_for_equal_eigenvalues():
    for dimensions in (1, 3, 40):
        for freedom in (2.0, 30.0, 1e5):
            for ratio in (0.5, 1.0, 3.0):
                equal = Moments(1.0, 1 / dimensions, 1 / dimensions**2, 1.0)
                assert p_value(ratio, equal, freedom) == pytest.approx(fdtrc(dimensions, freedom, ratio), rel=1e-3)


def test_the_p_value_for_unequal_eigenvalues_is_that_of_draws():
    values = torch.tensor([4.0, 1.0, 1.0, 0.5, 0.1]).double()
    total = values.sum()
    spread = Moments(1.0, float((values / total).square().sum()), float((values / total).pow(3).sum()), 1.0)
    drawn = torch.randn(200_000, 5, generator=torch.Generator().manual_seed(0)).double().square() @ values / total
    for ratio in (0.5, 1.5, 3.0, 5.0):
        assert p_value(ratio, spread, 1e6) == pytest.approx(float((drawn > ratio).double().mean()), rel=0.1)


def test_moments_of_few_rows_in_many_dimensions():
    """Twenty rows of 300 dimensions estimate tr Sigma^2 and tr Sigma^3 without bias, on average."""
    values = torch.logspace(0, -2, 300).double()
    generator, found = torch.Generator().manual_seed(2), []
    for _ in range(200):
        rows = torch.randn(20, 300, generator=generator).double() * values.sqrt()
        rows -= rows.mean(0)
        spread = moments(rows @ rows.T, 300)
        found.append([spread.trace, spread.second * spread.trace**2, spread.third * spread.trace**3])
    averages = torch.tensor(found).double().mean(0)
    wanted = torch.stack([values.pow(power).sum() for power in (1, 2, 3)])
    torch.testing.assert_close(averages, wanted, rtol=0.25, atol=0)
    torch.testing.assert_close(averages[:2], wanted[:2], rtol=0.03, atol=0)


def test_a_row_that_carries_most_leaves_few_degrees_of_freedom():
    rows = torch.randn(100, 40, generator=torch.Generator().manual_seed(2)).double()
    alike = moments(rows @ rows.T, 40).freedom
    assert 25 < alike <= 40
    rows[0] *= 30
    assert moments(rows @ rows.T, 40).freedom < 0.1


# --- sets that are not random


def test_a_class_half_a_class_and_sorted_labels(made):
    of_class = (made.labels == 1).nonzero()[:, 0]
    mixed = torch.cat([of_class[:30], made.random(30)]).unique()
    for rows in (of_class[:60], mixed, made.labels.argsort(stable=True)[:60]):
        assert {"mean", "classes"} <= alarms(made.evidence(rows))
    assert "gradient" not in alarms(made.evidence(mixed))  # which the other tests see
    assert "gradient" in alarms(made.evidence((made.labels == 3).nonzero()[:60, 0]))
    assert "drift" not in alarms(made.evidence(of_class[:60]))
    whole, half = made.evidence(of_class[:60]), made.evidence(mixed)
    for name in ("mean", "classes"):
        assert whole[name].effect > 1.5 * half[name].effect
    share = float(made.kept["shares_C"][1])
    random_distance = 1 - share - whole["classes"].effect
    assert 0 < random_distance < 0.15  # what random sets of 60 rows show on average is taken off


def test_the_effect_of_the_gradient_is_the_squared_shift_over_the_variance_of_a_row(made):
    rows = (made.labels == 0).nonzero()[:, 0][:80]
    request = made.request(rows)
    objective, point = made.head.objective(), made.head.parameters_CE
    stacked = torch.stack(
        [objective.gradient(request.rows(torch.tensor([i])).data(), point) for i in range(80)]
    ).flatten(1)
    expected = float(stacked.var(0).sum()) / 80 * (1 - 80 / N)
    squared_shift = float((stacked.mean(0) - made.head.gradient_CE.flatten()).square().sum()) - expected
    finding = examine(request)["gradient"]
    assert finding.effect == pytest.approx(squared_shift / float(stacked.var(0).sum()), rel=1e-9)
    assert finding.value == sampling_ratio(request)


def test_the_ratio_of_the_mean_and_the_distance_of_the_classes_are_those_of_draws_without_replacement(made):
    rows = made.random(200)
    evidence = made.evidence(rows)
    features = made.features[rows]
    expected = float(features.var(0).sum()) / 200 * (1 - 200 / N)
    squares = float((features.mean(0) - made.features.mean(0)).square().sum())
    assert evidence["mean"].value == pytest.approx(squares / expected, rel=1e-9)

    scatter = float(made.unlabelled.var(0).sum()) * (1 / 400 + 1 / N)
    apart = float((made.unlabelled.mean(0) - made.features.mean(0)).square().sum())
    by_mean = examine(made.request(rows), [made.unlabelled], mean_D=made.kept["mean_D"])
    assert by_mean["drift"].value == pytest.approx(apart / scatter, rel=1e-9)

    def distance(some: torch.Tensor) -> float:
        return float((some.bincount(minlength=C) / len(some) - made.kept["shares_C"]).abs().sum()) / 2

    of_one = (made.labels == 2).nonzero()[:, 0][:40]
    of_random = sum(distance(made.labels[made.random(40)]) for _ in range(300)) / 300
    found = made.evidence(of_one)["classes"].effect
    assert found == pytest.approx(distance(made.labels[of_one]) - of_random, abs=0.01)
    assert of_random > 0.05


def test_small_norms_and_neighbours(made):
    smallest = made.evidence(made.features.square().sum(1).argsort()[:60])
    assert "norms" in alarms(smallest)
    squares = made.features.square().sum(1).sort().values[:60].mean() / made.unlabelled.square().sum(1).mean()
    assert smallest["norms"].value == pytest.approx(float(squares))
    own = made.features.square().sum(1).sort().values[:60]
    others = made.unlabelled.square().sum(1)
    noise = (own.var() / 60 + others.var() / 400) / others.mean() ** 2  # which is taken off
    assert smallest["norms"].effect ** 2 == pytest.approx((1 - float(squares)) ** 2 - float(noise), rel=1e-9)
    neighbours = (made.features - made.features[0]).square().sum(1).argsort()[:40]
    assert "mean" in alarms(made.evidence(neighbours))
    assert "mean" in alarms(examine(made.request(neighbours), [made.unlabelled]))  # without a mean that was kept, too
    assert "norms" not in alarms(made.evidence(made.random(60)))


def test_duplicates_are_counted(made):
    distinct = made.random(40)
    evidence = made.evidence(distinct)
    assert evidence["duplicates"].value == evidence.effective_rows == 40
    assert "duplicates" not in alarms(evidence)
    copies = made.evidence(distinct[:8].repeat(5))
    assert copies["duplicates"].value == pytest.approx(8)
    assert "duplicates" in alarms(copies)
    one = made.evidence(distinct[:1].repeat(20))
    assert one["duplicates"].value == pytest.approx(1)
    assert one["mean"].value == one["gradient"].value == math.inf
    assert {"mean", "gradient", "duplicates"} <= alarms(one)
    but_one = made.evidence(torch.cat([distinct[:1].repeat(598), distinct[1:2]]))
    assert but_one["duplicates"].value == pytest.approx(1, rel=0.01)
    assert {"mean", "duplicates"} <= alarms(but_one)
    request = made.request(distinct[:8].repeat(5))
    noise = 1e-3 * torch.randn(40, D, generator=torch.Generator().manual_seed(1)).double()
    near = examine(dataclasses.replace(request, features_FD=request.features_FD + noise))
    assert near["duplicates"].value == pytest.approx(8)


def turned(made: Made, count: int, seed: int) -> torch.Tensor:
    """Rows of the same norms as the training rows, in other directions."""
    generator = torch.Generator().manual_seed(seed)
    return made.draw(count)[0] @ torch.linalg.qr(torch.randn(D, D, generator=generator).double()).Q


def test_unlabelled_rows_half_of_which_are_from_elsewhere(made):
    """Moments along random directions show them, with the mean of the features or without."""
    request = made.request(made.random(60))
    for seed in range(5):
        half = torch.cat([made.draw(200)[0], turned(made, 200, seed)])
        for left_out in ("mean_D", None):
            kept = {name: one for name, one in made.kept.items() if name != left_out}
            found, fine = (examine(request, [rows], **kept)["drift"] for rows in (half, made.draw(400)[0]))
            assert found.alarm
            assert found.at_most > 3 * fine.at_most
            assert "along random directions of the unlabelled rows" in found.reason
    one_class = made.centres_CD[3] + 0.3 * made.draw(200)[0]
    assert examine(request, [torch.cat([made.draw(200)[0], one_class])], mean_D=made.kept["mean_D"])["drift"].alarm


def test_the_drift_is_in_standard_deviations_of_the_training_rows(made):
    """A shift of one number, of all projections alike, and of a size that few rows cannot rule out."""
    rows = made.draw(400)[0]
    drift = examine(made.request(made.random(60)), [rows], projected_2K=made.kept["projected_2K"])["drift"]
    along, known = projected(rows), projected(made.features)
    units = (along - known.mean(0)) / known.std(0, correction=0)
    numbers = torch.cat([units, units.square() - 1], 1)
    expected = float(numbers.var(0).sum()) * (1 / 400 + 1 / N)
    assert drift.value == pytest.approx(float(numbers.mean(0).square().sum()) / expected, rel=1e-9)
    moved = examine(made.request(made.random(60)), [3 * rows], projected_2K=made.kept["projected_2K"])["drift"]
    assert moved.effect == pytest.approx(64 / 2, rel=0.5)  # the squares are 9 times as large, and half of the numbers
    limits = []
    for count in (20, 60, 180, 540):
        found = [examine(made.request(made.random(60)), [made.draw(count)[0]], **made.kept)["drift"] for _ in range(5)]
        limits.append(sum(one.at_most for one in found))
        assert all(one.at_most >= one.effect for one in found)
    assert all(later < earlier for earlier, later in pairwise(limits))


def test_features_that_are_constant_or_far_from_0_change_no_drift():
    made = Made()
    rows, request = made.draw(300)[0], made.request(made.random(60))
    before = examine(request, [rows], projected_2K=made.kept["projected_2K"])["drift"]
    after = examine(request, [rows + 1e4], projected_2K=projected_moments(made.features + 1e4))["drift"]
    assert (after.value, after.p) == pytest.approx((before.value, before.p), rel=1e-3)
    zeros = examine(request, [torch.zeros_like(rows)], projected_2K=torch.zeros(2, DIRECTIONS).double())["drift"]
    assert not zeros.alarm


def test_weights_that_let_few_rows_carry_everything():
    made = Made(make_loss("quadratic", class_weights=(1.0, 1.0, 1.0, 400.0)))
    rare = (made.labels == 3).nonzero()[:, 0]
    common = (made.labels != 3).nonzero()[:, 0]
    few = examine(made.request(torch.cat([rare[:3], common[:97]])))
    assert few["weights"].value == pytest.approx((1200 + 97) ** 2 / (3 * 400**2 + 97))
    assert few.effective_rows == pytest.approx(few["weights"].value)
    none = examine(made.request(common[:100]))
    assert none["weights"].value == pytest.approx(100)
    assert none["weights"].effect == pytest.approx(1 - N / made.head.total_weight)
    assert {"weights"} <= alarms(few) & alarms(none)
    assert "weights" not in alarms(Made().evidence(rare[:20]))


def test_few_retained_rows(made):
    everything = torch.arange(N)
    for left, warned in ((1, True), (15, True), (60, False)):
        finding = examine(made.request(everything[left:]))["few_retained"]
        assert finding.alarm == warned
        second = made.request(everything[left:]).design_FE
        values = torch.linalg.eigvalsh(second.T @ second / len(second))
        dimensions = float((values / (values + 1e-3)).sum())
        assert finding.value == pytest.approx(left / dimensions, rel=0.02)
    assert "a step cannot be predicted well" in examine(made.request(everything[1:]))["few_retained"].reason


@pytest.mark.parametrize("loss", ["quadratic", "softmax"])
def test_a_request_that_leaves_few_rows_is_told_of_and_does_no_harm(loss):
    """The retained rows' curvature along the step is larger by 1 + d / N_r, which an uncorrected step overshoots."""
    made = Made(make_loss(loss), bias=False)
    where = {"seed": 0, "device": torch.device("cpu"), "dtype": torch.float64}
    for left in (1, 3, 10):
        forget, keep = torch.arange(left, N), torch.arange(left)
        config = LinearSettings(l2=1e-3)
        retrained = train_head(made.features[keep], made.labels[keep], C, config, make_loss(loss), **where)
        result = unlearn(made.head, made.features[forget], made.labels[forget])
        assert "rows are retained for" in result.note

        def squared_distance(head: LinearHead, keep: torch.Tensor = keep, retrained: LinearHead = retrained) -> float:
            structure = Structure.shared if loss == "quadratic" else Structure.dense
            rows = retrained.rows(made.features[keep], made.labels[keep])
            hessian = build_operator(retrained.objective(), rows, retrained.parameters_CE, structure)
            return float(hessian.quadratic(head.parameters_CE - retrained.parameters_CE))

        assert squared_distance(result.head) < 1.01 * squared_distance(made.head)


# --- what cannot be tested, and other heads


def test_a_test_without_its_data_says_so(made):
    alone = examine(made.request(made.random(30)))
    assert [finding.name for finding in alone.findings if finding.p is not None] == ["gradient"]
    for name in ("mean", "classes", "norms", "drift"):
        assert alone[name].value is None
        assert not alone[name].alarm
        assert alone[name].reason
    assert examine(made.request(made.random(1)), [made.unlabelled], **made.kept)["gradient"].value is None
    assert examine(made.request(made.random(5)), [made.unlabelled], **made.kept)["mean"].value is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"unlabelled": [torch.ones(5, D + 1)]}, r"the unlabelled rows must be finite numbers of shape \[rows, 10\]"),
        ({"unlabelled": [torch.full((5, D), math.nan)]}, "or a value is not finite"),
        ({"shares_C": torch.ones(C + 1)}, r"the class shares must be .* \[4\], but their shape is \[5\]"),
        ({"mean_D": torch.ones(1, D)}, "the mean of the training features"),
        ({"projected_2K": torch.ones(2, D)}, "the projected moments"),
    ],
)
def test_data_that_do_not_fit_are_refused(made, given, message):
    with pytest.raises(DataError, match=message):
        examine(made.request(made.random(20)), **given)


def test_a_constant_shift_of_all_features_changes_no_test(made):
    """Norms apart: they are about the origin."""
    rows, moved = made.random(60), 1e4
    before, after = (
        compare_means([made.features[rows] + by], [(1 - 60 / N) / 60], made.kept["mean_D"] + by) for by in (0.0, moved)
    )
    assert after.ratio == pytest.approx(before.ratio, rel=1e-6)
    assert after.p == pytest.approx(before.p, rel=1e-6)


def test_two_samples_are_compared_by_both_variances():
    generator = torch.Generator().manual_seed(4)
    wide, narrow = 3 * torch.randn(12, 30, generator=generator).double(), torch.randn(900, 30, generator=generator)
    found = compare_means([wide, narrow], [1 / 12, 1 / 900])
    expected = wide.var(0).sum() / 12 + narrow.double().var(0).sum() / 900
    deviation = (wide.mean(0) - narrow.double().mean(0)).square().sum()
    assert found.ratio == pytest.approx(float(deviation / expected), rel=1e-9)


def test_inner_products_of_gradients_by_the_jacobian():
    case = tiny_case(2)
    request = case.request(case.train(tolerance=1e-3))
    gram = _gradient_gram(request)
    slopes = (
        request.head.logits(case.features)[case.forget] - 5 * torch.eye(C).double()[case.labels[case.forget]][:, :3]
    )
    rows = torch.einsum("nc,ncp->np", slopes, case.jacobian[case.forget]) / len(case.forget)
    rows -= rows.mean(0)
    torch.testing.assert_close(gram.diagonal().sort().values, rows.square().sum(1).sort().values, **CLOSE)
    torch.testing.assert_close(gram.square().sum(), (rows @ rows.T).square().sum(), **CLOSE)
    assert examine(request)["gradient"].p > 1e-3
    assert examine(request)["few_retained"].value is None


def test_a_weighted_head_is_examined_like_one_with_as_many_rows():
    """Rows of weight 2 are rows that occur twice, except that copies are no evidence."""
    made = Made()
    rows = made.random(40)
    head = dataclasses.replace(made.head, weight=2.0 * N)
    weighted = ForgetRequest(head, made.features[rows], made.labels[rows], torch.full((40,), 2.0))
    plain = examine(made.request(rows))["gradient"]
    assert isinstance(head, LinearHead)
    found = examine(weighted)["gradient"]
    assert (found.value, found.p, found.effect) == pytest.approx((plain.value, plain.p, plain.effect), rel=1e-9)
