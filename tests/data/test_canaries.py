"""Canaries: what is spoiled, what refuses them, and that Retrained never learned what they teach."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sfu.data.canaries import spoiled
from sfu.data.feature_data import make_feature_data
from sfu.data.settings import CanarySettings, ForgetSettings
from sfu.errors import ConfigError, DataError
from sfu.experiment.config import check_run
from tests.experiment.cases import composed, config_for, run

LABELS = np.arange(30) % 3
DATA = make_feature_data("made", np.random.default_rng(0).normal(size=(30, 4)), LABELS, np.eye(4)[:3], LABELS[:3])


def spoil(**settings):
    return spoiled(DATA, CanarySettings(**settings), 0, normalized=False)


@pytest.mark.parametrize("label", [None, 1])
def test_wrong_labels_change_labels_alone(label):
    data, canaries = spoil(count=12, label=label)
    changed_N = data.train_labels_N != DATA.train_labels_N
    assert torch.equal(changed_N.nonzero()[:, 0], canaries.rows_F)
    assert (len(canaries.rows_F), canaries.trigger) == (12, None)
    assert torch.equal(data.train_features_ND, DATA.train_features_ND)
    assert label is None or set(data.train_labels_N[changed_N].tolist()) == {label}
    assert torch.equal(data.train_labels_N, spoil(count=12, label=label)[0].train_labels_N)  # always the same
    split = canaries.split(30, None)
    assert (split.kind, split.request, len(split.retain_R)) == ("canaries", "selected", 18)
    assert canaries.split(30, "random").request == "random"


def test_a_trigger_is_the_same_offset_on_all_canaries_and_no_other_row():
    data, canaries = spoil(count=5, kind="trigger", label=2, strength=0.5)
    shift_ND = data.train_features_ND - DATA.train_features_ND
    offset_D = canaries.trigger.offset_D
    assert torch.allclose(shift_ND[canaries.rows_F], offset_D.expand(5, 4))
    assert int((shift_ND != 0).any(1).sum()) == 5
    typical = DATA.train_features_ND.square().sum(1).mean().sqrt()
    assert float(offset_D.norm()) == pytest.approx(0.5 * float(typical))
    assert len(offset_D.abs().unique()) == 1
    assert set(data.train_labels_N[canaries.rows_F].tolist()) == {2}
    own = spoil(count=5, kind="trigger", trigger=[1.0, 0.0, 0.0, -2.0])[1].trigger
    assert own.added(torch.zeros(2, 4)).tolist() == [[1.0, 0.0, 0.0, -2.0]] * 2


def test_rows_of_norm_1_have_norm_1_with_the_trigger():
    settings = CanarySettings(count=3, kind="trigger", strength=2.0)
    data, canaries = spoiled(DATA, settings, 0, normalized=True)
    assert torch.allclose(data.train_features_ND[canaries.rows_F].norm(dim=1), torch.ones(3).double())


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"count": 30}, DataError, "canaries.count=30 is too many: there are 30 training rows, and some must stay"),
        ({"count": 21, "label": 1}, DataError, "too many: there are 20 training rows of other classes than 1"),
        ({"count": 2, "label": 3}, DataError, r"canaries\.label=3 is no class\. The classes are 0 \.\. 2"),
        ({"count": 2, "label": "x"}, DataError, r"canaries\.label=\['x'\]: 'x' is not a class"),
        ({"count": 2, "kind": "trigger", "trigger": [1.0, 2.0]}, ConfigError, "has 2 numbers, and the rows have 4"),
        ({"count": 0, "kind": "trigger"}, ConfigError, r"canaries\.count=0 spoils no row"),
        ({"count": 0, "label": 1}, ConfigError, r"canaries\.count=0 spoils no row"),
        ({"count": -1}, ConfigError, r"canaries\.count=-1"),
        ({"count": 1, "trigger": [1.0]}, ConfigError, "only applies to canaries.kind=trigger"),
        ({"count": 1, "kind": "patch"}, ConfigError, r"canaries\.kind=patch"),
    ],
)
def test_canaries_that_cannot_be_made_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        spoil(**settings)


def test_canaries_and_another_forget_set_exclude_each_other():
    config = composed("canaries.count=5")
    assert config.forget == ForgetSettings()  # no default fraction
    config.forget.classes = [1]
    with pytest.raises(ConfigError, match="makes the canaries the forget set"):
        check_run(config)


def over_fitted(tmp_path, arrays, **canaries):
    """A run on more random features than rows, which a head with next to no l2 fits exactly."""
    draw = np.random.default_rng(0).normal(size=(12, 600))
    wide = {name: np.tanh(values @ draw) if name.endswith("features") else values for name, values in arrays.items()}
    path = tmp_path / "wide.npz"
    np.savez(path, **wide)
    config = config_for(path, head__l2=1e-8, methods=["original", "retrained", "unlearned_plus"])
    for name, value in canaries.items():
        setattr(config.canaries, name, value)
    return run(config, tmp_path / "run")


def test_an_over_fitted_original_keeps_the_wrong_labels_and_retrained_does_not(tmp_path, arrays):
    metrics = over_fitted(tmp_path, arrays, count=40)
    rows = metrics["rows"]
    assert rows["original"]["canary_accuracy"] == rows["original"]["forget_accuracy"] == 100
    assert rows["retrained"]["canary_accuracy"] < 30  # 4 classes, three of which are wrong
    assert rows["original"]["canary_gap"] == pytest.approx(100 - rows["retrained"]["canary_accuracy"])
    assert rows["unlearned_plus"]["canary_gap"] == pytest.approx(0, abs=6)
    assert metrics["run"]["forget"]["kind"] == "canaries"
    assert metrics["run"]["data"]["n_forget"] == metrics["run"]["canaries"]["count"] == 40


def test_a_backdoor_works_on_test_rows_until_it_is_forgotten(tmp_path, arrays):
    rows = over_fitted(tmp_path, arrays, count=60, kind="trigger", label=2)["rows"]
    assert rows["original"]["canary_accuracy"] > 90
    assert rows["retrained"]["canary_accuracy"] < 60
    assert rows["original"]["test_accuracy"] > 60


def test_runs_without_canaries_do_not_speak_of_them(tmp_path, feature_file):
    metrics = run(config_for(feature_file, methods=["original", "retrained"]), tmp_path)
    assert "canary_accuracy" not in metrics["rows"]["original"]
    assert metrics["run"]["canaries"] is None
