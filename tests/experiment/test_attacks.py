"""Attacks in whole runs: what they find, what shadows may see, and what is told where an attack cannot be made."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from sfu.errors import ConfigError
from sfu.evaluation.attacks.optimal_noise import exact_figures
from sfu.evaluation.attacks.statistics import measure
from sfu.experiment.config import EvaluationSettings
from sfu.heads import subsets
from sfu.heads.files import load_head
from sfu.results.artifacts import read_metrics, write_json
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.methods.baselines import GradientStep
from sfu.unlearning.result import UnlearningResult
from tests.conftest import make_arrays
from tests.experiment.cases import composed, config_for, run

ALL = ["paper", "loss_threshold", "entropy", "rmia", "lira", "ulira"]


def attacked(path: Path, folder: Path, *attacks: str, shadows: int = 16, methods=None, **changes: object):
    config = config_for(path, evaluation__attacks=list(attacks), evaluation__shadows=shadows, **changes)
    config.methods = config.methods if methods is None else methods
    return run(config, folder)["rows"]


@pytest.fixture
def memorised(tmp_path: Path) -> Path:
    """As many rows as features and a half, which an unregularised head learns by heart."""
    rng = np.random.default_rng(0)
    centers = 0.3 * rng.normal(size=(3, 100))
    labels = [rng.permutation(np.arange(150) % 3) for _ in range(2)]
    features = [(centers[one] + rng.normal(size=(150, 100))).astype(np.float32) for one in labels]
    path = tmp_path / "memorised.npz"
    np.savez(path, train_features=features[0], train_labels=labels[0], test_features=features[1], test_labels=labels[1])
    return path


def test_a_head_that_learned_by_heart_is_caught_and_unlearning_is_between_it_and_retraining(tmp_path, memorised):
    """``closed_form`` is what ``unlearned_minus`` fits, and quicker."""
    methods = ["original", "retrained", "unlearned_plus", "closed_form"]
    rows = attacked(
        memorised, tmp_path, "lira", "ulira", shadows=32, methods=methods, head__l2=1e-8, forget__fraction=0.3
    )
    found = {name: row["attacks"]["ulira"] for name, row in rows.items()}
    assert found["original"]["auc"] > 0.7
    assert found["original"]["auc"] == rows["original"]["attacks"]["lira"]["auc"]  # nothing was unlearned
    assert found["unlearned_plus"]["auc"] == pytest.approx(found["retrained"]["auc"], abs=1e-3)
    for name in ("retrained", "unlearned_plus"):
        low, high = found[name]["auc_interval"]
        assert low <= 0.5 <= high
    assert found["retrained"]["auc"] < found["closed_form"]["auc"] < found["original"]["auc"]
    assert found["closed_form"]["auc_gap"] == pytest.approx(found["closed_form"]["auc"] - found["retrained"]["auc"])


def test_every_attack_leaves_figures_and_a_curve(tmp_path, feature_file):
    rows = attacked(feature_file, tmp_path, *ALL, methods=["original", "retrained"], forget__fraction=0.2)
    curves = json.loads((tmp_path / "roc.json").read_text())
    for name, row in rows.items():
        assert list(row["attacks"]) == list(curves[name]) == ALL
        for figures in row["attacks"].values():
            low, high = figures["auc_interval"]
            assert 0 <= low <= figures["auc"] <= high <= 1
            assert figures["n_members"] == figures["n_others"]
        assert row["attacks"]["paper"]["accuracy"] == row["mia"]
    assert all(figures["auc_gap"] == 0 for figures in rows["retrained"]["attacks"].values())
    write_json(tmp_path / "metrics.json", {"schema": 1, "rows": rows})
    assert read_metrics(tmp_path / "metrics.json")["rows"] == rows


def test_shadows_of_another_loss(tmp_path, feature_file):
    rows = attacked(
        feature_file, tmp_path, "ulira", shadows=8, methods=["original", "retrained", "gradient_step"],
        loss=composed("loss=softmax").loss, head__l2=1e-2,
    )  # fmt: skip
    assert {row["attacks"]["ulira"]["note"].partition(" ")[0] for row in rows.values()} == {"tpr_at_fpr_0.01"}


def test_shadows_in_small_batches_are_the_same(tmp_path, feature_file, monkeypatch):
    methods = ["original", "retrained", "gradient_step"]
    whole = attacked(feature_file, tmp_path, "lira", "ulira", shadows=9, methods=methods)
    monkeypatch.setattr(subsets, "BATCH_BYTES", 20_000)  # three or four shadows at a time
    parts = attacked(feature_file, tmp_path, "lira", "ulira", shadows=9, methods=methods)
    for name, row in whole.items():
        for attack, figures in row["attacks"].items():
            assert parts[name]["attacks"][attack]["auc"] == pytest.approx(figures["auc"], abs=1e-9)


@pytest.fixture
def threads():
    """Set the number of threads for a test, and so that of the processes of shadows."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_shadows_in_processes_of_their_own_are_those_of_this_process(tmp_path, feature_file, threads):
    methods, figures = ["gradient_step", "rescale"], []
    for isolate, processes in ((False, 1), (True, 1), (True, 3)):
        threads(processes)
        rows = attacked(feature_file, tmp_path, "ulira", shadows=8, methods=methods, isolate=isolate)
        figures.append([row["attacks"]["ulira"]["auc"] for row in rows.values()])
    assert figures[1:] == [pytest.approx(figures[0], abs=1e-9)] * 2


