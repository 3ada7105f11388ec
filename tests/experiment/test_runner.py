from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sfu.errors import ArtifactError, ConfigError, DataError, SingularHessianError
from sfu.experiment import stages
from sfu.experiment.resources import measured
from sfu.experiment.runner import run
from sfu.experiment.validate import resolve_device, validate
from sfu.files import replacing, write_text
from sfu.heads.linear import LinearHead
from sfu.results.artifacts import finite, read_metrics, remove_results, write_json
from sfu.seeds import PURPOSES, resolve_seeds
from sfu.settings import (
    CurvatureConfig,
    DatasetConfig,
    HeadConfig,
    LoggerConfig,
    LossConfig,
    RunConfig,
    Training,
)
from sfu.unlearning.rows import make_methods

ROWS = ["original", "retrained", "unlearned_plus", "unlearned_minus", "closed_form", "unlearned_minus_paper"]


def config_for(path: Path | None = None, **changes: object) -> RunConfig:
    dataset = (
        DatasetConfig(name="features", path=str(path)) if path else DatasetConfig(name="digits", normalize_rows=True)
    )
    config = RunConfig(
        dataset=dataset, head=HeadConfig(name="linear"), loss=LossConfig(name="quadratic"),
        logger=LoggerConfig(name="none"), methods=list(ROWS),
    )  # fmt: skip
    config.backbone.name = "none"
    config.curvature.perturbations = 60
    for key, value in changes.items():
        node: object = config
        *parents, last = key.split("__")
        for parent in parents:
            node = getattr(node, parent)
        assert hasattr(node, last), key
        setattr(node, last, value)
    return config


def test_all_rows_on_real_digits(tmp_path):
    metrics = run(config_for(), tmp_path, show_progress=False)
    rows = metrics["rows"]
    assert list(rows) == ROWS
    assert rows["original"]["distance"] == 1.0
    assert rows["retrained"]["distance"] == 0.0
    assert rows["unlearned_plus"]["distance"] < 1e-6
    assert rows["closed_form"]["distance"] < 0.6
    assert rows["unlearned_minus"]["distance"] == pytest.approx(rows["closed_form"]["distance"], rel=1e-3)
    assert rows["unlearned_minus_paper"]["distance"] > 1
    assert not any(row.get("error") for row in rows.values())
    about = metrics["run"]
    assert (about["data"]["n_train"], about["data"]["n_forget"], about["data"]["n_retain"]) == (1437, 144, 1293)
    for name, row in rows.items():
        assert 0 <= row["test_accuracy"] <= 100
        assert row["test_gap"] == pytest.approx(row["test_accuracy"] - rows["retrained"]["test_accuracy"])
        assert row["seconds"] > 0
        assert row["peak_memory_mb"] > 10
        saved = LinearHead.load(tmp_path / "heads" / name)
        assert saved.n_classes == 10
    split = load_file(tmp_path / "split.safetensors")
    assert split["forget_indices"].numel() == 144
    assert not set(split["forget_indices"].tolist()) & set(split["retain_indices"].tolist())


def test_the_numbers_follow_the_seeds_alone(tmp_path, feature_file):
    def rows(**changes: object) -> str:
        metrics = run(config_for(feature_file, **changes), tmp_path, show_progress=False)
        kept = {
            n: {k: v for k, v in r.items() if "seconds" not in k and "memory" not in k}
            for n, r in metrics["rows"].items()
        }
        for row in kept.values():
            row["details"].pop("fit_seconds", None)
        return json.dumps(kept, sort_keys=True)

    base = rows()
    assert rows() == base
    assert rows(seed=1) != base
    assert rows(seeds__perturbation=5) != base
    assert rows(seed=1, **{f"seeds__{k}": v for k, v in resolve_seeds(config_for()).items() if k in PURPOSES}) == base


def test_training_and_forgetting_as_configured(tmp_path, feature_file):
    adam = run(config_for(feature_file, head__training=Training.adam, head__bias=True), tmp_path, show_progress=False)
    assert adam["run"]["head"]["gradient_norm"] > 1e-6
    classes = run(config_for(feature_file, forget__classes=[2]), tmp_path, show_progress=False)
    assert classes["run"]["forget"]["kind"] == "classes"
    assert classes["rows"]["retrained"]["forget_accuracy"] < 20
    assert classes["rows"]["original"]["forget_accuracy"] > 50


