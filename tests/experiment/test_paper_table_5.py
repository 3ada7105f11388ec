"""The comparison methods in whole runs: the paper's table on digits under every rule, refusals, and the contract."""

from __future__ import annotations

import json

import pytest

from sfu.data.datasets.base import Dataset
from sfu.data.load import load_dataset
from sfu.errors import ConfigError, DataError
from sfu.experiment.validate import validate
from sfu.heads.files import load_head
from sfu.reporting.text_tables import markdown_table
from sfu.request import Access
from sfu.results.aggregate import aggregate
from sfu.unlearning.methods.neg_grad import NegGrad
from sfu.unlearning.rows import make_methods
from sfu.unlearning.settings import Tune
from sfu.unlearning.tuning import Oracle, SourceFree
from tests.experiment.cases import composed, config_for, run

QUICK = (
    "logger=none", "curvature.perturbations=60", "evaluation.membership_splits=2",
    "+variants.quick_adversarial={method:adversarial,settings:{examples:1,attack_steps:10,step_size:0.5,max_steps:5},"
    "grid:{lr:[1e-3,1e-2,0.1],importance:[0.1,1,10]}}",
)  # fmt: skip
UPPER = {"retrained", "unlearned_plus", "fine_tune", "neg_grad_plus", "scrub", "ssd", "fisher", "delta_grad", "sisa"}
UNTUNED = {"original", "retrained", "unlearned_plus", "delta_grad", "sisa"}


def test_table_5_on_digits_under_the_three_rules(tmp_path):
    runs = []
    for rule in Tune:
        folder = tmp_path / rule.value
        config = composed("experiment=paper_table_5", f"tune={rule.value}", *QUICK)
        config.methods[config.methods.index("adversarial")] = "quick_adversarial"
        metrics = run(config, folder)
        rows = metrics["rows"]
        assert list(rows) == config.methods
        assert not {name: row["error"] for name, row in rows.items() if row.get("error")}
        assert {name for name, row in rows.items() if row["access"] == "retained"} == UPPER
        assert metrics["run"]["tune"] == {"rule": rule.value, "budget": 9}
        marks = {name: row["tuning"] for name, row in rows.items()}
        assert {name for name, mark in marks.items() if mark is None} == (
            set(rows) if rule is Tune.authors else UNTUNED
        )
        assert metrics["run"]["published"] == "table_5"
        assert rows["unlearned_minus"]["distance"] < 0.6
        assert all(row["seconds"] >= 0 and row["peak_memory_mb"] > 0 for row in rows.values())
        trade_off = json.loads((folder / "trade_off.json").read_text())
        assert len(trade_off["fine_tune"]["test_accuracy"]) > 40
        assert trade_off["neg_grad"]["forget_accuracy"][-1] == rows["neg_grad"]["forget_accuracy"]
        assert trade_off["retrained"]["test_accuracy"] == [rows["retrained"]["test_accuracy"]]
        runs.append(({"tune": rule.value, "seed": "0"}, metrics))
    published, source_free, oracle = (metrics["rows"] for _, metrics in runs)
    for name in set(published) - UNTUNED:  # the oracle is the best on the grid, so no worse than the other choice
        assert oracle[name]["distance"] <= source_free[name]["distance"] + 1e-9
        assert oracle[name]["tuning"] == "oracle (not source-free)"
        assert oracle[name]["details"]["tuned.tried"] == 9
    table = markdown_table(aggregate(runs))
    assert "| oracle | neg_grad (oracle (not source-free)) |" in table
    assert "| source_free | neg_grad |" in table


def test_a_forget_only_method_that_touches_the_retained_data_fails(tmp_path, feature_file):
    class Peeks(NegGrad):
        def unlearn(self, request, context, retained=None):
            assert retained is None
            load_dataset(Dataset.make(name="features", path=str(feature_file)), 0)
            return super().unlearn(request, context)

    honest = NegGrad()
    assert Peeks().access is Access.FORGET
    candidates = [({"lr": 1}, honest), ({"lr": 2}, Peeks())]
    methods = {"peeks": Peeks(), "source_free": SourceFree(candidates, honest), "oracle": Oracle(candidates, honest)}
    rows = run(config_for(feature_file), tmp_path, methods=methods)["rows"]
    assert list(rows) == list(methods)
    for row in rows.values():
        assert "SourceFreeError" in row["error"]
        assert "test_accuracy" not in row


def test_a_learning_rate_that_diverges_is_reported_and_leaves_no_head(tmp_path, feature_file):
    config = config_for(
        feature_file, methods=["original", "fast"], variants={"fast": {"base": "neg_grad", "settings": {"lr": 1e3}}}
    )
    config.evaluation.trade_off = True
    rows = run(config, tmp_path)["rows"]
    assert "DivergedError: diverged at step" in rows["fast"]["error"]
    assert rows["fast"]["applied"] is False
    assert "distance" not in rows["fast"]
    assert not (tmp_path / "heads" / "fast.safetensors").exists()
    assert list(json.loads((tmp_path / "trade_off.json").read_text())) == ["original"]
    assert load_head(tmp_path / "heads" / "original").n_features == 12


@pytest.mark.parametrize("method", ["emmn", "gkt"])
@pytest.mark.parametrize("forget", [{"forget__fraction": 0.1}, {"forget__classes": [2], "forget__fraction": 0.5}])
@pytest.mark.parametrize("rule", list(Tune))
def test_class_methods_refuse_instances_before_training(tmp_path, feature_file, method, forget, rule):
    hopeless = ("loss=softmax", "head.max_iterations=1")  # training would raise another error
    config = config_for(feature_file, *hopeless, methods=[method], tune=rule, **forget)
    with pytest.raises(ConfigError, match=r"forgets whole classes only, .* or remove"):
        run(config, tmp_path)


def test_a_request_for_all_classes_is_refused(tmp_path, feature_file):
    config = config_for(feature_file, methods=["emmn"], forget__classes=[0, 1, 2, 3])
    with pytest.raises(DataError, match="nothing would be left to retain"):
        run(config, tmp_path)


def test_class_methods_in_a_run(tmp_path, feature_file):
    variants = {"teach": {"base": "gkt", "settings": {"batches": 10, "noise": 8, "threshold": 0.3}}}
    config = config_for(
        feature_file, methods=["original", "retrained", "emmn", "teach", "neg_grad"], variants=variants,
        forget__classes=[2], tune=Tune.source_free,
    )  # fmt: skip
    config.variants["teach"]["grid"] = {"lr": [1e-3] * 9}
    rows = run(config, tmp_path)["rows"]
    assert not any(row.get("error") for row in rows.values())
    assert "settings as published: the forget set is unlike a random sample" in rows["neg_grad"]["note"]
    assert rows["retrained"]["forget_accuracy"] < 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"published": "table_9"}, r"published=table_9 is unknown\. Choose one of .*table_5"),
        ({"tune_budget": 0}, "tune_budget=0"),
    ],
)
def test_settings_that_cannot_work_are_named_before_any_work(changes, message):
    with pytest.raises(ConfigError, match=message):
        validate(config_for(**changes))
    with pytest.raises(ConfigError, match="its grid has 9 settings, but tune_budget=3"):
        make_methods(config_for(methods=["neg_grad"], tune=Tune.oracle, tune_budget=3))