@dataclass(frozen=True)
class Sees(UnlearningMethod):
    """Fails on a shadow, and says what it was given; on the run's own request, it does nothing."""

    own: float

    def unlearn(self, request, context, retained=None):
        if float(request.features_FD.double().sum()) == pytest.approx(self.own, abs=1e-6):
            return UnlearningResult(request.head)
        if retained is not None:
            raise RuntimeError("it was given retained rows")
        raise RuntimeError(f"{request.n_forget} rows of {request.head.n_train}, kept {request.head.kept.data_hessian}")


def test_a_shadow_is_a_request_like_the_run_s_own_and_its_failure_is_told(tmp_path, feature_file):
    config = config_for(feature_file, evaluation__attacks=["lira", "ulira"], evaluation__shadows=8, head__l2=1e-3)
    config.forget.fraction = 0.1
    forget = run(config_for(feature_file, methods=["original"], forget__fraction=0.1), tmp_path) and np.load(
        feature_file
    )
    from safetensors.torch import load_file

    index = load_file(tmp_path / "split.safetensors")["forget_indices"].numpy()
    own = float(torch.from_numpy(forget["train_features"][index]).double().sum())
    row = run(config, tmp_path, methods={"sees": Sees(own)})["rows"]["sees"]
    assert row["attacks"]["ulira"]["note"].endswith("RuntimeError: 40 rows of 400, kept None")
    assert "auc" in row["attacks"]["lira"]


@dataclass(frozen=True)
class Dies(UnlearningMethod):
    """Ends its process at the third request of it, and leaves every head as it is before."""

    def unlearn(self, request, context, retained=None):
        global requests_seen
        requests_seen += 1
        if requests_seen == 3:
            os._exit(7)
        return UnlearningResult(request.head)


requests_seen = 0


def test_one_of_the_processes_of_shadows_may_die(tmp_path, feature_file, threads):
    threads(2)
    config = config_for(feature_file, evaluation__attacks=["ulira"], evaluation__shadows=8, head__l2=1e-3)
    rows = run(config, tmp_path, methods={"dies": Dies(), "step": GradientStep()})["rows"]
    assert rows["dies"]["attacks"]["ulira"]["note"].startswith("shadow 4 was not unlearned: its process ended")
    assert "auc" in rows["step"]["attacks"]["ulira"]


def test_a_row_that_fails_has_no_attacks_and_others_have(tmp_path, feature_file):
    config = config_for(feature_file, evaluation__attacks=["ulira"], evaluation__shadows=8)
    rows = run(config, tmp_path, methods={"sees": Sees(-1.0), "again": Sees(-2.0)})["rows"]
    assert all("attacks" not in row for row in rows.values())


def test_a_test_set_of_other_classes_is_told(tmp_path):
    arrays = make_arrays(n_train=200, n_test=40)
    forget = np.flatnonzero(arrays["train_labels"] == 0)[:10]
    arrays["test_labels"] = 1 + arrays["test_labels"] % 3
    np.savez(tmp_path / "data.npz", **arrays)
    (tmp_path / "rows.txt").write_text("\n".join(map(str, forget)))
    rows = attacked(
        tmp_path / "data.npz", tmp_path, *ALL, methods=["original", "retrained"],
        forget__indices=str(tmp_path / "rows.txt"),
    )  # fmt: skip
    notes = {figures["note"] for name, figures in rows["original"]["attacks"].items() if name != "paper"}
    assert notes == {"there are no test rows of the forgotten classes to compare with"}
    assert rows["original"]["attacks"]["paper"]["accuracy"] is None