def test_float32_runs_and_is_close(tmp_path, feature_file):
    methods = ["original", "retrained", "unlearned_plus", "closed_form"]
    double = run(config_for(feature_file, methods=methods), tmp_path, show_progress=False)["rows"]
    single = run(config_for(feature_file, methods=methods, dtype="float32"), tmp_path, show_progress=False)["rows"]
    assert single["closed_form"]["distance"] == pytest.approx(double["closed_form"]["distance"], rel=0.02)
    assert single["unlearned_plus"]["distance"] < 1e-3


def test_without_a_retrained_row_the_distance_is_the_same(tmp_path, feature_file):
    both = [
        run(config_for(feature_file, methods=m), tmp_path, show_progress=False)["rows"]["closed_form"]
        for m in (["closed_form"], ["retrained", "closed_form"])
    ]
    assert both[0]["distance"] == pytest.approx(both[1]["distance"], rel=1e-12)
    assert both[0]["test_gap"] == both[1]["test_gap"]


def test_a_failing_row_does_not_take_the_others_with_it(tmp_path, feature_file, monkeypatch):
    from sfu.curvature.estimators.hessians import ForgetHessian

    def broken(*_: object) -> None:
        raise RuntimeError("it broke")

    monkeypatch.setattr(ForgetHessian, "estimate", broken)
    rows = run(config_for(feature_file), tmp_path, show_progress=False)["rows"]
    assert rows["closed_form"]["error"] == "RuntimeError: it broke"
    assert rows["unlearned_minus"]["distance"] < 1


def test_when_retraining_fails_the_other_rows_are_still_scored(tmp_path, feature_file, monkeypatch):
    from sfu.unlearning.methods import retrained

    def singular(*_: object, **__: object) -> None:
        raise SingularHessianError("singular")

    monkeypatch.setattr(retrained, "train_like", singular)
    for methods in (["original", "closed_form"], ["original", "retrained", "closed_form"]):
        rows = run(config_for(feature_file, methods=methods), tmp_path, show_progress=False)["rows"]
        assert rows["closed_form"]["distance"] is None
        assert rows["closed_form"]["test_gap"] is None
        assert rows["closed_form"]["test_accuracy"] > 50
    assert "singular" in rows["retrained"]["error"]


def test_a_folder_used_again_holds_nothing_stale(tmp_path):
    for name in ("metrics.json", "figure.png", "mine.txt"):
        (tmp_path / name).write_text("old")
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "gone.safetensors").write_text("old")
    remove_results(tmp_path)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["mine.txt"]


def test_variants_stand_side_by_side_each_with_its_own_settings(tmp_path, feature_file):
    config = config_for(feature_file, methods=["unlearned_minus", "few", "undamped", "noisy"])
    config.variants = {
        "few": {"base": "unlearned_minus", "curvature": {"perturbations": 2, "per_class": False}},
        "undamped": {"base": "few", "curvature": {"regularization": "none", "folds": 0}},
        "noisy": {"base": "unlearned_minus", "settings": {"noise_sigma": 1e-3}},
    }
    built = make_methods(config)
    assert [m.curvature.perturbations for m in built.values()] == [60, 2, 2, 60]
    assert built["undamped"].curvature.folds == 0
    assert built["noisy"].noise_sigma == 1e-3
    rows = run(config, tmp_path, show_progress=False)["rows"]
    assert len({row["distance"] for row in rows.values()}) == 4


def test_the_paper_row_takes_the_runs_perturbations_and_keeps_its_own_rules():
    paper = make_methods(config_for())["unlearned_minus_paper"].curvature
    assert paper.perturbations == 60
    assert (paper.measurement.value, paper.lower_bound.value, paper.gradient_term.value) == ("loss", "zero", "paper")
    assert paper.force


