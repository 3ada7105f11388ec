"""The scripts that documents name can be imported, and say what they do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.reporting.scripts import load_script

SCRIPTS = sorted(path.stem for path in (Path(__file__).resolve().parents[1] / "scripts").glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_can_be_imported_and_is_described(name):
    script = load_script(name)
    assert callable(script.main)
    assert script.__doc__


def test_the_cost_of_a_step_is_held_against_a_limit(monkeypatch, capsys):
    script = load_script("bench_cost")
    more = script.Case("softmax", 3, 8, 400, 40, views=2, unlabelled=50)
    monkeypatch.setattr(script, "QUICK", [script.Case("quadratic", 2, 40, 400, 20), more])
    assert script.main(["--quick", "--limit", "1e9"]) == 0
    printed = capsys.readouterr().out
    assert "in 22 features" in printed
    assert "2 views, 50 unlabelled" in printed
    assert "SLOWER" not in printed
    assert script.main(["--quick", "--limit", "0", "--least", "0", "--only", "1"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("SLOWER") == 1
    assert "1 of the steps took longer" in printed


def test_heads_in_practice_are_held_against_the_effect_of_forgetting(monkeypatch, capsys):
    script = load_script("heads_in_practice")
    arguments = ["--quick", "--rows", "300", "--only", "RidgeClassifier(alpha=1)", "--only", "SGD, cosine, BCE"]
    monkeypatch.setattr(script, "PROMISED", (-99.0, 99.0))
    assert script.main([*arguments, "--more"]) == 0
    header, descended, fitted, _ = (re.split(r"  +", line) for line in capsys.readouterr().out.splitlines())
    row = dict(zip(header, fitted, strict=True))
    assert (row["l2"], row["known"], row["noise"]) == ("3.33e-03", "0.00", "0.00")
    assert float(row["distance"]) < 0.8
    assert float(descended[header.index("noise")]) > 0.3  # of two seeds
    assert "outside" not in descended[-1]  # nothing is measured then
    monkeypatch.setattr(script, "PROMISED", (98.0, 99.0))
    assert script.main(arguments) == 1
    assert "outside 98 to 99" in capsys.readouterr().out


def test_mistakes_are_refused_by_name_and_what_is_right_is_not(monkeypatch, capsys):
    script = load_script("mistakes")
    assert script.main(["--quick"]) == 0
    printed = capsys.readouterr().out
    assert re.search(
        r"^one-hot +told as \+-1 targets +refused: loss=make_loss\('quadratic', other_target=-1\)", printed, re.M
    )
    assert re.search(r"^softmax, SGD +rows not trained on +\d+ of 10 refused, ", printed, re.M)
    assert printed.endswith("0 of 36 are wrong.\n")
    monkeypatch.setattr(script, "serve", lambda head, rows, kind="random": ("no", head))
    assert script.main(["--only", "one-hot"]) == 1
    assert re.search(r"^one-hot +right +refused: no  WRONG$", capsys.readouterr().out, re.M)


def test_all_benchmarks_are_run_by_one_command(monkeypatch, capsys, tmp_path):
    script = load_script("bench")
    assert {one.script for one in script.BENCHMARKS.values()} <= {f"{name}.py" for name in SCRIPTS}
    (tmp_path / "good.py").write_text("import sys\nprint('ratio 2', len(sys.argv))\n")
    (tmp_path / "bad.py").write_text("raise SystemExit(3)\n")
    monkeypatch.setattr(script, "FOLDER", tmp_path)
    some = {"good": script.Benchmark("good.py", "nothing", ("PATH",)), "bad": script.Benchmark("bad.py", "nothing")}
    monkeypatch.setattr(script, "BENCHMARKS", some)
    assert script.main(["--quick", "--json", str(tmp_path / "bench.json")]) == 1
    assert "Failed: bad." in capsys.readouterr().out
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["benchmarks"]["good"]["output"] == ["ratio 2 2"]
    assert found["benchmarks"]["good"]["options"] == ["--quick"]
    assert found["benchmarks"]["bad"]["exit"] == 3
    assert torch.__version__.startswith(found["environment"]["versions"]["torch"])
    assert script.main(["--only", "good", "--json", str(tmp_path / "bench.json")]) == 0
    assert json.loads((tmp_path / "bench.json").read_text())["benchmarks"]["good"]["options"] == ["PATH"]
