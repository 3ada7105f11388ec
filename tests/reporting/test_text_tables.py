from __future__ import annotations

import csv
import io

import pytest

from sfu.reporting.text_tables import csv_table, escape_latex, latex_table, markdown_table, run_csv, run_markdown
from sfu.results.aggregate import aggregate

from .samples import catastrophic_run, good_run, sweep_runs, without_retrained


def parse(text: str) -> dict[str, dict[str, str]]:
    return {row["method"]: row for row in csv.DictReader(io.StringIO(text))}


def test_csv_has_every_scalar_at_full_precision() -> None:
    metrics = catastrophic_run()
    rows = parse(run_csv(metrics))
    assert list(rows) == list(metrics["rows"])
    for name, row in metrics["rows"].items():
        for key, value in row.items():
            if key == "details":
                continue
            cell = rows[name][key]
            if value is None:
                assert cell == ""
            elif isinstance(value, bool):
                assert cell == str(value).lower()
            elif isinstance(value, float):
                assert float(cell) == value
            else:
                assert cell == value
    assert rows["unlearned_minus"]["details.rho"] == "0.001"
    assert rows["unlearned_minus"]["details.solver_status"] == "converged"
    assert rows["closed_form"]["details.rho"] == ""


def test_csv_survives_commas_quotes_and_lists() -> None:
    metrics = good_run()
    metrics["rows"]["closed_form"]["note"] = 'a, "b"\nc'
    metrics["rows"]["closed_form"]["details"] = {"path": [1, 2], "k": 3}
    rows = parse(run_csv(metrics))
    assert rows["closed_form"]["note"] == 'a, "b"\nc'
    assert rows["closed_form"]["details.k"] == "3"
    assert "details.path" not in rows["closed_form"]


def test_csv_keeps_columns_it_does_not_know() -> None:
    metrics = good_run()
    metrics["rows"]["closed_form"]["new_metric"] = 1.5
    assert parse(run_csv(metrics))["closed_form"]["new_metric"] == "1.5"


def table_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_markdown_has_all_columns_with_gaps() -> None:
    text = run_markdown(catastrophic_run())
    header, rule, *body = table_of(text)
    assert len(rule[0].split("|")) == len(header)
    rows = {cells[0]: dict(zip(header, cells, strict=True)) for cells in body}
    assert rows["unlearned_minus_paper"]["Test gap"] == "-61.7"
    assert rows["unlearned_minus_paper"]["Distance"] == "801 !"
    assert rows["unlearned_minus"]["Distance"] == "**0.305**"
    assert rows["closed_form"]["Test %"] == "73.7"  # no better than the untouched head, which is 0.1 points away
    assert rows["retrained"]["Data seen"] == "retained"
    assert "Predicted gain" not in header  # null in every row
    assert "- unlearned_minus_paper: loss fit: 1000 equations for 2080 unknowns" in text


def test_markdown_escapes_pipes_and_line_breaks() -> None:
    metrics = good_run()
    metrics["rows"]["a|b\nc"] = metrics["rows"].pop("closed_form")
    text = run_markdown(metrics)
    assert "| a\\|b c |" in text


def test_markdown_without_retrained() -> None:
    text = run_markdown(without_retrained())
    assert "Distance |" not in text
    assert "There is no retrained row" in text


def test_csv_has_means_spreads_and_counts() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_table(aggregate(sweep_runs())))))
    row = next(r for r in rows if r["method"] == "closed_form" and r["forget.fraction"] == "0.05")
    assert (row["n"], row["test_accuracy.n"]) == ("2", "2")
    assert float(row["test_accuracy.mean"]) == pytest.approx(74.0)  # 73.7 + (0.2 + 0.4) / 2
    assert float(row["test_accuracy.std"]) == pytest.approx(0.2 / 2**0.5)
    assert len(rows) == 18


def test_markdown_of_a_sweep() -> None:
    text = markdown_table(aggregate(sweep_runs()))
    assert "| 0.1 | unlearned_minus | 3 | **74.8 ± 0.1** |" in text
    assert "897 ± 9 !" in text
    assert "- forget.fraction=0.15 seed=2: SingularHessianError: head.l2 = 0" in text


def test_latex_has_booktabs_and_escapes() -> None:
    text = latex_table(aggregate(sweep_runs()))
    for command in (
        r"\toprule",
        r"\midrule",
        r"\bottomrule",
        r"\begin{tabular}{lrrrrr}",
        r"\multicolumn{6}{l}{\emph{forget.fraction = 0.1}} \\",
    ):
        assert command in text
    assert "\noriginal & $75.0 \\pm 0.1$" in text  # 73.8 + 1 + 0.2
    assert r"unlearned\_minus & $\mathbf{74.8 \pm 0.1}$" in text
    assert r"$897 \pm 9$$^\dagger$" in text
    assert "% failed: forget.fraction=0.15 seed=2" in text
    assert escape_latex("a_b%$&#{}~^\\") == r"a\_b\%\$\&\#\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}"
    assert escape_latex("[red]* a") == "{[}red]{*} a"  # the line end before it would take [red] for a length
    big = good_run()
    big["rows"]["closed_form"]["distance"] = 1.2e8
    assert r"$1.2 \times 10^{8}$" in latex_table(aggregate([({}, big)]))


def test_nothing_finished_in_text() -> None:
    total = aggregate([({"seed": "0"}, None)])
    assert "seed=0" in markdown_table(total)
    assert csv_table(total).startswith("method,")
