"""The paper's figures beside ours, and the oracle's mark in every table."""

from __future__ import annotations

import re

from sfu.reporting.published import (
    csv_published_table,
    markdown_published_table,
    published_table,
    terminal_published_table,
)
from sfu.reporting.report.build import build_report
from sfu.reporting.report.write import save_report
from sfu.reporting.terminal import terminal_table
from sfu.reporting.text_tables import csv_table, latex_table, markdown_table, run_csv, run_markdown
from sfu.reporting.verdict import best_rows, verdicts
from sfu.results.aggregate import aggregate, table_of_run
from sfu.unlearning.tuning import ORACLE
from tests.reporting.report.folders import config_with, write_run
from tests.reporting.samples import render, tuned_run


def test_the_figures_of_table_5_stand_beside_each_cell():
    table = published_table("table_5")
    assert table.figure({"tune": "oracle"}, "random_labels", "mia") == 47.0
    assert table.figure({}, "unlearned_minus_paper", "test_accuracy") == 70.0
    assert table.figure({}, "scrub", "test_accuracy") is None
    total = aggregate([({"seed": str(seed), "tune": "oracle"}, tuned_run(ORACLE)) for seed in range(2)])
    markdown = markdown_published_table(total, table)
    assert f"neg_grad ({ORACLE}) | 73.6 ± 0.0 (51.9, +21.7)" in markdown
    assert "| jit | 73.0 ± 0.0 (52.1, +20.9)" in markdown
    assert "Seconds" in markdown
    text = render(terminal_published_table(total, table), 80)
    assert "52.1 +20.9" in text
    assert re.search(r"^o neg_grad +73", text, re.MULTILINE)
    assert "o tuned on Retrained" in text
    assert f"\nneg_grad ({ORACLE}),test_accuracy," in csv_published_table(total, table)
    assert max(map(len, text.splitlines())) <= 80


def test_a_row_tuned_on_retrained_is_marked_in_every_table_and_wins_nothing():
    told = tuned_run(ORACLE)
    table = table_of_run(told)
    rows = table.groups[0].rows
    assert not rows["neg_grad"].is_source_free
    assert rows["jit"].is_source_free
    assert "neg_grad" not in {name for names in best_rows(rows).values() for name in names}
    assert "nearest is jit" in verdicts(table)[0]
    untold = table_of_run(tuned_run("source_free"))
    assert "Closest to Retrained without source data: neg_grad" in verdicts(untold)[0]
    text = render(terminal_table(table), 200)
    assert re.search(r"^o +neg_grad", text, re.MULTILINE)
    assert "o tuned on Retrained" in text
    assert f"| neg_grad ({ORACLE}) |" in run_markdown(told)
    assert ORACLE in run_csv(told)
    total = aggregate([({"seed": "0", "tune": "oracle"}, told)])
    assert f"neg_grad ({ORACLE})" in markdown_table(total)
    assert f"neg_grad,forget,{ORACLE}," in csv_table(total)
    assert re.search(r"^o +neg_grad", render(terminal_table(total), 200), re.MULTILINE)
    assert f"\nneg\\_grad ({ORACLE}) & " in latex_table(total)
    assert "tuned on Retrained" not in render(terminal_table(table_of_run(tuned_run(None))), 200)


def test_a_row_tuned_on_retrained_is_marked_on_the_page_and_in_its_tables(tmp_path):
    write_run(tmp_path / "run", tuned_run(ORACLE), config_with(tune="oracle"))
    save_report(build_report([tmp_path / "run"]), tmp_path / "report")
    for name in ("report.html", "tables.md", "tables.csv", "tables.tex"):
        assert ORACLE in (tmp_path / "report" / name).read_text(), name
