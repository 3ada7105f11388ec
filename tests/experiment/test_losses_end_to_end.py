"""Whole runs under every loss: configuration, training, methods, evaluation, files."""

from __future__ import annotations

import pytest

from sfu.errors import ConfigError, DataError
from sfu.experiment.validate import validate
from sfu.heads.files import load_head
from sfu.heads.settings import Keep, Training
from sfu.operators.structure import Structure
from sfu.unlearning.rows import make_methods
from tests.experiment.cases import config_for, run

ROWS = ["original", "retrained", "unlearned_plus", "plus_2", "stored", "unlearned_minus", "closed_form"]
TWO_STEPS = {"plus_2": {"base": "unlearned_plus", "settings": {"steps": 2}}}


@pytest.mark.parametrize("loss", ["logistic", "softmax", "huber_hinge", "squared_hinge"])
def test_a_run_under_every_loss(loss, tmp_path, feature_file):
    own = {"loss__smoothing": 1.0} if loss == "huber_hinge" else {}
    config = config_for(
        feature_file, f"loss={loss}", methods=list(ROWS), variants=TWO_STEPS, loss__class_weights="balanced",
        head__keep=Keep.full, head__bias=True, curvature__perturbations=None, forget__fraction=0.25,
        head__l2=1e-2, **own,
    )  # fmt: skip
    metrics = run(config, tmp_path)
    rows = metrics["rows"]
    assert not any(row.get("error") for row in rows.values())
    assert rows["plus_2"]["distance"] < 0.5 * rows["unlearned_plus"]["distance"] < 0.3
    assert rows["stored"]["distance"] == pytest.approx(rows["unlearned_plus"]["distance"], rel=1e-6)
    assert rows["closed_form"]["distance"] < 0.9
    assert rows["closed_form"]["access"] == "forget"
    assert rows["retrained"]["retain_gradient_norm"] < 1e-8 < rows["original"]["retain_gradient_norm"]
    about = metrics["run"]["head"]
    assert about["gradient_norm"] <= 1e-8
    assert about["loss"]["name"] == loss
    saved = load_head(tmp_path / "heads" / "original")
    assert saved.loss.name == loss
    assert saved.loss.class_weights == pytest.approx((1.0, 1.0, 1.0, 1.0))
    assert saved.kept.data_hessian is not None


def test_certified_removal_as_a_row(tmp_path):
    config = config_for(
        None, "loss=logistic", methods=["original", "retrained", "certified_removal", "closed_form"],
        head__objective_noise=10.0, forget__fraction=0.02, newton__batches=5, head__l2=1e-2,
        seed_for__objective=3,
    )  # fmt: skip
    metrics = run(config, tmp_path)
    assert metrics["run"]["seeds"]["objective"] == 3
    row = metrics["rows"]["certified_removal"]
    assert row["note"].startswith("epsilon 0.")
    assert "of 1 (delta 0.0001) spent, 5 of 5 batches" in row["note"]
    assert "seed_for.objective" in row["note"]
    assert row["access"] == "retained"
    assert row["details"]["batches"] == 5
    assert row["details"]["budget_spent"] <= row["details"]["budget"]
    assert (row["details"]["epsilon"], row["details"]["delta"]) == (1.0, 1e-4)
    assert row["distance"] < 0.1
    saved = load_head(tmp_path / "heads" / "certified_removal").certificate
    assert saved.residual_bound == row["details"]["budget_spent"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss__target_scale": 0.0}, r"loss\.target_scale=0\.0\. Give a finite number above 0"),
        ({"loss__class_weights": "balnced"}, r"loss\.class_weights=balnced is not a list\. Give null, balanced, or"),
        (
            {"loss__class_weights": [1, "x"]},
            r"loss\.class_weights=\[1, 'x'\] are not all numbers\. Give null",
        ),
        ({"loss__class_weights": [1, -1]}, r"loss\.class_weights=\[1\.0, -1\.0\] are not all above 0"),
        ({"head__tolerance": 0.0}, r"head\.tolerance=0"),
        ({"head__max_iterations": 0}, r"head\.max_iterations=0"),
        ({"head__objective_noise": -1.0}, r"head\.objective_noise=-1"),
        (
            {"head__objective_noise": 1.0, "head__training": Training.adam},
            r"head\.objective_noise=1 needs head\.training=exact, not adam",
        ),
        ({"newton__steps": 0}, r"newton\.steps=0"),
        ({"newton__batches": 0}, r"newton\.batches=0"),
    ],
)
def test_settings_that_cannot_work_are_named_before_any_work(changes, message):
    with pytest.raises(ConfigError, match=message):
        validate(config_for(**changes))


CERTIFIED = {"methods": ["certified_removal"], "head__objective_noise": 1.0}


@pytest.mark.parametrize(
    ("loss", "changes", "message"),
    [
        ("softmax", {"curvature__structure": Structure.shared}, "Choose one of auto, dense, blocks, products"),
        ("quadratic", {"curvature__structure": Structure.dense}, "Choose one of auto, shared, products"),
        ("quadratic", {"methods": ["certified_removal"]}, r"needs head\.objective_noise above 0"),
        ("quadratic", {**CERTIFIED, "head__bias": True}, r"head\.bias=false"),
        ("quadratic", {**CERTIFIED, "head__l2": 0.0}, r"head\.l2 above 0"),
        ("huber_hinge", CERTIFIED, "loss=huber_hinge has none. Use logistic"),
        ("quadratic", {**CERTIFIED, "dtype": "float32"}, "dtype=float32"),
        ("softmax", {**CERTIFIED, "loss__class_weights": "balanced"}, "class_weights=balanced"),
    ],
)
def test_rows_that_cannot_work_are_named_before_any_work(loss, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_methods(config_for(None, f"loss={loss}", **changes))


def test_class_weights_that_do_not_fit_the_data_are_refused_before_training(tmp_path):
    with pytest.raises(
        (ConfigError, DataError), match=r"loss\.class_weights=\[1\.0, 2\.0\] has 2 entries for 10 classes"
    ):
        run(config_for(None, "loss=softmax", loss__class_weights=[1, 2]), tmp_path)
