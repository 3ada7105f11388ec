"""Attacks in tables, pictures and averages."""

from __future__ import annotations

import io
import json

import pytest
from PIL import Image
from rich.console import Console

from sfu.errors import ArtifactError
from sfu.reporting.attacks import attack_cells, attacks_of
from sfu.reporting.pictures.roc import save_roc_plot
from sfu.reporting.terminal import print_run, terminal_table
from sfu.reporting.text_tables import run_csv, run_markdown
from sfu.results.aggregate import aggregate, table_of_run
from sfu.results.artifacts import read_metrics, write_json


def figures(auc: float, half: float = 0.1) -> dict[str, object]:
    return {"auc": auc, "auc_interval": [auc - half, auc + half], "auc_gap": None, "note": "a note"}


def run_of(original: float, retrained: float, **more: object) -> dict[str, object]:
    rows = {
        name: {"access": access, "test_accuracy": 90.0, "attacks": {"paper": figures(0.5), "ulira": figures(auc)}}
        for name, access, auc in (("original", "none", original), ("retrained", "retained", retrained))
    }
    return {"schema": 1, "run": {"name": "x"}, "rows": rows | more}


def printed(make, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO())
    make(console)
    return console.file.getvalue()


def test_a_run_shows_areas_and_marks_those_whose_interval_leaves_out_one_half(tmp_path):
    run = run_of(0.7, 0.52)
    shown = printed(lambda console: print_run(run, tmp_path, console))
    assert "Membership attacks: area under the ROC curve" in shown
    assert "original  0.500 0.700 ≠" in shown
    assert "retrained 0.500 0.520" in shown
    assert "| original | 0.500 | 0.700 ≠ |" in run_markdown(run)
    header, first, _ = run_csv(run).splitlines()
    assert dict(zip(header.split(","), first.split(","), strict=True))["attacks.ulira.auc_interval.low"].startswith(
        "0.6"
    )


def test_a_narrow_console_keeps_the_strongest_attacks():
    shown = printed(lambda console: console.print(terminal_table(table_of_run(run_of(0.7, 0.5)))), width=20)
    assert "paper." in shown
    assert "0.700 ≠" in shown


def test_the_paper_s_attack_alone_has_no_table():
    run = run_of(0.7, 0.5)
    for row in run["rows"].values():
        del row["attacks"]["ulira"]
    assert attacks_of(table_of_run(run)) == []
    assert "Membership attacks" not in run_markdown(run)


def test_several_runs_are_averaged_with_students_interval():
    runs = [({"seed": str(seed)}, run_of(0.7 + 0.01 * seed, 0.5 + (-1) ** seed * 0.02)) for seed in range(4)]
    table = aggregate(runs)
    area = table.groups[0].rows["original"].attacks["ulira"]["auc"]
    assert (area.mean, area.n) == (pytest.approx(0.715), 4)
    cells = dict(attack_cells(table, table.groups[0]))
    assert cells["original"][1] == "0.715 ± 0.006 ≠"
    assert cells["retrained"][1] == "0.500 ± 0.012"
    assert table.to_json()["groups"][0]["rows"]["original"]["attacks"]["ulira"]["auc"]["n"] == 4
    assert not any(key.startswith("attacks") for key in table.groups[0].rows["original"].metrics)


def test_figures_out_of_range_are_refused(tmp_path):
    path = tmp_path / "metrics.json"
    run = run_of(0.6, 0.5)
    run["rows"]["original"]["attacks"]["ulira"]["of_a_plugin"] = [1, 2]
    write_json(path, run)
    assert read_metrics(path) == run
    run["rows"]["original"]["attacks"]["ulira"]["tpr_at_fpr_0.01"] = 2
    write_json(path, run)
    with pytest.raises(ArtifactError, match=r"tpr_at_fpr_0\.01"):
        read_metrics(path)


def test_curves_are_drawn_on_log_axes(tmp_path):
    curve = {"fpr": [0.0, 0.0, 0.01, 1.0], "tpr": [0.0, 0.1, 0.3, 1.0]}
    rows = {name: {"paper": curve, "ulira": curve, "of a row": curve} for name in ("original", "a $row$", "another")}
    write_json(tmp_path / "roc.json", rows)
    with Image.open(save_roc_plot(run_of(0.6, 0.5), tmp_path / "roc.png")) as picture:
        assert picture.width > 1000
    (tmp_path / "roc.json").write_text(json.dumps({"original": {"ulira": {"fpr": [0, 2], "tpr": [0, 1]}}}))
    with pytest.raises(ArtifactError, match=r"roc\.json"):
        save_roc_plot(run_of(0.6, 0.5), tmp_path / "roc.png")
    write_json(tmp_path / "roc.json", {"original": {}})
    assert save_roc_plot(run_of(0.6, 0.5), tmp_path / "roc.png").is_file()
