from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sfu.reporting.table import print_run, terminal_table

from .samples import catastrophic_run, good_run, make_metrics, make_row, ten_methods, without_retrained


def render(renderable: Any, width: int, encoding: str = "utf-8", color: bool = False) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    console = Console(
        width=width, file=file, color_system="standard" if color else None, force_terminal=color, legacy_windows=False
    )
    if callable(renderable):
        renderable(console)
    else:
        console.print(renderable)
    file.flush()
    return raw.getvalue().decode(encoding)


def forgotten_class() -> dict[str, Any]:
    """The widest numbers that can occur: forgetting a class takes its accuracy from 100 to 0."""
    metrics = make_metrics(
        original=make_row(100.0, 100.0, 100.0, 100.0, 1.0, "none"),
        retrained=make_row(0.0, 100.0, 0.0, 50.0, 0.0, "retained"),
        unlearned_plus_adam=make_row(100.0, 0.0, 100.0, 100.0, 1.00031, "retained", retain_gradient_norm=2.5e-11),
        unlearned_minus_paper=make_row(100.0, 100.0, 100.0, 100.0, 99999.0, seconds=12345.6, peak_memory_mb=123456.0),
    )
    for row in metrics["rows"].values():
        row.update(test_gap=-99.9, remain_gap=-99.9, forget_gap=100.0, mia_gap=-50.0)
    metrics["run"]["forget"] = {"kind": "classes", "fraction": None, "classes": [3, 5]}
    return metrics


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
    text = render(lambda console: print_run(metrics, "out", console), width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text
    for method in metrics["rows"]:
        assert any(line[2:].split()[:1] == [method] for line in text.splitlines()), method


def test_the_table_alone_has_no_line_over_80_even_with_trailing_blanks() -> None:
    for make in RUNS.values():
        assert max(len(line) for line in render(terminal_table(make()), 80).splitlines()) <= 80


def line_of(text: str, method: str) -> str:
    return next(line for line in text.splitlines() if line[2:].split()[:1] == [method])


def test_values_gaps_and_marks_without_colour() -> None:
    text = render(terminal_table(catastrophic_run()), 80)
    assert line_of(text, "unlearned_minus").split() == [
        *("unlearned_minus", "73.6", "-0.1", "74.3", "-0.1*", "73.9", "+0.1", "50.3", "+0.2", "0.305*")
    ]
    assert line_of(text, "closed_form").split()[1:] == [
        *("73.7", "+0.0*", "74.2", "-0.2", "73.8", "+0.0*", "50.0", "-0.1*", "0.351")
    ]
    bad = line_of(text, "unlearned_minus_paper")
    assert bad.startswith("! ")
    assert bad.split()[-1] == "801!"
    assert line_of(text, "unlearned_plus").startswith("r ")
    assert line_of(text, "unlearned_plus").split()[-1] == "0"  # 1.2e-15
    assert line_of(text, "retrained").split() == ["r", "retrained", "73.7", "74.4", "73.8", "50.1", "0"]
    assert "* best source-free  ! worse than nothing  r sees retained data\n" in text
    assert "= not (all) applied" not in text


def test_a_row_keeps_both_flags() -> None:
    text = render(terminal_table(forgotten_class()), 80)
    assert line_of(text, "unlearned_plus_adam").startswith("r!")
    assert "1.0003!" in text
    assert "classes 3, 5" in text


def test_a_withheld_step_is_marked() -> None:
    metrics = good_run()
    metrics["rows"]["closed_form"].update(applied=False, distance=1.0)
    text = render(terminal_table(metrics), 80)
    assert line_of(text, "closed_form").startswith("= ")
    assert "= not (all) applied" in text


@pytest.mark.parametrize("make", [catastrophic_run, forgotten_class])
def test_decimal_points_stand_under_each_other(make: Any) -> None:
    text = render(terminal_table(make()), 80)
    assert len({line_of(text, name).index(".") for name in make()["rows"]}) == 1  # 100.0 over 0.0


def test_wide_console_shows_more() -> None:
    narrow, wide = (render(terminal_table(forgotten_class()), width) for width in (80, 110))
    for heading in ("agree", "|grad|", "seconds", "MB"):
        assert heading in wide
        assert heading not in narrow
    assert line_of(wide, "unlearned_minus_paper").split()[-4:] == ["99.2", "3.2e-5", "12346", "123456"]


def test_colour_marks_best_and_worse() -> None:
    text = render(terminal_table(catastrophic_run()), 80, color=True)
    assert "\x1b[1;31m801!" in text
    assert "\x1b[1;32m0.305*" in text


def test_headline_says_what_was_forgotten() -> None:
    first = render(terminal_table(good_run()), 80).splitlines()[0]
    assert first == "digits: forgot 144 of 1437 examples (random 10 %), l2 0.0005, seed 0"


def test_long_names_fold_without_losing_a_character() -> None:
    metrics = catastrophic_run()
    name = "unlearned_minus_with_augmented_forget_images"
    metrics["rows"][name] = metrics["rows"].pop("closed_form")
    text = render(terminal_table(metrics), 80)
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= 80
    start = next(index for index, line in enumerate(lines) if line[2:].startswith("unlearned_minus_with"))
    assert "".join(line[2:].split()[0] for line in lines[start : start + 2]) == name


@pytest.mark.parametrize("width", [40, 60])
def test_narrow_consoles_do_not_fail(width: int) -> None:
    assert "0.305" in render(terminal_table(catastrophic_run()), width)


def test_markup_in_names_and_notes_is_text() -> None:
    metrics = make_metrics(**{"[red]x[/red]": make_row(73.6, 74.4, 73.8, 50.1, 0.5, note="see [bold]note[/bold]")})
    text = render(lambda console: print_run(metrics, "out", console), 80)
    assert "[red]x[/red]" in text
    assert "see [bold]note[/bold]" in text


def test_ascii_terminal() -> None:
    assert "0.305*" in render(lambda console: print_run(catastrophic_run(), "out", console), 80, encoding="ascii")


def test_print_run_says_the_verdict_the_notes_and_the_files(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text("{}")
    (tmp_path / "result.png").write_text("")
    (tmp_path / "wandb").mkdir()
    text = render(lambda console: print_run(catastrophic_run(), tmp_path, console), 300)
    assert "Closest to Retrained without source data: unlearned_minus" in text
    assert "Worse than doing nothing: unlearned_minus_paper (distance 801)." in text
    assert "  unlearned_minus_paper: loss fit: 1000 equations for 2080 unknowns" in text
    assert f"Saved in {tmp_path}\n" in text
    assert "metrics.json, result.png" in text


@pytest.mark.parametrize("metrics", [{}, {"rows": {}}, {"rows": {"x": {}}}, {"run": {"data": {}}, "rows": {"x": {}}}])
def test_missing_everything(metrics: dict[str, Any]) -> None:
    assert render(lambda console: print_run(metrics, "out", console), 80)
