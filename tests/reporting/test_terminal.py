from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sfu.reporting.terminal import MARKS, print_run, terminal_table
from sfu.results.aggregate import aggregate, table_of_run
from sfu.unlearning.tuning import ORACLE

from .samples import (
    catastrophic_run,
    forgotten_class,
    good_run,
    make_metrics,
    make_row,
    render,
    shifted,
    sweep_runs,
    ten_methods,
    twenty_methods,
    without_retrained,
)


def table_text(metrics: dict[str, Any], width: int, **options: Any) -> str:
    return render(terminal_table(table_of_run(metrics)), width, **options)


def printed(metrics: dict[str, Any], width: int, folder: str | Path = "out", **options: Any) -> str:
    return render(lambda console: print_run(metrics, folder, console), width, **options)


RUNS = {
    "good": good_run,
    "catastrophic": catastrophic_run,
    "without_retrained": without_retrained,
    "ten": ten_methods,
    "forgotten_class": forgotten_class,
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("width", [80, 110, 200])
def test_nothing_is_wider_than_the_console_and_nothing_is_cut(name: str, width: int) -> None:
    metrics = RUNS[name]()
    text = printed(metrics, width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text
    for method in metrics["rows"]:
        assert any(line[2:].split()[:1] == [method] for line in text.splitlines()), method


def test_the_table_alone_has_no_line_over_80_even_with_trailing_blanks() -> None:
    for make in RUNS.values():
        assert max(len(line) for line in table_text(make(), 80).splitlines()) <= 80


def line_of(text: str, method: str) -> str:
    return next(line for line in text.splitlines() if line[2:].split()[:1] == [method])


def test_values_gaps_and_marks_without_colour() -> None:
    text = table_text(catastrophic_run(), 80)
    assert line_of(text, "unlearned_minus").split() == [
        *("unlearned_minus", "73.6", "-0.1", "74.3", "-0.1", "73.9", "+0.1*", "50.3", "+0.2", "0.305*")
    ]
    assert line_of(text, "closed_form").split()[1:] == [
        *("73.7", "+0.0", "74.2", "-0.2", "73.8", "+0.0*", "50.0", "-0.1", "0.351")
    ]
    bad = line_of(text, "unlearned_minus_paper")
    assert bad.startswith("! ")
    assert bad.split()[-1] == "801!"
    assert line_of(text, "unlearned_plus").startswith("r ")
    assert line_of(text, "unlearned_plus").split()[-1] == "0"  # 1.2e-15
    assert line_of(text, "retrained").split() == ["r", "retrained", "73.7", "74.4", "73.8", "50.1", "0"]
    assert "* best source-free  ! worse than nothing  r sees retained data\n" in text
    assert "n not (all) applied" not in text


def test_a_row_that_failed_is_listed_with_its_error() -> None:
    metrics = good_run()
    metrics["rows"]["gkt"] = {"applied": False, "details": {}, "note": "failed: x", "error": "SolverError: no"}
    text = printed(metrics, 80)
    assert "Failed:\n  gkt: SolverError: no\n" in text
    assert "Averaged over fewer runs" not in text


def test_a_row_keeps_both_flags() -> None:
    text = printed(forgotten_class(), 80)
    assert line_of(text, "unlearned_plus_adam").startswith("r!")
    assert "1.013!" in text
    assert "classes 3, 5" in text


def test_a_withheld_step_is_marked() -> None:
    metrics = good_run()
    metrics["rows"]["closed_form"].update(applied=False, distance=1.0)
    text = table_text(metrics, 80)
    assert line_of(text, "closed_form").startswith("n ")
    assert "n not (all) applied" in text


@pytest.mark.parametrize("make", [catastrophic_run, forgotten_class])
def test_decimal_points_stand_under_each_other(make: Any) -> None:
    text = table_text(make(), 80)
    assert len({line_of(text, name).index(".") for name in make()["rows"]}) == 1  # 100.0 over 0.0


def test_the_predicted_distance_stands_beside_the_measured_one_if_there_is_one() -> None:
    metrics = good_run()
    assert "pred." not in table_text(metrics, 200)
    metrics["rows"]["unlearned_minus"]["predicted_distance"] = 0.345
    text = table_text(metrics, 80)
    head = next(line for line in text.splitlines() if "distance" in line).split()
    place = head.index("pred.") - len(head)
    assert head[place - 1] == "distance"
    assert line_of(text, "unlearned_minus").split()[place] == "0.345"
    assert line_of(text, "retrained").split()[place] == "-"
    assert "predicted from the forget set" in text
    narrow = table_text(metrics, 60)
    assert "0.345" not in narrow
    assert "pred." not in narrow


def test_wide_console_shows_more() -> None:
    narrow, wide = (table_text(forgotten_class(), width) for width in (80, 110))
    for heading in ("agree", "|grad|", "seconds", "MB"):
        assert heading in wide
        assert heading not in narrow
    assert line_of(wide, "unlearned_minus_paper").split()[-4:] == ["99.2", "3.2e-5", "12346", "123456"]


def test_colour_marks_best_and_worse() -> None:
    text = table_text(catastrophic_run(), 80, color=True)
    assert "\x1b[1;31m801!" in text
    assert "\x1b[1;32m0.305*" in text


def test_headline_says_what_was_forgotten() -> None:
    first, machine, *_ = printed(good_run(), 80).splitlines()
    assert machine == "cpu, float64, 12.3 s"
    assert first == "digits: forgot 144 of 1437 examples (random 10 %), l2 0.0005, seed 0"


def test_long_names_fold_without_losing_a_character() -> None:
    metrics = catastrophic_run()
    name = "unlearned_minus_with_augmented_forget_images"
    metrics["rows"][name] = metrics["rows"].pop("closed_form")
    text = table_text(metrics, 80)
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= 80
    start = next(index for index, line in enumerate(lines) if line[2:].startswith("unlearned_minus_with"))
    assert [line[2:].split()[0] for line in lines[start : start + 2]] == [
        "unlearned_minus_with_augmented_forget_", "images"
    ]  # fmt: skip


@pytest.mark.parametrize("width", [40, 60])
def test_narrow_consoles_show_the_distance_and_no_line_is_wider(width: int) -> None:
    for text in (table_text(catastrophic_run(), width), render(terminal_table(aggregate(sweep_runs())), width)):
        assert max(len(line) for line in text.splitlines()) <= width
    assert "0.305" in table_text(catastrophic_run(), width)


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("averaged", [False, True])
def test_twenty_rows_stay_whole_with_their_marks_apart(width: int, averaged: bool) -> None:
    made = [({"seed": str(seed)}, twenty_methods()) for seed in range(2 if averaged else 1)]
    made[0][1]["rows"]["scrub"]["tuning"] = ORACLE
    text = render(terminal_table(aggregate(made)), width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.startswith("ro! scrub ") for line in lines)
    for name in twenty_methods()["rows"]:
        assert any(
            line[4:].startswith(name) or line[4:].split()[:1] == [f"{name.rpartition('_')[0]}_"] for line in lines
        )
    for meaning, _ in MARKS.values():
        assert any(meaning in line for line in lines), meaning  # not broken between lines
    assert not re.search(r"[a-z0-9]\s*\n +[a-z]{1,3} *\n", text)  # no name loses its last letters to the next line


def test_what_failed_says_so_once() -> None:
    error = {"error": "job 0: ConfigError: head.l3 is unknown."}
    lines = render(terminal_table(aggregate([({"seed": str(seed)}, error) for seed in range(2)])), 80).splitlines()
    told = [line.rstrip() for line in lines if line.strip()]
    assert told == ["0 of 2 runs", "No run finished.", "Failed:", "  seed=0; seed=1: ConfigError: head.l3 is unknown."]


def test_markup_in_names_and_notes_is_text() -> None:
    metrics = make_metrics(**{"[red]x[/red]": make_row(73.6, 74.4, 73.8, 50.1, 0.5, note="see [bold]note[/bold]")})
    text = printed(metrics, 80)
    assert "[red]x[/red]" in text
    assert "see [bold]note[/bold]" in text


def test_ascii_terminal() -> None:
    assert "0.305*" in printed(catastrophic_run(), 80, encoding="ascii")


def test_print_run_says_the_verdict_the_notes_and_the_files(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text("{}")
    (tmp_path / "result.png").write_text("")
    (tmp_path / "wandb").mkdir()
    text = printed(catastrophic_run(), 300, tmp_path)
    assert "Closest to Retrained without source data: unlearned_minus" in text
    assert "Worse than doing nothing: unlearned_minus_paper (distance 801)." in text
    assert "  unlearned_minus_paper: loss fit: 1000 equations for 2080 unknowns" in text
    assert f"Saved in {tmp_path}\n" in text
    assert "metrics.json, result.png" in text


def test_theory_stands_beside_what_was_measured_with_its_flags() -> None:
    metrics = catastrophic_run()
    lemma = {"bound": 0.1, "measured": 0.25, "not_applicable": False, "violated": True, "vacuous": False}
    theorem = {"bound": 7.5, "measured": 0.5, "not_applicable": False, "violated": False, "vacuous": True}
    metrics["rows"]["unlearned_minus"]["theory"] = {"lemma_1": lemma, "theorem_1": {**theorem, "trivial": 2.5}}
    flat = {**theorem, "trivial": 2.5, "not_applicable": True}
    metrics["rows"]["closed_form"]["theory"] = {"lemma_1": {**lemma, "violated": False}, "theorem_1": flat}
    lines = [line.split() for line in printed(metrics, 80).splitlines()]
    assert ["unlearned_minus", "0.25", "0.1", "!", "0.5", "7.5", "v", "2.5"] in lines
    assert ["closed_form", "0.25", "0.1", "0.5", "-", "2.5"] in lines
    assert "Lemma 1" not in printed(catastrophic_run(), 80)


@pytest.mark.parametrize("metrics", [{}, {"rows": {}}, {"rows": {"x": {}}}, {"run": {"data": {}}, "rows": {"x": {}}}])
def test_missing_everything(metrics: dict[str, Any]) -> None:
    assert printed(metrics, 80)


@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_line_of_a_sweep_is_wider_and_no_name_is_cut(width: int) -> None:
    text = render(terminal_table(aggregate(sweep_runs())), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    names = [line[2:].split()[0] for line in text.splitlines() if line[2:].strip()]
    assert names.count("unlearned_minus_paper") == 3
    assert names.count("retrained") == 3


def test_values_of_a_sweep_by_hand() -> None:
    text = render(terminal_table(aggregate(sweep_runs())), 80)
    lines = text.splitlines()
    start = lines.index("forget.fraction = 0.1  n = 3 (seed 0, 1, 2)")
    row = next(line for line in lines[start:] if line[2:].startswith("unlearned_minus "))
    # seeds add 1.0, 1.2 and 1.4 points to 73.6; distance 0.305 * (1.1, 1.12, 1.14)
    assert "74.8 ± 0.1*" in row
    assert "0.342 ± 0.004*" in row
    bad = next(line for line in lines[start:] if line[2:].startswith("unlearned_minus_paper "))
    assert bad.startswith("! ")
    assert "897 ± 9!" in bad


def test_failures_and_missing_values_are_listed() -> None:
    text = " ".join(render(terminal_table(aggregate(sweep_runs())), 80).split())
    assert "8 of 9 runs" in text
    assert "n = 2 (seed 0, 1), 1 failed" in text
    assert "forget.fraction=0.15 seed=2: SingularHessianError: head.l2 = 0" in text
    assert "closed_form at forget.fraction = 0.05: every metric over 2 of 3 runs" in text
    assert "Not shown at this width: remaining accuracy." in text


def test_only_seeds_varied() -> None:
    total = aggregate([({"seed": str(seed)}, shifted(good_run(), seed)) for seed in range(2)])
    text = render(terminal_table(total), 80)
    assert "n = 2 (seed 0, 1)" in text
    assert "74.3 ± 0.5" in text  # original: 73.8 and 74.8
    assert max(len(line) for line in text.splitlines()) <= 80


def test_one_run_has_no_spread() -> None:
    text = render(terminal_table(aggregate([({"seed": "0"}, good_run())])), 80)
    assert "0.305*" in text
    assert "0.305 ±" not in text


def test_a_sweep_in_an_ascii_terminal() -> None:
    assert "74.8 +- 0.1" in render(terminal_table(aggregate(sweep_runs())), 80, encoding="ascii")


def test_nothing_finished() -> None:
    assert "No run finished." in render(terminal_table(aggregate([({"seed": "0"}, None)])), 80)
