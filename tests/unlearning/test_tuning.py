"""The three rules: the same tries for all, the criterion, the oracle's choice, and what fails."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from sfu.errors import ConfigError, DivergedError, SourceFreeError
from sfu.evaluation.measures import squared_norm
from sfu.heads.train import train_head
from sfu.operators.build import build_operator
from sfu.operators.structure import Structure
from sfu.request import Access, MethodContext, RetainedSet
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.methods.baselines import GradientStep
from sfu.unlearning.methods.neg_grad import NegGrad
from sfu.unlearning.result import UnlearningResult
from sfu.unlearning.rows import make_methods
from sfu.unlearning.settings import Tune
from sfu.unlearning.tuning import ORACLE, Oracle, SourceFree, nearest, predicted_distance_gain, settings_of
from tests.unlearning.cases import CONFIG, CONTEXT, case, class_case, rows, run_config

LRS = [0.01, 0.1, 1.0, 10.0]
STEPS = [({"lr": lr}, GradientStep(lr)) for lr in LRS]
WITH_GRIDS = [
    "rescale", "gradient_step", "neg_grad", "random_labels", "jit", "adversarial", "emmn", "gkt", "unlearned_minus",
    "closed_form", "unlearned_minus_paper", "fine_tune", "neg_grad_plus", "scrub", "ssd", "fisher",
]  # fmt: skip


@dataclass(frozen=True)
class Moves(UnlearningMethod):
    """Adds a number, or fails."""

    by: Any = 0.0
    error: type[Exception] | None = None

    def unlearn(self, request, context, retained=None):
        if self.error is not None:
            raise self.error("it failed")
        return UnlearningResult(request.unlearned_head(request.head.parameters_CE + self.by))


def random_case(n_forget: int = 100):
    """A random sample, as the criterion takes the forget set for."""
    features, labels = rows()
    request, _ = case()
    order = torch.randperm(400, generator=torch.Generator().manual_seed(5))
    gone, kept = order[:n_forget], order[n_forget:]
    return (
        replace(request, features_FD=features[gone], labels_F=labels[gone]),
        RetainedSet(features[kept], labels[kept]),
    )


def distance_of(request, retained):
    """To Retrained, in the retain-Hessian norm."""
    where = {"seed": 0, "device": torch.device("cpu"), "dtype": torch.float64}
    retrained = train_head(retained.features_RD, retained.labels_R, 4, CONFIG, request.head.loss, **where)
    kept = request.head.rows(retained.features_RD, retained.labels_R)
    hessian = build_operator(request.head.objective(), kept, request.head.parameters_CE, Structure.products)
    return lambda head: squared_norm(head.parameters_CE - retrained.parameters_CE, hessian)


def test_every_method_with_a_grid_tries_as_many_settings_ours_included():
    for rule, kind in ((Tune.source_free, SourceFree), (Tune.oracle, Oracle)):
        made = make_methods(run_config(methods=WITH_GRIDS, tune=rule))
        assert all(type(method) is kind for method in made.values())
        assert {len(method.candidates) for method in made.values()} == {9}
    plain = make_methods(run_config(methods=WITH_GRIDS))
    assert not any(isinstance(method, SourceFree | Oracle) for method in plain.values())
    assert {method.tuning for method in plain.values()} == {None}
    untuned = ["original", "retrained", "unlearned_plus", "sisa", "delta_grad"]  # nothing to tune
    assert {m.tuning for m in make_methods(run_config(methods=untuned, tune=Tune.oracle)).values()} == {None}


def test_a_tuned_row_shows_what_the_method_shows():
    made = make_methods(run_config(methods=["emmn", "scrub", "neg_grad"], tune=Tune.oracle))
    assert [method.access for method in made.values()] == [Access.FORGET, Access.RETAINED, Access.FORGET]
    assert [method.whole_classes for method in made.values()] == [True, False, False]
    assert {method.tuning for method in made.values()} == {ORACLE}
    ours = make_methods(run_config(methods=["closed_form"], tune=Tune.oracle))["closed_form"].candidates
    assert [method.curvature.rho for _, method in ours] == [10.0**k for k in range(-6, 3)]


def test_the_predicted_distance_gain_is_the_true_one_when_the_held_out_rows_are_the_retained():
    """For the quadratic loss, with the retained rows in the place of the held-out ones, it is exact."""
    request, retained = random_case()
    truth = distance_of(request, retained)
    kept = replace(request, features_FD=retained.features_RD, labels_F=retained.labels_R)
    moved = NegGrad(lr=0.01).unlearn(request, CONTEXT).head
    assert predicted_distance_gain(request, kept, moved) == pytest.approx(truth(request.head) - truth(moved), rel=1e-6)
    assert predicted_distance_gain(request, kept, request.head) == 0.0


def test_source_free_takes_the_largest_gain_and_forgets_the_whole_set():
    request, _ = random_case()
    out = SourceFree(STEPS, GradientStep()).unlearn(request, CONTEXT)
    order = torch.randperm(100, generator=CONTEXT.generator("folds"))
    small, held_out = request.rows(order[20:]), request.rows(order[:20])
    gains = [predicted_distance_gain(small, held_out, method.unlearn(small, CONTEXT).head) for _, method in STEPS]
    best = LRS[gains.index(max(gains))]
    assert 0.01 < best < 10.0
    assert out.details["tuned.lr"] == best
    assert out.details["tuned.tuning_gain"] == max(gains) > 0
    assert out.details["tuned.tried"] == 4
    assert torch.equal(out.head.parameters_CE, GradientStep(best).unlearn(request, CONTEXT).head.parameters_CE)
    assert out.note is None


def test_with_the_retained_data_the_held_out_rows_stay_in_the_training_set():
    request, retained = random_case()
    sizes = []

    class Looks(Moves):
        def unlearn(self, request, context, retained=None):
            sizes.append((request.n_forget, len(retained.labels_R)))
            return super().unlearn(request, context, retained)

    SourceFree([({"by": 0.0}, Looks())], Looks()).unlearn(request, CONTEXT, retained)
    assert sizes == [(80, 320), (100, 300)]


def test_a_forget_set_that_is_no_sample_keeps_the_published_settings():
    few, _ = random_case(19)
    for request, why in ((few, "19 rows are too few"), (class_case()[0], "unlike a random sample")):
        out = SourceFree(STEPS, GradientStep(7.0)).unlearn(request, CONTEXT)
        assert out.details["lr"] == 7.0
        assert "settings as published: " in out.note
        assert why in out.note


def test_the_oracle_takes_the_nearest_and_only_who_knows_retrained_can_choose():
    request, retained = random_case()
    truth = distance_of(request, retained)
    out = Oracle(STEPS, GradientStep()).unlearn(request, CONTEXT)
    assert len(out.trials) == 4
    chosen = nearest(out, truth)
    distances = [truth(method.unlearn(request, CONTEXT).head) for _, method in STEPS]
    assert truth(chosen.head) == min(distances)
    assert chosen.details["tuned.lr"] == LRS[distances.index(min(distances))]
    assert chosen.trials == ()
    with pytest.raises(ConfigError, match="tune=oracle chooses by the distance to Retrained, which is not known"):
        nearest(out, lambda head: None)
    plain = GradientStep().unlearn(request, CONTEXT)
    assert nearest(plain, truth) is plain


@pytest.mark.parametrize("kind", [SourceFree, Oracle])
def test_settings_that_fail_are_out_and_all_failing_is_an_error(kind):
    request, _ = random_case()
    bad, good = ({"by": 1}, Moves(error=DivergedError)), ({"by": 0.0}, Moves())
    out = nearest(kind([bad, good, bad], Moves()).unlearn(request, CONTEXT), lambda head: 0.0)
    assert (out.details["tuned.tried"], out.details["tuned.failed"]) == (3, 2)
    with pytest.raises(DivergedError, match=r"none of 2 settings works\. The first one's error: it failed"):
        kind([bad, bad], Moves()).unlearn(request, CONTEXT)
    not_finite = ({"by": 2}, Moves(by=float("nan")))
    with pytest.raises(Exception, match=r"NaN|none of 1 settings works"):
        kind([not_finite], Moves()).unlearn(request, CONTEXT)
    with pytest.raises(SourceFreeError, match="it failed"):  # no setting may reach for the data and be passed over
        kind([good, ({"by": 3}, Moves(error=SourceFreeError))], Moves()).unlearn(request, CONTEXT)


@pytest.mark.parametrize("kind", [SourceFree, Oracle])
def test_of_settings_that_tie_the_first_is_taken(kind):
    request, _ = random_case()
    out = nearest(kind([({"by": n}, Moves()) for n in (3, 1, 2)], Moves()).unlearn(request, CONTEXT), lambda head: 1.0)
    assert out.details["tuned.by"] == 3


def test_no_setting_better_than_nothing_is_said():
    request, _ = random_case()
    out = SourceFree([({"by": by}, Moves(by)) for by in (0.5, 1.0)], Moves()).unlearn(request, CONTEXT)
    assert out.details["tuned.by"] == 0.5
    assert out.note == "no setting is predicted to be better than nothing"


def test_trials_leave_no_path_and_the_last_run_does():
    request, _ = random_case()
    out = SourceFree([({"lr": 1e-3}, NegGrad(lr=1e-3))], NegGrad()).unlearn(
        request, MethodContext(CONTEXT.seeds, keep_path=True)
    )
    assert len(out.path) == 6


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"lr": [1, 2]}, r"row 'x': its grid has 2 settings, but tune_budget=9"),
        ({"lr": 3}, r"row 'x': grid\.lr=3\. Give a list"),
        ({"lr": []}, r"grid\.lr=\[\]\. Give a list"),
    ],
)
def test_grids_that_are_unfair_or_malformed_are_refused(grid, message):
    with pytest.raises(ConfigError, match=message):
        settings_of(grid, 9, "the row 'x'")


def test_a_grid_over_a_setting_that_does_not_exist_is_refused_before_any_work():
    variants = {"mine": {"base": "gradient_step", "grid": {"speed": list(range(9))}}}
    with pytest.raises(ConfigError, match=r"speed is not a setting of method=gradient_step\. It takes lr"):
        make_methods(run_config(methods=["mine"], variants=variants, tune=Tune.oracle))
    variants = {"mine": {"base": "closed_form", "grid": {"curvature.speed": list(range(9))}}}
    with pytest.raises(ConfigError, match=r"row 'mine': curvature\.speed is not a setting of curvature=closed_form"):
        make_methods(run_config(methods=["mine"], variants=variants, tune=Tune.oracle))
