from __future__ import annotations

from typing import Any

import pytest

from sfu.reporting.verdict import best_rows, compared, ranked, verdicts
from sfu.reporting.words import remarks
from sfu.results.aggregate import MethodResult, aggregate, table_of_run
from sfu.results.statistic import Relation, Statistic

from .samples import catastrophic_run, good_run, make_metrics, make_row, sweep_runs, without_retrained


def best_of(metrics: dict[str, Any]) -> dict[str, set[str]]:
    return best_rows(table_of_run(metrics).groups[0].rows)


def verdicts_of(metrics: dict[str, Any]) -> list[str]:
    return verdicts(table_of_run(metrics))


def test_best_is_decided_among_source_free_rows_only() -> None:
    best = best_of(good_run())
    # unlearned_plus and retrained have gap 0 everywhere and are not competitors
    assert best["test_accuracy"] == set()  # the untouched head is 0.1 away, within the margin of all
    assert best["remain_accuracy"] == set()
    assert best["forget_accuracy"] == {"closed_form", "unlearned_minus"}  # 0.0 and 0.1 away; the untouched head 1.0
    assert best["mia"] == set()  # 50.0 and 50.3 beside 50.1; the untouched head's 50.6 is within 0.5 of both
    assert best["distance"] == {"unlearned_minus"}  # 0.305 < 0.351


def test_rows_that_look_equal_tie() -> None:
    best = best_of(
        make_metrics(a=make_row(73.74, 74.4, 73.8, 50.1, 0.3051), b=make_row(73.66, 74.4, 73.8, 50.1, 0.3049))
    )
    assert best["test_accuracy"] == {"a", "b"}  # +0.04 and -0.04 are both shown as 0.0
    assert best["distance"] == {"a", "b"}


def test_no_prize_for_a_distance_of_one_or_more() -> None:
    best = best_of(make_metrics(a=make_row(73.7, 74.4, 73.8, 50.1, 1.0), b=make_row(73.0, 74.4, 73.8, 50.1, 5.0)))
    assert best["distance"] == set()
    assert best["test_accuracy"] == {"a"}


def over_seeds(**distances: list[float]) -> dict[str, MethodResult]:
    """Rows with these distances over as many seeds."""
    count = len(next(iter(distances.values())))
    runs = [
        (
            {"seed": str(seed)},
            make_metrics(**{n: make_row(73.7, 74.4, 73.8, 50.1, d[seed]) for n, d in distances.items()}),
        )
        for seed in range(count)
    ]
    return aggregate(runs).groups[0].rows


def test_stars_follow_the_spread() -> None:
    paired = [0.30, 0.40, 0.50, 0.60]  # the same seeds are hard for both
    rows = over_seeds(a=paired, b=[d + 0.02 for d in paired], c=[0.46, 0.52, 0.44, 0.50])
    assert best_rows(rows)["distance"] == {"a"}
    assert compared(rows["b"], rows["a"], "distance") is Relation.worse  # 0.02 at every seed
    assert compared(rows["c"], rows["a"], "distance") is Relation.unclear
    alike = over_seeds(a=paired, b=[d + 0.005 for d in paired])
    assert best_rows(alike)["distance"] == {"a", "b"}
    assert compared(alike["b"], alike["a"], "distance") is Relation.equal  # always worse, by less than matters


def test_a_mean_beyond_nothing_is_no_harm_unless_the_spread_says_so() -> None:
    rows = over_seeds(a=[0.9970, 1.0003, 1.0036], b=[0.8, 1.1, 1.4], c=[1.10, 1.12, 1.14], d=[0.90, 0.88, 0.86])
    assert {name for name, row in rows.items() if row.is_worse_than_nothing} == {"c"}
    assert {name for name, row in rows.items() if row.is_closer_than_nothing} == {"d"}
    assert best_rows(rows)["distance"] == {"d"}


def test_a_withheld_step_wins_nothing() -> None:
    metrics = make_metrics(
        original=make_row(73.0, 74.0, 75.8, 53.1, 1.0, "none"),
        closed_form=make_row(73.7, 74.4, 73.8, 50.1, 0.5, applied=False),
        jit=make_row(73.5, 74.2, 74.0, 51.1, 0.9),
    )
    assert all(names == {"jit"} for names in best_of(metrics).values())


def test_no_best_without_gaps() -> None:
    assert not any(best_of(without_retrained()).values())


@pytest.mark.parametrize(
    ("access", "distance", "worse"),
    [
        ("forget", 1.011, True),
        ("forget", 1.009, False),
        ("forget", 1.0 + 1e-9, False),
        ("forget", None, False),
        ("none", 1.1, False),
        ("retained", 1.1, True),
    ],
)
def test_worse_than_nothing(access: str, distance: float | None, worse: bool) -> None:
    row = MethodResult(access, None, 1, 1, [], {"distance": Statistic.of([distance])})
    assert row.is_worse_than_nothing is worse


def test_verdict_names_the_closest_row_and_how_close() -> None:
    closest = (
        "Closest to Retrained without source data: unlearned_minus, distance 0.305 (70 % of the gap closed), "
        "test accuracy 73.6 % (-0.1 points from Retrained)."
    )
    assert verdicts_of(catastrophic_run()) == [
        closest,
        "Worse than doing nothing: unlearned_minus_paper (distance 801).",
    ]
    assert verdicts_of(good_run()) == [closest]