@pytest.mark.parametrize(
    ("variants", "methods", "message"),
    [
        ({}, ["nothing_like_it"], r"'nothing_like_it' is unknown; sfu has .*closed_form, .*original"),
        ({}, ["../../etc/passwd"], "is unknown"),
        ({}, ["original", "original"], "lists a row twice"),
        ({"a": {"base": "a"}}, ["a"], "circle"),
        ({"a": {"bass": "closed_form"}}, ["a"], r"variants\.a: .*It may hold base, method"),
        ({"a": 3}, ["a"], r"variants\.a"),
        ({"a": {"method": "os.system"}}, ["a"], r"row 'a': method=os\.system is unknown"),
        (
            {"a": {"base": "closed_form", "curvature": {"rhoo": 1}}},
            ["a"],
            r"'rhoo' not in 'CurvatureConfig'.*takes estimator",
        ),
        ({"a": {"base": "closed_form", "curvature": {"rho": "x"}}}, ["a"], "could not be converted"),
        ({"a": {"base": "closed_form", "curvature": "nope"}}, ["a"], "names the curvature 'nope'"),
        (
            {"a": {"base": "closed_form", "settings": {"sigma": 1}}},
            ["a"],
            r"sigma is not a setting of method=newton\. It takes curvature, noise_sigma, steps, batches",
        ),
    ],
)
def test_rows_that_cannot_be_built(variants, methods, message):
    with pytest.raises(ConfigError, match=message):
        make_methods(config_for(variants=variants, methods=methods))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("head__l2", -1e-3, r"head\.l2=-0\.001"),
        ("head__l2", float("nan"), r"head\.l2=nan"),
        ("methods", [], r"methods=\[\]"),
        ("dtype", "float16", "float64, float32"),
        ("dataset__name", "imagenet", "digits, features"),
        ("dataset__test_fraction", 1.0, "test_fraction"),
        ("dataset__n_classes", 1, "n_classes"),
        ("loss__target_scale", 0.0, "target_scale"),
        ("newton__noise_sigma", -0.1, "noise_sigma"),
        ("forget__fraction", 0.0, r"forget\.fraction=0\.0"),
        ("forget__indices", "missing.txt", "is not a file"),
        ("seed", -1, "seed=-1"),
    ],
)
def test_settings_out_of_range_are_named(key, value, message):
    validate(config_for())
    with pytest.raises(ConfigError, match=message):
        validate(config_for(**{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("perturbations", 0),
        ("scale", 0.0),
        ("scale", float("inf")),
        ("rho", -1.0),
        ("folds", 1),
        ("folds", 0),
        ("tolerance", 0.0),
        ("prior_strength", -1.0),
        ("max_iterations", 0),
    ],
)
def test_curvature_out_of_range_is_named_with_its_row(key, value):
    config = config_for(methods=["unlearned_minus"])
    config.curvature = CurvatureConfig(**{key: value})
    with pytest.raises(ConfigError, match=rf"'unlearned_minus': curvature\..*{key}"):
        make_methods(config)


def test_devices():
    assert resolve_device("cpu").type == "cpu"
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("cuda:99", "tpu9", "meta"):
        with pytest.raises(ConfigError, match=f"device={name}"):
            resolve_device(name)


def test_a_dataset_that_changes_under_way_is_noticed(tmp_path, feature_file, arrays, monkeypatch):
    real = stages.discard

    def meddle(prepared):
        arrays["test_features"][0, 0] += 1
        np.savez(feature_file, **arrays)
        real(prepared)

    monkeypatch.setattr(stages, "discard", meddle)
    with pytest.raises(DataError, match="changed while the run was under way"):
        run(config_for(feature_file), tmp_path, show_progress=False)


def test_too_many_folds_are_refused_before_training(tmp_path, feature_file, monkeypatch):
    monkeypatch.setattr(stages, "train_head", lambda *a, **k: pytest.fail("trained first"))
    with pytest.raises(ConfigError, match=r"curvature\.folds=5 but there are only 4"):
        run(config_for(feature_file, forget__fraction=0.01, curvature__folds=5), tmp_path, show_progress=False)


def test_derived_seeds_differ_by_purpose_and_seed():
    one, two = resolve_seeds(config_for()), resolve_seeds(config_for(seed=1))
    assert len(set(one.values()) | set(two.values())) == 2 * len(one)


def test_json_files_are_whole_or_absent(tmp_path):
    write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(ValueError, match=r"Out of range|not JSON compliant"):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "a.json") as temporary:
        temporary.write_text(f"half {1 / 0}")
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["a.json"]
    with pytest.raises(ArtifactError, match="free some space"):
        write_text(tmp_path / "a.json" / "b", "x")
    assert finite({"a": [float("inf"), 1.0], "b": (float("nan"),)}) == {"a": [None, 1.0], "b": [None]}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2}'])
def test_foreign_metrics_are_refused(tmp_path, text):
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"metrics\.json"):
        read_metrics(tmp_path / "metrics.json")


def test_memory_is_measured(tmp_path):
    with measured(torch.device("cpu")) as small:
        pass
    with measured(torch.device("cpu")) as large:
        block = torch.ones(200_000_000)
        del block
    assert large.peak_memory_mb - small.peak_memory_mb > 400
