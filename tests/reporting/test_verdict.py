from __future__ import annotations

from sfu.reporting import verdict

from .samples import catastrophic_run, good_run, make_metrics, make_row, without_retrained


def test_best_is_decided_among_source_free_rows_only() -> None:
    best = verdict.best_rows(good_run()["rows"])
    # unlearned_plus and retrained have gap 0 everywhere and are not competitors
    assert best["test_accuracy"] == {"closed_form"}  # |0.0| < |-0.1|
    assert best["remain_accuracy"] == {"unlearned_minus"}  # |-0.1| < |-0.2|
    assert best["forget_accuracy"] == {"closed_form"}  # |0.0| < |0.1|
    assert best["mia"] == {"closed_form"}  # |50.0 - 50.1| < |50.3 - 50.1|
    assert best["distance"] == {"unlearned_minus"}  # 0.305 < 0.351


def test_rows_that_look_equal_tie() -> None:
    rows = make_metrics(a=make_row(73.74, 74.4, 73.8, 50.1, 0.3051), b=make_row(73.66, 74.4, 73.8, 50.1, 0.3049))[
        "rows"
    ]
    best = verdict.best_rows(rows)
    assert best["test_accuracy"] == {"a", "b"}  # +0.04 and -0.04 are both shown as 0.0
    assert best["distance"] == {"a", "b"}


def test_no_prize_for_a_distance_of_one_or_more() -> None:
    rows = make_metrics(a=make_row(73.7, 74.4, 73.8, 50.1, 1.0), b=make_row(73.0, 74.4, 73.8, 50.1, 5.0))["rows"]
    best = verdict.best_rows(rows)
    assert best["distance"] == set()
    assert best["test_accuracy"] == {"a"}


def test_no_best_without_gaps() -> None:
    assert not any(verdict.best_rows(without_retrained()["rows"]).values())


def test_worse_than_nothing() -> None:
    assert verdict.is_worse_than_nothing({"access": "forget", "distance": 1.001})
    assert not verdict.is_worse_than_nothing({"access": "forget", "distance": 1.0 + 1e-9})
    assert not verdict.is_worse_than_nothing({"access": "forget", "distance": None})
    assert not verdict.is_worse_than_nothing({"access": "none", "distance": 1.1})
    assert verdict.is_worse_than_nothing({"access": "retained", "distance": 1.1})


def test_verdict_names_the_closest_row_and_how_close() -> None:
    sentence = verdict.verdict(catastrophic_run())
    assert sentence == (
        "Closest to Retrained without source data: unlearned_minus, distance 0.305 (70 % of the gap closed), "
        "test accuracy 73.6 % (-0.1 points from Retrained)."
    )
    assert (
        verdict.worse_sentence(catastrophic_run()) == "Worse than doing nothing: unlearned_minus_paper (distance 801)."
    )
    assert verdict.worse_sentence(good_run()) is None


def test_verdict_when_nothing_helped() -> None:
    metrics = make_metrics(a=make_row(12.0, 12.0, 12.0, 50.0, 5.9), b=make_row(50.0, 12.0, 12.0, 50.0, 801.0))
    assert verdict.verdict(metrics).startswith("No source-free method came closer to Retrained than doing nothing")
    assert "the nearest is a: distance 5.900" in verdict.verdict(metrics)


def test_verdict_without_retrained_or_without_methods() -> None:
    assert "No retrained row" in verdict.verdict(without_retrained())
    only = make_metrics(original=make_row(73.8, 74.6, 74.8, 50.6, 1.0, "none"))
    assert verdict.verdict(only) == "No source-free method in this run."
    assert verdict.verdict({"rows": {}}) == "No source-free method in this run."


def test_verdict_falls_back_on_accuracy() -> None:
    metrics = make_metrics(
        retrained=make_row(73.7, 74.4, 73.8, 50.1, None, "retained"), a=make_row(73.6, 74.4, 73.8, 50.1, None)
    )
    expected = "Closest to Retrained without source data: a, test accuracy 73.6 % (-0.1 points from Retrained)."
    assert verdict.verdict(metrics) == expected


def test_a_withheld_step_gets_a_note() -> None:
    metrics = make_metrics(
        a=make_row(73.7, 74.4, 73.8, 50.1, 1.0, applied=False),
        b=make_row(73.7, 74.4, 73.8, 50.1, 0.5, note="few folds"),
        original=make_row(73.7, 74.4, 73.8, 50.1, 1.0, "none", applied=False),
    )
    assert verdict.notes(metrics) == [("a", "the step was computed but not applied"), ("b", "few folds")]