def test_verdict_when_nothing_helped() -> None:
    said = verdicts_of(make_metrics(a=make_row(12.0, 12.0, 12.0, 50.0, 5.9), b=make_row(50.0, 12.0, 12.0, 50.0, 801.0)))
    assert said[0].startswith("No source-free method came closer to Retrained than doing nothing (distance 1).")
    assert "The nearest is a: distance 5.900" in said[0]
    assert said[1] == "Worse than doing nothing: a (distance 5.900), b (distance 801)."


def test_verdict_without_retrained_or_without_methods() -> None:
    assert verdicts_of(without_retrained()) == [
        "There is no retrained row, so gaps and distances are unknown. Add `retrained` to `methods`."
    ]
    only = make_metrics(original=make_row(73.8, 74.6, 74.8, 50.6, 1.0, "none"))
    assert verdicts_of(only) == ["No source-free method was run."]
    assert verdicts_of({"rows": {}}) == ["No source-free method was run."]
    assert verdicts_of({}) == ["No run finished."]


def test_verdict_falls_back_on_accuracy() -> None:
    metrics = make_metrics(
        retrained=make_row(73.7, 74.4, 73.8, 50.1, None, "retained"), a=make_row(73.6, 74.4, 73.8, 50.1, None)
    )
    assert verdicts_of(metrics) == [
        "Closest to Retrained in test accuracy without source data: a, test accuracy 73.6 % "
        "(-0.1 points from Retrained)."
    ]
    metrics["rows"]["a"].update(test_gap=None)
    assert verdicts_of(metrics) == ["No gap or distance to Retrained is known for the source-free methods."]


def test_the_verdict_counts_settings_and_names_ties() -> None:
    total = aggregate(sweep_runs(), spread="stderr")
    assert verdicts(total) == [
        "Closest to Retrained without source data: unlearned_minus at all 3 settings, distance 0.311 to 0.369 "
        "(63 % to 69 % of the gap closed), test accuracy 73.8 to 75.7 % (-0.1 to +0.1 points from Retrained).",
        "Worse than doing nothing: unlearned_minus_paper at all 3 settings (distance 817 to 970).",
    ]
    noisy = [({"seed": str(seed)}, good_run()) for seed in range(3)]
    for (_, run), distance in zip(noisy, (0.2, 0.35, 0.5), strict=True):
        run["rows"]["closed_form"]["distance"] = distance
    assert "unlearned_minus (not told apart: closed_form), distance 0.305" in verdicts(aggregate(noisy))[0]
    clear = [({"x": "2", "seed": str(seed)}, good_run()) for seed in range(3)]
    both = aggregate([*(({"x": "1", **overrides}, run) for overrides, run in noisy), *clear])
    assert "unlearned_minus (not told apart: closed_form at 1 of them) at both settings" in verdicts(both)[0]


def test_verdicts_that_are_not_a_success() -> None:
    withheld = good_run()
    withheld["rows"] = {
        "original": withheld["rows"]["original"],
        "closed_form": make_row(73.8, 74.6, 74.8, 50.6, 1.0, applied=False),
    }
    assert verdicts(aggregate([({}, withheld)])) == [
        "No source-free method came closer to Retrained than doing nothing (distance 1). The nearest is closed_form: "
        "distance 1.000, test accuracy 73.8 % (+0.1 points from Retrained).",
        "Step not applied, or not in full: closed_form (distance 1.000).",
    ]
    assert "There is no retrained row" in verdicts(aggregate([({}, without_retrained())]))[0]
    only = good_run()
    only["rows"] = {"original": only["rows"]["original"]}
    assert verdicts(aggregate([({}, only)])) == ["No source-free method was run."]


def test_a_withheld_step_is_said_and_notes_are_kept() -> None:
    metrics = make_metrics(
        a=make_row(73.7, 74.4, 73.8, 50.1, 1.0, applied=False),
        b=make_row(73.7, 74.4, 73.8, 50.1, 0.5, note=" few folds"),
        original=make_row(73.7, 74.4, 73.8, 50.1, 1.0, "none", applied=False),
    )
    assert verdicts_of(metrics)[-1] == "Step not applied, or not in full: a (distance 1.000)."
    assert remarks(table_of_run(metrics)) == [("b", "", "few folds")]


def test_ranks_stand_in_one_sentence_with_what_the_seeds_leave_open() -> None:
    runs = []
    for seed, (a, b, c) in enumerate([(0.2, 0.5, 3.0), (0.6, 0.4, 2.0), (0.1, 0.5, 2.5)]):
        rows = {name: make_row(70, 70, 70, 50, distance) for name, distance in {"a": a, "b": b, "c": c}.items()}
        rows |= {"original": make_row(70, 70, 70, 50, 1.0, access="none")}
        runs.append(({"seed": str(seed)}, make_metrics(**rows)))
    (sentence,) = ranked(aggregate(runs))
    assert sentence.startswith("Ranks by distance [95 % over seeds]: a 1.0 [1.0, 2.0] (first in ")
    assert sentence.endswith("% of draws), original 3.0, c 4.0.")
    assert sentence in verdicts(aggregate(runs))
    assert ranked(aggregate(runs[:1])) == []
