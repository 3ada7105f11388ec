"""The paper's figures beside ours, the oracle's mark in every table, and the picture of the trade-off."""

from __future__ import annotations

import json
import re

from rich.console import Console

from sfu.reporting.aggregate import aggregate
from sfu.reporting.export import csv_table, markdown_table
from sfu.reporting.plot import save_bar_plot
from sfu.reporting.published import published_table
from sfu.reporting.published_table import csv_published_table, markdown_published_table, terminal_published_table
from sfu.reporting.report.build import build_report
from sfu.reporting.report.write import save_report
from sfu.reporting.sweep_table import csv_sweep_table, latex_sweep_table, markdown_sweep_table, terminal_sweep_table
from sfu.reporting.table import terminal_table
from sfu.reporting.trade_off import save_trade_off_plot
from sfu.reporting.verdict import best_rows, is_source_free, verdict
from sfu.unlearning.tuning import ORACLE
from tests.reporting.report.folders import config_with, write_run
from tests.reporting.samples import make_metrics, make_row


def metrics(tuning: str | None) -> dict:
    return make_metrics(
        retrained=make_row(73.7, 74.4, 73.8, 50.1, 0.0, "retained", tuning=None),
        neg_grad=make_row(73.6, 74.3, 73.7, 50.2, 0.9, tuning=tuning),
        jit=make_row(73.0, 73.8, 73.0, 50.3, 1.4, tuning="source_free"),
    )


def shown(renderable, width: int = 200) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


def test_the_figures_of_table_5_stand_beside_each_cell():
    table = published_table("table_5")
    assert table.figure({"tune": "oracle"}, "random_labels", "mia") == 47.0
    assert table.figure({}, "unlearned_minus_paper", "test_accuracy") == 70.0
    assert table.figure({}, "scrub", "test_accuracy") is None
    total = aggregate([({"seed": str(seed), "tune": "oracle"}, metrics(ORACLE)) for seed in range(2)])
    markdown = markdown_published_table(total, table)
    assert f"neg_grad ({ORACLE}) | 73.6 ± 0.0 (51.9, +21.7)" in markdown
    assert "| jit | 73.0 ± 0.0 (52.1, +20.9)" in markdown
    assert "Seconds" in markdown
    text = shown(terminal_published_table(total, table), 80)
    assert "52.1 +20.9" in text
    assert re.search(r"^o neg_grad +73", text, re.MULTILINE)
    assert "o tuned on Retrained" in text
    assert f"\nneg_grad ({ORACLE}),test_accuracy," in csv_published_table(total, table)
    assert max(map(len, text.splitlines())) <= 80


def test_a_row_tuned_on_retrained_is_marked_in_every_table_and_wins_nothing():
    told = metrics(ORACLE)
    assert not is_source_free(told["rows"]["neg_grad"])
    assert is_source_free(told["rows"]["jit"])
    assert "neg_grad" not in {name for names in best_rows(told["rows"]).values() for name in names}
    assert "nearest is jit" in verdict(told)
    assert "Closest to Retrained without source data: neg_grad" in verdict(metrics("source_free"))
    text = shown(terminal_table(told))
    assert re.search(r"^o +neg_grad", text, re.MULTILINE)
    assert "o tuned on Retrained" in text
    assert ORACLE in markdown_table(told)
    assert ORACLE in csv_table(told)
    total = aggregate([({"seed": "0", "tune": "oracle"}, told)])
    assert f"neg_grad ({ORACLE})" in markdown_sweep_table(total)
    assert f"neg_grad,forget,{ORACLE}," in csv_sweep_table(total)
    assert re.search(r"^o +neg_grad", shown(terminal_sweep_table(total)), re.MULTILINE)
    assert f"\nneg\\_grad ({ORACLE}) & " in latex_sweep_table(total)
    assert "tuned on Retrained" not in shown(terminal_table(metrics(None)))


def test_a_row_tuned_on_retrained_is_marked_on_the_page_and_in_its_tables(tmp_path):
    write_run(tmp_path / "run", metrics(ORACLE), config_with(tune="oracle"))
    save_report(build_report([tmp_path / "run"]), tmp_path / "report")
    for name in ("report.html", "tables.md", "tables.csv", "tables.tex"):
        assert ORACLE in (tmp_path / "report" / name).read_text(), name


def test_the_bar_figure_draws_marked_rows(tmp_path):
    assert save_bar_plot(metrics(ORACLE), tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_the_trade_off_picture_marks_retrained_and_ours_and_draws_every_path(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    paths = {
        "retrained": {"forget_accuracy": [73.8], "test_accuracy": [73.7]},
        "neg_grad": {"forget_accuracy": [75.0, 70.0, 40.0], "test_accuracy": [73.8, 70.0, 45.0]},
        "unlearned_minus": {"forget_accuracy": [73.9], "test_accuracy": [73.7]},
    }
    (tmp_path / "trade_off.json").write_text(json.dumps(paths))
    drawn = []
    real = Axes.plot

    def spy(self, x, y, *rest, **options):
        drawn.append((x, options.get("marker"), options.get("label")))
        return real(self, x, y, *rest, **options)

    monkeypatch.setattr(Axes, "plot", spy)
    told = metrics(ORACLE)
    assert save_trade_off_plot(told, tmp_path / "trade_off.png").read_bytes().startswith(b"\x89PNG")
    marks = {label: marker for _, marker, label in drawn if label}
    assert marks["retrained (retained data)"] == "*"
    assert marks["unlearned_minus"] == "D"
    assert "neg_grad (tuned on Retrained)" in marks
    assert [75.0, 70.0, 40.0] in [x for x, _, _ in drawn]
