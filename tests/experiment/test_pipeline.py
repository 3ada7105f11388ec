"""Whole runs on features: every row, seeds, training, variants, and what happens when a part fails."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sfu.errors import ConfigError, DataError
from sfu.experiment.resources import measured
from sfu.heads.files import load_head
from sfu.seeds import PURPOSES
from sfu.unlearning.rows import make_methods
from tests.experiment.cases import ROWS, config_for, run


def test_all_rows_on_real_digits(tmp_path):
    metrics = run(config_for(), tmp_path)
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
        saved = load_head(tmp_path / "heads" / name)
        assert saved.n_classes == 10
    split = load_file(tmp_path / "split.safetensors")
    assert split["forget_indices"].numel() == 144
    assert not set(split["forget_indices"].tolist()) & set(split["retain_indices"].tolist())


def test_the_numbers_follow_the_seeds_alone(tmp_path, feature_file):
    methods = ["original", "retrained", "unlearned_minus", "unlearned_minus_paper"]

    def rows(**changes: object) -> str:
        config = config_for(feature_file, methods=methods, curvature__perturbations=20, **changes)
        found = run(config, tmp_path)["rows"]
        for row in found.values():
            del row["seconds"], row["peak_memory_mb"]
            row["details"].pop("fit_seconds", None)
        return json.dumps(found, sort_keys=True)

    base = rows()
    assert rows() == base
    assert rows(seed=1) != base
    for purpose in set(PURPOSES.values()) - {"training"}:  # exact training has no order of rows
        assert rows(**{f"seed_for__{purpose}": 5}) != base
    assert rows(seed=1, **{f"seed_for__{purpose}": 0 for purpose in PURPOSES.values()}) == base


def test_training_and_forgetting_as_configured(tmp_path, feature_file):
    methods = ["original", "retrained"]
    adam = run(config_for(feature_file, "head.training=adam", methods=methods, head__bias=True), tmp_path)
    assert adam["run"]["head"]["gradient_norm"] > 1e-6
    classes = run(config_for(feature_file, methods=methods, forget__classes=[2]), tmp_path)
    assert classes["run"]["forget"]["kind"] == "classes"
    assert classes["rows"]["retrained"]["forget_accuracy"] < 20
    assert classes["rows"]["original"]["forget_accuracy"] > 50


def test_a_request_may_come_in_parts_for_every_method(tmp_path, feature_file):
    methods = ["original", "retrained", "unlearned_plus", "closed_form", "neg_grad", "fine_tune"]
    parts = run(config_for(feature_file, methods=methods, forget__parts=4), tmp_path)["rows"]
    whole = run(config_for(feature_file, methods=methods), tmp_path)["rows"]
    batches = run(config_for(feature_file, methods=["retrained", "closed_form"], newton__batches=4), tmp_path)["rows"]
    assert parts["unlearned_plus"]["distance"] < 1e-6  # each part starts from the head of the one before
    assert parts["retrained"]["distance"] == whole["retrained"]["distance"] == 0
    assert parts["original"]["distance"] == 1
    assert parts["closed_form"]["distance"] == pytest.approx(batches["closed_form"]["distance"])
    assert parts["closed_form"]["distance"] != whole["closed_form"]["distance"]
    assert parts["neg_grad"]["distance"] != whole["neg_grad"]["distance"]
    assert parts["fine_tune"]["details"]["batches"] == 4
    with pytest.raises(ConfigError, match=r"forget\.parts=4 does not go with tune=oracle"):
        run(config_for(feature_file, "tune=oracle", forget__parts=4), tmp_path)


def test_float32_runs_and_is_close(tmp_path, feature_file):
    methods = ["original", "retrained", "unlearned_plus", "closed_form"]
    double = run(config_for(feature_file, methods=methods), tmp_path)["rows"]
    single = run(config_for(feature_file, methods=methods, dtype="float32"), tmp_path)["rows"]
    assert single["closed_form"]["distance"] == pytest.approx(double["closed_form"]["distance"], rel=0.02)
    assert single["unlearned_plus"]["distance"] < 1e-3


def test_without_a_retrained_row_the_distance_is_the_same(tmp_path, feature_file):
    both = [
        run(config_for(feature_file, methods=m), tmp_path)["rows"]["closed_form"]
        for m in (["closed_form"], ["retrained", "closed_form"])
    ]
    assert both[0]["distance"] == pytest.approx(both[1]["distance"], rel=1e-12)
    assert both[0]["test_gap"] == both[1]["test_gap"]


def test_when_retraining_fails_the_other_rows_are_still_scored(tmp_path, feature_file, arrays):
    """Without l2 and without the one row that has its first feature, the Gram matrix is singular."""
    arrays["train_features"][1:, 0] = 0
    np.savez(feature_file, **arrays)
    (tmp_path / "rows.txt").write_text("\n".join(map(str, range(60))))
    for methods in (["original", "closed_form"], ["original", "retrained", "closed_form"]):
        config = config_for(feature_file, methods=methods, head__l2=0.0, forget__indices=str(tmp_path / "rows.txt"))
        rows = run(config, tmp_path)["rows"]
        assert rows["closed_form"]["distance"] is None
        assert rows["closed_form"]["test_gap"] is None
        assert rows["closed_form"]["test_accuracy"] > 50
    assert "singular" in rows["retrained"]["error"]


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
    rows = run(config, tmp_path)["rows"]
    assert len({row["distance"] for row in rows.values()}) == 4


def test_a_dataset_that_changes_under_way_is_noticed(tmp_path, feature_file, arrays):
    def change_the_file(stage, seconds):
        if stage == "prepare":
            arrays["test_features"][0, 0] += 1
            np.savez(feature_file, **arrays)

    with pytest.raises(DataError, match="changed while the run was under way"):
        run(config_for(feature_file, methods=["original"]), tmp_path, on_stage=change_the_file)


def test_too_many_folds_are_refused_before_training(tmp_path, feature_file):
    hopeless = ("loss=softmax", "head.max_iterations=1")  # training would raise another error
    config = config_for(feature_file, *hopeless, forget__fraction=0.01, curvature__folds=5)
    with pytest.raises(ConfigError, match=r"curvature\.folds=5 but there are only 4"):
        run(config, tmp_path)


def test_memory_is_measured():
    with measured(torch.device("cpu")) as small:
        pass
    with measured(torch.device("cpu")) as large:
        block = torch.ones(200_000_000)
        del block
    assert large.peak_memory_mb - small.peak_memory_mb > 400
