from __future__ import annotations

import csv
import io

from sfu.reporting.table import csv_table, markdown_table

from .samples import catastrophic_run, good_run, without_retrained


def parse(text: str) -> dict[str, dict[str, str]]:
    return {row["method"]: row for row in csv.DictReader(io.StringIO(text))}


def test_csv_has_every_scalar_at_full_precision() -> None:
    metrics = catastrophic_run()
    rows = parse(csv_table(metrics))
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
    rows = parse(csv_table(metrics))
    assert rows["closed_form"]["note"] == 'a, "b"\nc'
    assert rows["closed_form"]["details.k"] == "3"
    assert "details.path" not in rows["closed_form"]


def test_csv_keeps_columns_it_does_not_know() -> None:
    metrics = good_run()
    metrics["rows"]["closed_form"]["new_metric"] = 1.5
    assert parse(csv_table(metrics))["closed_form"]["new_metric"] == "1.5"


def table_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_markdown_has_all_columns_with_gaps() -> None:
    text = markdown_table(catastrophic_run())
    header, rule, *body = table_of(text)
    assert len(rule[0].split("|")) == len(header)
    rows = {cells[0]: dict(zip(header, cells, strict=True)) for cells in body}
    assert rows["unlearned_minus_paper"]["Test gap"] == "-61.7"
    assert rows["unlearned_minus_paper"]["Distance"] == "801 !"
    assert rows["unlearned_minus"]["Distance"] == "**0.305**"
    assert rows["closed_form"]["Test %"] == "**73.7**"
    assert rows["retrained"]["Data seen"] == "retained"
    assert "Predicted gain" not in header  # null in every row
    assert "- `unlearned_minus_paper`: loss fit: 1000 equations for 2080 unknowns" in text


def test_markdown_escapes_pipes_and_line_breaks() -> None:
    metrics = good_run()
    metrics["rows"]["a|b\nc"] = metrics["rows"].pop("closed_form")
    text = markdown_table(metrics)
    assert "| a\\|b c |" in text


def test_markdown_without_retrained() -> None:
    text = markdown_table(without_retrained())
    assert "Distance |" not in text
    assert "No retrained row" in text
