"""The paper's figures beside ours, and the oracle's mark in every table."""

from __future__ import annotations

import csv
import io
import re

import pytest

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
from tests.reporting.samples import make_row, render, tuned_run


def test_the_figures_of_table_5_stand_beside_each_cell():
    table = published_table("table_5")
    assert table.figure({"tune": "oracle"}, "random_labels", "mia") == 47.0
    assert table.figure({}, "unlearned_minus_paper", "test_accuracy") == 70.0
    assert table.figure({}, "scrub", "test_accuracy") is None
    total = aggregate([({"seed": str(seed), "tune": "oracle"}, tuned_run(ORACLE)) for seed in range(2)])
    markdown = markdown_published_table(total, table)
    assert f"neg_grad ({ORACLE}) | 73.6 ± 0.0 (51.9)" in markdown
    assert "| jit | 73.0 ± 0.0 (52.1)" in markdown
    assert "Seconds" in markdown
    text = render(terminal_published_table(total, table), 80)
    assert re.search(r"^ +52.1 +53.1 +51.1", text, re.MULTILINE)
    assert re.search(r"^o neg_grad +73", text, re.MULTILINE)
    assert "o tuned on Retrained" in text
    assert f"\nneg_grad ({ORACLE}),test_accuracy," in csv_published_table(total, table)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("dataset", "backbone", "given", "shown"),
    [
        ("cifar10", "resnet18", {}, True),
        ("cifar10", "resnet18", {"dataset.limit_per_class": "50"}, False),
        ("cifar10", "resnet50", {}, False),
        ("cifar10", None, {}, False),
        ("features", None, {}, False),
        ("digits", None, {}, False),
    ],
)
def test_a_difference_from_the_paper_needs_the_papers_data(dataset, backbone, given, shown):
    metrics = tuned_run(None)
    metrics["run"]["data"] |= {"name": dataset, "backbone": backbone and {"name": backbone}}
    total = aggregate([({"dataset": dataset, "seed": str(seed), **given}, metrics) for seed in range(2)])
    for name in ("table_5", "table_s1"):  # the second is by dataset
        table = published_table(name)
        markdown, text = markdown_published_table(total, table), render(terminal_published_table(total, table), 80)
        rows = csv.DictReader(io.StringIO(csv_published_table(total, table)))
        (row,) = [row for row in rows if (row["row"], row["metric"]) == ("retrained", "test_accuracy")]
        assert (row["difference"] != "") == shown
        assert ("+1.7" in markdown) == ("+1.7" in text) == shown  # 73.7 - 72
        assert row["published"] == ("72.0" if name == "table_5" or dataset == "cifar10" else "")
        said = ["The data are not the paper's" in " ".join(found.split()) for found in (markdown, text)]
        assert said == [not shown] * 2


def test_differences_are_shown_for_the_papers_settings_alone():
    def run(name, backbone):
        metrics = tuned_run(None)
        metrics["run"]["data"] |= {"name": name, "backbone": backbone and {"name": backbone}}
        return {"dataset": name, "seed": "0"}, metrics

    found = aggregate([run("cifar10", "resnet18"), run("cifar100", "resnet50")])
    markdown = markdown_published_table(found, published_table("table_s1"))
    assert "| cifar10 | retrained | 73.7 (72, +1.7) |" in markdown
    assert "| cifar100 | retrained | 73.7 (56) |" in markdown
    assert "only shown where dataset and backbone are the paper's" in markdown
    assert "Here: cifar10 through resnet18, cifar100 through resnet50;" in markdown


def test_marks_stand_apart_from_names():
    metrics = tuned_run(ORACLE)
    metrics["rows"]["fine_tune"] = make_row(70.0, 70.0, 70.0, 50.0, 3.0, "retained", tuning=ORACLE)
    text = render(terminal_published_table(table_of_run(metrics), published_table("table_5")), 80)
    assert re.search(r"^ro! fine_tune +70", text, re.MULTILINE)
    assert re.search(r"^o   neg_grad +73", text, re.MULTILINE)


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