def test_five_rows_are_attacked_with_wide_intervals(tmp_path, feature_file):
    (tmp_path / "rows.txt").write_text("3 50 70 101 202")
    rows = attacked(
        feature_file, tmp_path, *ALL, methods=["original", "retrained"], forget__indices=str(tmp_path / "rows.txt")
    )
    figures = rows["original"]["attacks"]["ulira"]
    assert (figures["n_members"], figures["tpr_at_fpr_0.01"]) == (5, None)
    low, high = figures["auc_interval"]
    assert high - low > 0.4


def test_a_whole_class_is_attacked(tmp_path, feature_file):
    rows = attacked(feature_file, tmp_path, "ulira", methods=["original", "retrained"], forget__classes=[1])
    assert {row["attacks"]["ulira"]["n_members"] for row in rows.values()} == {30}  # test rows of the class
    low, high = rows["retrained"]["attacks"]["ulira"]["auc_interval"]
    assert low <= 0.5 <= high


def test_the_best_attack_on_noise_is_computed(tmp_path, feature_file):
    methods, sigma = ["original", "retrained", "unlearned_minus", "unlearned_plus"], 1e-3
    config = config_for(feature_file, evaluation__attacks=["optimal_noise"], methods=methods, newton__noise_sigma=sigma)
    rows = run(config, tmp_path / "noisy")["rows"]
    config.newton.noise_sigma = 0.0
    run(config, tmp_path / "quiet")
    quiet = {name: load_head(tmp_path / "quiet" / "heads" / name).parameters_CE for name in methods}
    shift = float((quiet["unlearned_minus"] - quiet["retrained"]).norm()) / sigma
    figures = rows["unlearned_minus"]["attacks"]["optimal_noise"]
    assert figures["shift"] == pytest.approx(shift, rel=1e-6)
    assert figures["auc"] == pytest.approx(stats.norm.cdf(shift / np.sqrt(2)))
    assert figures["tpr_at_fpr_0.01"] == pytest.approx(stats.norm.cdf(stats.norm.ppf(0.01) + shift))
    assert rows["unlearned_plus"]["attacks"]["optimal_noise"]["auc"] == pytest.approx(0.5, abs=1e-6)
    assert "no noise was added" in rows["original"]["attacks"]["optimal_noise"]["note"]


def test_the_best_attack_is_that_of_sampled_heads():
    rng, shift = np.random.default_rng(0), 1.3
    members, others = rng.normal(shift, size=20_000), rng.normal(size=20_000)
    found, exact = measure(members, others, seed=0), exact_figures(shift)
    low, high = found["auc_interval"]
    assert low <= exact["auc"] <= high
    low, high = found["tpr_at_fpr_0.01_interval"]
    assert 0.95 * low <= exact["tpr_at_fpr_0.01"] <= 1.05 * high


def test_unknown_attacks_are_refused_with_the_list():
    with pytest.raises(
        ConfigError, match=r"evaluation\.attacks=lora is unknown. Choose one of entropy, lira, loss_thr"
    ):
        EvaluationSettings(attacks=["paper", "lora"])
    with pytest.raises(ConfigError, match="lists an attack twice"):
        EvaluationSettings(attacks=["paper", "paper"])
    with pytest.raises(ConfigError, match=r"evaluation\.shadows=4"):
        EvaluationSettings(shadows=4)


def test_the_experiment_makes_every_attack():
    config = composed("experiment=evaluation")
    assert (config.evaluation.attacks, config.evaluation.shadows) == (ALL, 64)


def test_a_run_makes_the_paper_s_attack_alone(tmp_path, feature_file):
    config = config_for(feature_file, methods=["original"])
    assert config.evaluation.attacks == ["paper"]
    row = run(config, tmp_path)["rows"]["original"]
    assert list(row["attacks"]) == ["paper"]
    assert row["attacks"]["paper"]["auc_gap"] is None
    assert not (tmp_path / "roc.json").exists()
