"""How the evidence shortens a step: what it guarantees, that nothing jumps, and what unlabelled rows change."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sfu
from sfu.curvature import caution
from sfu.curvature.caution import assess
from sfu.curvature.evidence import examine
from sfu.data.settings import KINDS
from sfu.heads.settings import LinearSettings
from sfu.heads.train import train_head
from sfu.losses.base import make_loss
from sfu.request import ForgetRequest, RetainedSet
from sfu.unlearning.methods.newton import Newton
from tests.conftest import make_arrays
from tests.unlearning.cases import CONTEXT, FORGET_CURVATURE, distance, situation

SETS = ("random", "class", "largest", "smallest", "one side", "worst fitted", "large classes")


def chosen(features: torch.Tensor, labels: torch.Tensor, kind: str, count: int, seed: int) -> torch.Tensor:
    """Rows to forget that are of some kind; the rest of ``torch.arange`` is retained."""
    drawn = torch.Generator().manual_seed(seed)
    direction = torch.randn(features.shape[1], generator=drawn)
    scores = {
        "random": torch.rand(len(labels), generator=drawn),
        "class": (labels == seed % 3).float() + 0.1 * torch.rand(len(labels), generator=drawn),
        "largest": features.norm(dim=1), "smallest": -features.norm(dim=1), "one side": features @ direction,
        "worst fitted": -(features @ direction) * (labels - 1.0), "large classes": labels.float(),
    }  # fmt: skip
    return scores[kind].argsort(descending=True)[:count]


def made(kind: str, seed: int, *, loss: str = "quadratic", count: int = 40, bias=False, weighted=False, l2=1e-2):
    """A head at its optimum and rows of some kind to forget."""
    drawn = torch.Generator().manual_seed(seed)
    features = torch.randn(160, 6, generator=drawn) * torch.logspace(0.5, -0.5, 6) + 0.5 * torch.randn(
        6, generator=drawn
    )
    features *= torch.rand(160, 1, generator=drawn) + 0.5
    labels = (features[:, :3] + torch.randn(160, 3, generator=drawn)).argmax(1)
    weights = 0.2 + torch.rand(160, generator=drawn).double() if weighted else None
    config = LinearSettings(l2=l2, bias=bias, tolerance=1e-10)
    head = train_head(
        features, labels, 3, config, make_loss(loss), seed=0, device=torch.device("cpu"), dtype=torch.float64,
        weights_N=weights,
    )  # fmt: skip
    forget = chosen(features, labels, kind, count, seed)
    keep = torch.ones(160, dtype=torch.bool)
    keep[forget] = False
    parts = [None if weights is None else weights[index] for index in (forget, keep)]
    request = ForgetRequest(head, features[forget], labels[forget], weights_F=parts[0], kind="selected")
    return request, RetainedSet(features[keep], labels[keep], parts[1]), config


any_set = given(
    kind=st.sampled_from(SETS), seed=st.integers(0, 999), count=st.sampled_from([1, 3, 10, 40, 100, 140]),
    bias=st.booleans(), weighted=st.booleans(), l2=st.sampled_from([1e-4, 1e-2, 1.0]),
)  # fmt: skip


@settings(max_examples=60)
@any_set
def test_a_selected_set_never_moves_a_quadratic_head_away_from_retrained(kind, seed, count, bias, weighted, l2):
    request, retained, config = made(kind, seed, count=count, bias=bias, weighted=weighted, l2=l2)
    result = Newton(FORGET_CURVATURE).unlearn(request, CONTEXT)
    assert result.applied
    assert result.details["unseen_share"] == 1
    assert distance(result.head, request, retained, config) <= 1 + 1e-9


@settings(max_examples=40)
@given(
    kind=st.sampled_from(SETS), seed=st.integers(0, 999), count=st.sampled_from([3, 40, 140]), bias=st.booleans(),
    loss=st.sampled_from(["softmax", "logistic"]), weighted=st.booleans(),
)  # fmt: skip
def test_the_retained_objective_of_other_losses_does_not_rise(kind, seed, count, bias, loss, weighted):
    request, retained, _ = made(kind, seed, count=count, bias=bias, loss=loss, weighted=weighted)
    result = Newton(FORGET_CURVATURE).unlearn(request, CONTEXT)
    rows = request.head.rows(retained.features_RD, retained.labels_R, retained.weights_R)
    before, after = (request.head.objective().value(rows, head.parameters_CE) for head in (request.head, result.head))
    assert result.applied
    assert after <= before + 1e-9 * abs(before)
    assert not torch.equal(result.head.parameters_CE, request.head.parameters_CE)


@pytest.mark.parametrize("kind", SETS)
def test_a_declaration_never_lets_a_step_count_on_more(kind):
    for seed in range(4):
        selected, _, _ = made(kind, seed)
        found = {declared: assess(dataclasses.replace(selected, kind=declared)) for declared in KINDS}
        assert all(one.caution.share >= found["random"].caution.share for one in found.values())
        assert all(one.caution.share == 1 for declared, one in found.items() if declared != "random")
        assert len({one.caution.bound for one in found.values()}) == 1
        steps = [
            Newton(FORGET_CURVATURE).unlearn(dataclasses.replace(selected, kind=declared), CONTEXT).head.parameters_CE
            for declared in KINDS
            if declared != "random"
        ]
        assert all(torch.equal(step, steps[0]) for step in steps)


def test_few_rows_leave_everything_unseen_and_many_nothing():
    shares = [assess(situation(n_forget=count)[0]).caution.few for count in (3, 7, 15, 20, 40, 100, 300)]
    assert shares[:2] == [1, 1]
    assert all(later < earlier for earlier, later in pairwise(shares[1:]))
    assert shares[-1] < 1e-3


def distances_by(make, points, seeds: int = 8) -> np.ndarray:
    """Mean distances to Retrained over seeds, for each of the points."""
    return np.mean([
        [distance(Newton(FORGET_CURVATURE).unlearn(request, CONTEXT).head, request, retained, config)
         for request, retained, config in (make(point, seed) for point in points)]
        for seed in range(seeds)
    ], axis=0)  # fmt: skip


def test_nothing_jumps_with_the_number_of_rows():
    left = distances_by(lambda count, seed: situation(n_forget=count, seed=seed), range(12, 32, 2))
    assert np.abs(np.diff(left)).max() < 0.06
    assert left[-1] < left[0]


def with_share_of_one_class(share: float, seed: int):
    """120 of 1,200 rows, of which a share more than at random is of one class."""
    arrays = make_arrays(n_train=1200, seed=seed)
    features, labels = torch.from_numpy(arrays["train_features"]), torch.from_numpy(arrays["train_labels"])
    config = LinearSettings(l2=1e-3)
    where = {"device": torch.device("cpu"), "dtype": torch.float64}
    head = train_head(features, labels, 4, config, make_loss("quadratic"), seed=1, **where)
    order = torch.randperm(1200, generator=torch.Generator().manual_seed(seed))
    of_class, others = order[labels[order] == 2], order
    count = round(120 * share)
    forget = torch.cat([of_class[:count], others[~torch.isin(others, of_class[:count])][: 120 - count]])
    keep = torch.ones(1200, dtype=torch.bool)
    keep[forget] = False
    return ForgetRequest(head, features[forget], labels[forget]), RetainedSet(features[keep], labels[keep]), config


def test_nothing_jumps_with_a_growing_share_of_one_class():
    points = np.linspace(0, 1, 11)
    left = distances_by(with_share_of_one_class, points, seeds=4)
    assert np.abs(np.diff(left)).max() < 0.2
    assert left.max() < 1
    shares = [assess(with_share_of_one_class(point, 0)[0]).caution.share for point in points]
    assert shares[0] < 0.1
    assert shares[-1] == 1
    assert all(later >= earlier - 0.02 for earlier, later in pairwise(shares))


def unbounded(**changes) -> sfu.UnlearningResult:
    """Forget one class from a head of which nothing is known but the weights; rows are of different norms."""
    request, _, _ = with_share_of_one_class(1.0, 0)
    layer = torch.nn.Linear(12, 4, bias=False, dtype=torch.float64)
    request.head.copy_to(layer)
    bound = changes.pop("bound", None)
    head = sfu.LinearHead.from_module(
        layer, l2=1e-3, n_train=1200, loss="quadratic", **({} if bound is None else {"bound": bound})
    )
    given = {"curvature": {"estimator": "closed_form"}, **changes}
    return sfu.unlearn(head, request.features_FD, request.labels_F, **given)


def test_without_a_bound_an_alarm_withholds_the_step_and_names_a_remedy():
    withheld = unbounded()
    assert not withheld.applied
    assert "no random sample of the training data, or the loss, l2, labels or scale of the features" in withheld.note
    assert "or the loss" not in unbounded(request="class").note
    assert "Give the head's bound" in withheld.note
    assert "unlabelled rows like the training rows" in withheld.note
    rows = torch.from_numpy(make_arrays(n_train=1200)["test_features"])
    for remedy in (
        {"bound": 10.0}, {"unlabelled": rows}, {"curvature": {"estimator": "closed_form", "on_doubt": "apply"}}
    ):  # fmt: skip
        result = unbounded(**remedy)
        assert result.applied, remedy
        assert "no random sample" in result.note
    assert not unbounded(request="person").applied


@pytest.mark.parametrize("kind", ["random", "selected"])
def test_unlabelled_rows_like_the_training_rows_help_and_others_do_no_harm(kind):
    """Rows of one class, of another size or of other features altogether, against no unlabelled rows."""
    for count in (3, 60):
        left = {name: [] for name in ("none", "alike", "one class", "other", "small")}
        for seed in range(3):
            request, retained, config = situation(n_forget=count, seed=seed)
            other = np.random.default_rng(seed).normal(size=(100, 12)) * np.geomspace(0.1, 30, 12)
            rows = {
                "none": None, "alike": retained.features_RD[:100],
                "one class": retained.features_RD[retained.labels_R == 1][:100],
                "other": torch.from_numpy(other), "small": 0.1 * retained.features_RD[:100],
            }  # fmt: skip
            for name, found in rows.items():
                given = dataclasses.replace(request, kind=kind, unlabelled=() if found is None else (found,))
                result = Newton(FORGET_CURVATURE).unlearn(given, CONTEXT)
                left[name].append(distance(result.head, request, retained, config))
        mean = {name: float(np.mean(found)) for name, found in left.items()}
        assert mean["alike"] < 0.85 * mean["none"]
        for name in ("one class", "other", "small"):
            assert mean[name] < max(1.0, 1.02 * mean["none"]) + 1e-3, (name, count)


def test_unlabelled_rows_of_other_classes_are_a_source_but_score_no_random_set():
    drawn = torch.Generator().manual_seed(0)
    features = torch.randn(4000, 6, generator=drawn).double()
    labels = (features[:, :3] + torch.randn(4000, 3, generator=drawn)).argmax(1)
    head = train_head(
        features, labels, 3, LinearSettings(l2=1e-2, keep="sketch"), make_loss("quadratic"), seed=0,
        device=torch.device("cpu"), dtype=torch.float64,
    )  # fmt: skip
    more = torch.randn(2000, 6, generator=drawn).double()
    like = ForgetRequest(head, features[:200], labels[:200], unlabelled=(more,))
    shifted = dataclasses.replace(like, unlabelled=(more + 0.2,))
    assert assess(like).trust > 0.5
    assert assess(shifted).trust < 0.01


def half_foreign(rows: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    """The rows, a share of them turned: of the same norms, in other directions."""
    width, count = rows.shape[1], round(share * len(rows))
    turn = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(seed)).to(rows)).Q
    return torch.cat([rows[:count] @ turn, rows[count:]])


@pytest.mark.parametrize("share_of_one_class", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("count", [40, 400])
def test_half_foreign_rows_do_no_harm_and_rows_alike_help(share_of_one_class, count):
    for seed in range(4):
        request, retained, config = with_share_of_one_class(share_of_one_class, seed)
        rows = torch.from_numpy(make_arrays(n_train=1200, n_test=count, seed=seed)["test_features"])
        given = {"none": (), "alike": (rows,), "half": (half_foreign(rows, 0.5, seed),)}
        left = {
            name: distance(
                Newton(FORGET_CURVATURE).unlearn(dataclasses.replace(request, unlabelled=more), CONTEXT).head,
                request, retained, config,
            )
            for name, more in given.items()
        }  # fmt: skip
        assert left["half"] <= 1.02 * left["none"]
        assert left["alike"] < (0.9 if count == 400 else 1.02) * left["none"]


def test_between_trust_and_none_the_bound_takes_over_from_unlabelled_rows():
    """A set that is not random shows nothing itself, however little unlabelled rows are trusted; nothing jumps."""
    request, retained, config = with_share_of_one_class(1.0, 0)
    rows = torch.from_numpy(make_arrays(n_train=1200, n_test=1000)["test_features"])
    left, shares = [], []
    for share in np.linspace(0, 0.6, 13):
        given = dataclasses.replace(request, kind="selected", unlabelled=(half_foreign(rows, share, 0),))
        found, result = assess(given), Newton(FORGET_CURVATURE).unlearn(given, CONTEXT)
        assert found.trust in (0, pytest.approx(1))
        assert found.trust > 0 or found.caution.share == 1
        assert found.predictable == (found.caution.share < 0.5)
        assert result.applied
        shares.append(found.caution.share)
        left.append(distance(result.head, request, retained, config))
    assert any(0.01 < share < 1 for share in shares)
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(shares))
    assert max(left) < 1


def assess_with(n_unlabelled: int, share: float):
    """Assess 120 of 1,200 rows, of which a share more than at random is of one class, with other rows like all."""
    request, _, _ = with_share_of_one_class(share, 3)
    rows = torch.from_numpy(make_arrays(n_train=1200, n_test=1000, seed=3)["test_features"][:n_unlabelled])
    return assess(dataclasses.replace(request, unlabelled=(rows,)))


def test_unlabelled_rows_score_a_random_set_by_their_number_and_any_other_alone():
    trusts = [assess_with(count, 0.0).trust for count in (120, 300, 1000)]
    assert trusts == pytest.approx([120 / 240, 300 / 420, 1000 / 1120], abs=0.03)
    assert assess_with(30, 0.0).trust == 0  # so few may be from anywhere
    assert assess_with(120, 1.0).trust == pytest.approx(1, abs=1e-6)
    request, _, _ = with_share_of_one_class(0.0, 3)
    rows = torch.from_numpy(make_arrays(n_train=1200, n_test=1000, seed=3)["test_features"])
    few = dataclasses.replace(request.rows(torch.arange(5)), unlabelled=(rows,))
    assert assess(few).trust == pytest.approx(1, abs=1e-6)  # too few to show anything


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_foreign_set_takes_no_trust_from_another_and_the_note_names_it(share):
    request, retained, config = with_share_of_one_class(share, 3)
    arrays = make_arrays(n_train=1200, n_test=1000, seed=3)
    alike = torch.from_numpy(arrays["test_features"][:300])
    foreign = half_foreign(torch.from_numpy(arrays["test_features"][300:]), 1.0, 3)
    sets = {"alike": (alike,), "foreign": (foreign,), "both": (alike, foreign), "few": (alike, foreign[:5])}
    given = {name: dataclasses.replace(request, unlabelled=of_sets) for name, of_sets in sets.items()}
    found = {name: assess(one) for name, one in given.items()}
    assert found["foreign"].trust == 0 < found["alike"].trust
    for name in ("both", "few"):
        assert found[name].trust == pytest.approx(found["alike"].trust, rel=1e-6)
        assert found[name].caution.share == pytest.approx(found["alike"].caution.share, rel=1e-6)
        assert found[name].likeness == pytest.approx((1, 0), abs=1e-6)
    swapped = assess(dataclasses.replace(request, unlabelled=(foreign, alike)))
    assert (swapped.trust, *swapped.likeness) == pytest.approx((found["both"].trust, 0, 1), abs=1e-6)
    results = {name: Newton(FORGET_CURVATURE).unlearn(one, CONTEXT) for name, one in given.items()}
    assert "the unlabelled rows of set 2 deviates from the training set" in results["both"].note
    left = {name: distance(result.head, request, retained, config) for name, result in results.items()}
    assert max(left["both"], left["few"]) < 1.02 * left["alike"]


def test_many_unlabelled_rows_leave_nothing_unseen_however_far_a_set_is_from_random():
    shares = [assess_with(count, 1.0).caution.share for count in (20, 50, 1000)]
    assert shares[0] > 0.8
    assert 0.5 < shares[1] < 0.8
    assert shares[2] < 1e-3


def test_rows_that_unlabelled_rows_score_need_no_stretching():
    request, _, _ = made("smallest", 0)
    drawn = torch.Generator().manual_seed(0)
    rows = torch.randn(1000, 6, generator=drawn) * torch.logspace(0.5, -0.5, 6) + 0.5 * torch.randn(6, generator=drawn)
    light = dataclasses.replace(request.head.kept, trace=3 * request.trace, projected_2K=None)
    request = dataclasses.replace(request, head=dataclasses.replace(request.head, kept=light))
    scored = dataclasses.replace(
        request, unlabelled=(rows * (light.trace / float(rows.square().sum(1).mean())) ** 0.5,)
    )
    assert assess(request).caution.stretch > 3
    assert assess(scored).trust > 0.99
    assert assess(scored).caution.stretch < 0.5 * assess(request).caution.stretch


def test_a_shift_too_small_to_matter_leaves_nothing_unseen(monkeypatch):
    """So it is for large sets: 2 % further away for one part in 5,000 unseen, since the bound is far above the rest."""
    request, _, _ = situation(n_forget=300)
    found = examine(request)

    def with_effect(effect):
        gradient = dataclasses.replace(found["gradient"], p=1e-6, effect=effect)
        others = tuple(one for one in found.findings if one.name != "gradient")
        evidence = dataclasses.replace(found, findings=(gradient, *others))
        monkeypatch.setattr(caution, "examine", lambda *_, **__: evidence)
        return assess(request).caution.share

    assert with_effect(3e-4) == 0
    assert with_effect(1e-2) == pytest.approx(0.03, abs=2e-3)


def test_training_that_was_left_undone_is_no_reason_to_take_curvature_for_unseen():
    """A head short of its optimum has a gradient that many forget rows show, though they are a random sample."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(20_000, 6, generator=generator).double()
    labels = (features[:, :3] + torch.randn(20_000, 3, generator=generator)).argmax(1)
    where = {"seed": 0, "device": torch.device("cpu"), "dtype": torch.float64}
    head = train_head(features, labels, 3, LinearSettings(l2=1e-2), make_loss("quadratic"), **where)
    short = head.parameters_CE + 0.015 * torch.randn(3, 6, generator=generator).double()
    unseen = {}
    for trained in ("optimum", "early_stopped"):
        recipe = dataclasses.replace(head.recipe, trained=trained)
        stopped = dataclasses.replace(head, parameters_CE=short, gradient_CE=torch.zeros_like(short), recipe=recipe)
        request = ForgetRequest(stopped, features[:4000], labels[:4000])
        assert not examine(request).alarms
        unseen[trained] = assess(request).caution.share
        result = Newton(FORGET_CURVATURE).unlearn(request, CONTEXT)
        assert result.details["unseen_share"] == unseen[trained]
        of_one = labels == 0
        assert assess(ForgetRequest(stopped, features[of_one], labels[of_one])).caution.share > 0.5
    assert unseen["optimum"] > 1e-3
    assert unseen["early_stopped"] == 0
