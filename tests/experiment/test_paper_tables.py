"""Every experiment in small, and the paper's tables beside ours."""

from __future__ import annotations

import csv
import io

import pytest
from rich.console import Console

from sfu.config_files import group_options
from sfu.reporting.columns import PAPER_METRICS
from sfu.reporting.published import (
    csv_published_table,
    markdown_published_table,
    published_table,
    published_tables,
    terminal_published_table,
)
from sfu.results.aggregate import aggregate
from tests.experiment.cases import composed, run
from tests.reporting.samples import make_metrics, make_row

SMALL = ("dataset=digits", "backbone=none", "logger=none", "curvature.perturbations=40", "forget.fraction=0.1")

ELSEWHERE = "paper_table_5"
"""Run under all three rules in test_paper_table_5.py."""
LINEARISED = (
    "backbone=resnet18", "backbone.weights=none", "backbone.size=8", "head.layers=1", "head.sgd.epochs=1",
    "dataset.limit_per_class=20",
)  # fmt: skip
FEW = "methods=[original,retrained,unlearned_minus]"
"""Other experiments run the other rows."""
OWN = {
    "paper_table_4": LINEARISED,
    "paper_table_s2": LINEARISED,
    "benchmark": (FEW,),
    "canaries": ("forget.fraction=null", FEW),
    "evaluation": ("evaluation.shadows=8",),
    "requests": (FEW,),
    "class_methods": ("forget.fraction=null", "+variants.gkt_open.settings.batches=5"),
}


@pytest.mark.parametrize("experiment", [name for name in group_options("experiment") if name != ELSEWHERE])
def test_every_experiment_runs_in_small(experiment, tmp_path):
    config = composed(f"experiment={experiment}", *SMALL, *OWN.get(experiment, ()), "head.l2=1e-3")
    metrics = run(config, tmp_path / "run")
    assert list(metrics["rows"]) == config.methods
    assert not any(row.get("error") for row in metrics["rows"].values())
    assert metrics["run"]["published"] == config.published


def test_the_rows_set_beside_published_ones_are_in_the_experiments():
    for experiment in group_options("experiment"):
        config = composed(f"experiment={experiment}", "dataset=digits")
        if config.published is not None:
            table = published_table(config.published)
            assert {name for names in table.ours.values() for name in names} <= set(config.methods)


def test_published_figures_are_found_by_setting_and_row():
    two, five = published_table("table_2"), published_table("table_5")
    assert two.figure({"curvature.perturbations": "250"}, "unlearned_minus_paper", "test_accuracy") == 57
    assert two.figure({"curvature.perturbations": "1000"}, "unlearned_minus", "mia") == 49.0
    assert two.figure({"curvature.perturbations": "500"}, "retrained", "forget_accuracy") == 72
    assert two.figure({"curvature.perturbations": "300"}, "retrained", "test_accuracy") is None
    assert two.figure({}, "retrained", "test_accuracy") is None
    assert two.figure({"curvature.perturbations": "250"}, "original", "test_accuracy") is None
    assert published_table("table_1").figure({"forget.fraction": "0.1"}, "retrained", "remain_accuracy") == 74
    assert published_table("table_3").figure({"head.l2": "5e-4"}, "unlearned_minus", "test_accuracy") == 71
    assert five.figure({}, "jit", "test_accuracy") == 52.1
    assert five.figure({}, "unlearned_plus", "test_accuracy") is None


def test_published_tables_are_whole():
    for table in published_tables().values():
        for rows in table.rows.values():
            for figures in rows.values():
                assert len(figures) == len(PAPER_METRICS)
                assert all(0 < figure < 100 for figure in figures)


@pytest.fixture
def total():
    runs = []
    for perturbations, test in (("250", 30.0), ("500", 40.0)):
        for seed in range(2):
            rows = {
                "original": make_row(74, 75, 74, 50, 1.0, access="none"),
                "retrained": make_row(73.0 + seed, 74.4, 73.8, 50.1, 0.0, access="retained"),
                "unlearned_minus_paper": make_row(test, test, test, 52, 20.0),
            }
            metrics = make_metrics(**rows)
            metrics["run"]["data"] |= {"name": "cifar10", "backbone": {"name": "resnet18"}}
            runs.append(({"curvature.perturbations": perturbations, "seed": str(seed)}, metrics))
    runs.append(({"curvature.perturbations": "1000", "seed": "0"}, {"error": "job 4: it broke"}))
    runs.append(({"curvature.perturbations": "1000", "seed": "1"}, {"error": "job 5: it broke"}))
    return aggregate(runs)


def test_the_table_in_the_terminal_fits_80_columns(total):
    console = Console(width=80, file=io.StringIO())
    console.print(terminal_published_table(total, published_table("table_2")))
    printed = console.file.getvalue()
    assert max(map(len, printed.splitlines())) <= 80
    assert "73.5±0.5" in printed
    assert "72 +1.5" in printed  # retrained, test
    assert "57 -27.0" in printed  # ours as published, 250
    assert "70 -30.0" in printed
    assert " ".join(printed.split()).count("it broke") == 1
    assert "curvature.perturbations=1000 seed=0; curvature.perturbations=1000 seed=1" in " ".join(printed.split())


def test_the_table_as_markdown_and_csv(total):
    table = published_table("table_2")
    markdown = markdown_published_table(total, table)
    assert "| 250 | retrained | 73.5 ± 0.5 (72, +1.5) |" in markdown
    assert "- curvature.perturbations=1000 seed=0; curvature.perturbations=1000 seed=1: it broke" in markdown
    rows = list(csv.DictReader(io.StringIO(csv_published_table(total, table))))
    (one,) = [
        row
        for row in rows
        if row["row"] == "unlearned_minus_paper"
        and (row["curvature.perturbations"], row["metric"]) == ("500", "test_accuracy")
    ]
    assert (one["mean"], one["n"], one["published"], one["difference"]) == ("40.0", "2", "70.0", "-30.0")
    assert [row["published"] for row in rows if row["row"] == "original"] == [""] * 8


def test_an_unknown_table_is_refused():
    from sfu.errors import ConfigError
    from sfu.experiment.validate import validate

    with pytest.raises(ConfigError, match=r"published=table_9 is unknown\. Choose one of table_1, table_2"):
        validate(composed("published=table_9", "dataset=digits", "backbone=none"))
