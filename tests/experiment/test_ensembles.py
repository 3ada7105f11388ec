from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sfu.errors import ConfigError
from sfu.evaluation.distances import klom, klom_summary, label_margins
from sfu.experiment.config import EvaluationSettings
from sfu.heads.settings import Training
from sfu.heads.train import train_head
from sfu.losses.quadratic import Quadratic
from sfu.request import Access
from sfu.seeds import SeedSettings, derive_seed
from tests.conftest import make_arrays
from tests.experiment.cases import Probe, config_for, run

PARTS = ("forget", "test")


def test_exact_heads_are_bootstrapped_and_the_method_runs_on_each(feature_file: Path, tmp_path: Path):
    """KLoM of Original and Retrained against ensembles trained here, row by row from the seeds."""
    config = config_for(feature_file, evaluation__klom=2, forget__fraction=0.2)
    config.methods = ["original", "retrained", "unlearned_plus", "closed_form"]
    rows = run(config, tmp_path / "run")["rows"]
    for part in PARTS:
        plus = [rows["unlearned_plus"]["klom"][part][key] for key in ("mean", "percentile_50", "percentile_95")]
        exact = [rows["retrained"]["klom"][part][key] for key in ("mean", "percentile_50", "percentile_95")]
        assert plus == pytest.approx(exact, rel=1e-6)  # a Newton step with the retained rows is retraining
        assert rows["retrained"][f"klom_{part}"] == rows["retrained"]["klom"][part]["percentile_95"]
        assert rows["closed_form"]["klom"][part]["mean"] != pytest.approx(rows["original"]["klom"][part]["mean"])
    forget, retain = (split_of(tmp_path / "run")[name] for name in ("forget_indices", "retain_indices"))
    heads = {
        purpose: [drawn_head(config.head, forget if purpose == "member" else forget[:0], retain, purpose, n)
                  for n in range(2)]
        for purpose in ("member", "reference")
    }  # fmt: skip
    arrays = {name: torch.from_numpy(values) for name, values in make_arrays().items()}
    for part, features, labels in (
        ("forget", arrays["train_features"][forget], arrays["train_labels"][forget]),
        ("test", arrays["test_features"], arrays["test_labels"]),
    ):
        margins = [
            torch.stack([label_margins(head.logits(features), labels) for head in heads[purpose]])
            for purpose in ("member", "reference")
        ]
        assert rows["original"]["klom"][part] == pytest.approx(klom_summary(klom(*margins)), rel=1e-6)


def split_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "split.safetensors")


def drawn_head(settings, forget, retain, purpose, number):
    seed = derive_seed(SeedSettings().resolve(0)["evaluation"], f"klom {purpose} {number}")
    index = torch.randint(len(retain), (len(retain),), generator=torch.Generator().manual_seed(seed))
    index = torch.cat([retain[index], forget])
    features, labels = (torch.from_numpy(make_arrays()[name])[index] for name in ("train_features", "train_labels"))
    where = {"device": torch.device("cpu"), "dtype": torch.float64}
    return train_head(features, labels, 4, settings, Quadratic(), seed=0, **where)


def test_heads_of_a_recipe_differ_by_their_seed(feature_file: Path, tmp_path: Path):
    config = config_for(feature_file, evaluation__klom=2, forget__fraction=0.2, head__training=Training.sgd)
    config.head.sgd.epochs, config.methods = 2, ["original", "retrained"]
    seen, sees = Probe(lambda request, retained: request.head.n_train), []
    probe = Probe(lambda request, retained: sees.append(retained.features_RD), Access.RETAINED)
    rows = run(config, tmp_path / "run", methods={"probe": probe, "other": seen})["rows"]
    assert len(sees) == 3  # the run, and two members
    assert torch.equal(sees[1], sees[2])  # rows are not drawn
    assert rows["probe"]["klom"] == rows["other"]["klom"]
    assert rows["other"]["klom"]["forget"]["mean"] > 0


def test_a_row_that_fails_on_a_member_has_no_klom(feature_file: Path, tmp_path: Path):
    calls: list[int] = []

    def fail_later(request, retained):
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("no more")

    config = config_for(feature_file, evaluation__klom=2, forget__fraction=0.2)
    rows = run(config, tmp_path / "run", methods={"late": Probe(fail_later), "steady": Probe()})["rows"]
    assert (rows["late"]["klom"], rows["late"]["klom_forget"]) == (None, None)
    assert rows["late"]["distance"] == 1.0
    assert rows["steady"]["klom_forget"] > 0
    assert len(calls) == 2


def test_an_ensemble_of_one_is_refused_before_any_work():
    with pytest.raises(ConfigError, match=r"evaluation\.klom=1 is an ensemble without a spread"):
        EvaluationSettings(klom=1)
    assert EvaluationSettings(klom=2).klom == 2


def test_without_retrained_there_is_no_klom(feature_file: Path, tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr("sfu.experiment.rows._retrained", lambda run: None)
    config = config_for(feature_file, evaluation__klom=2, evaluation__theory=True, forget__fraction=0.2)
    config.methods = ["original", "closed_form"]
    rows = run(config, tmp_path / "run")["rows"]
    assert (rows["closed_form"]["klom"], rows["closed_form"]["klom_test"]) == (None, None)
    assert rows["closed_form"]["weight_distance"] is None
    assert rows["closed_form"]["theory"]["noise"]["shift"] is None
    assert rows["closed_form"]["theory"]["residual"]["difference"] < 1e-8
    assert "KLoM needs a retrained head" in caplog.text
