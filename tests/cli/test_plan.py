"""The command sfu-plan, on features and on saved heads."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from sfu.cli.plan import main
from sfu.heads.settings import Keep, LinearSettings, SketchKind
from sfu.heads.sketch import Sketch
from sfu.heads.train import train_head
from sfu.losses.base import make_loss
from tests.conftest import make_arrays

L2 = 1e-3


@pytest.fixture(scope="module")
def arrays():
    return make_arrays(n_train=1600, n_test=1100)


@pytest.fixture
def features(tmp_path, arrays):
    np.savez(tmp_path / "features.npz", **arrays)
    return str(tmp_path / "features.npz")


def options(capsys, *arguments):
    main([*arguments, "--json"])
    told = json.loads(capsys.readouterr().out)
    return {one["kept"]: one for one in told["options"]}, told["remarks"]


def saved(tmp_path, arrays, keep, loss="quadratic"):
    config = LinearSettings(l2=L2, keep=keep)
    rows, labels = torch.from_numpy(arrays["train_features"]), torch.from_numpy(arrays["train_labels"])
    where = {"device": torch.device("cpu"), "dtype": torch.float64}
    head = train_head(rows, labels, 4, config, make_loss(loss), seed=0, **where)
    head.save(tmp_path / "head")
    return str(tmp_path / "head")


def test_every_choice_is_measured_on_features(capsys, features, arrays):
    found, remarks = options(capsys, features, f"head.l2={L2}")
    assert [*found] == [
        "weights alone", "bound (the default)", "1,000 unlabelled rows", "10,000 unlabelled rows", "sketch: cholesky",
        "sketch: eigenpairs", "full",
    ]  # fmt: skip
    for name in ("random_1", "random_10", "class"):
        distance = {kept: one[name]["distance"] for kept, one in found.items() if one[name] is not None}
        assert distance["full"] < 1e-6
        assert 0 < distance["sketch: cholesky"] < distance["1,000 unlabelled rows"] < 1
        assert found["sketch: cholesky"][name]["measured"]
    assert not found["10,000 unlabelled rows"]["random_10"]["measured"]
    assert found["10,000 unlabelled rows"]["class"] is None
    assert "class" in remarks[0]
    # one figure by hand: the first class, forgotten with a sketch
    middle = int(re.search(r"class (\d)", remarks[0])[1])
    rows, labels = arrays["train_features"].astype(float), arrays["train_labels"]
    hot, keep, eye = np.eye(4)[labels], labels != middle, np.eye(12)
    whole, gone = rows.T @ rows, rows[~keep].T @ rows[~keep]
    sketch = len(rows) * Sketch.encode(torch.from_numpy(whole / len(rows)), SketchKind.cholesky).decode()[0].numpy()
    values, vectors = np.linalg.eigh((sketch - gone) / keep.sum())
    estimate = (vectors * values.clip(0)) @ vectors.T + L2 * eye
    hessian = (whole - gone) / keep.sum() + L2 * eye
    original = np.linalg.solve(whole / len(rows) + L2 * eye, rows.T @ hot / len(rows))
    retrained = np.linalg.solve(hessian, rows[keep].T @ hot[keep] / keep.sum())
    gradient = hessian @ (original - retrained)
    left, nothing = original - np.linalg.solve(estimate, gradient) - retrained, original - retrained
    by_hand = np.sqrt((left * (hessian @ left)).sum() / (nothing * (hessian @ nothing)).sum())
    assert found["sketch: cholesky"]["class"]["distance"] == pytest.approx(by_hand, rel=1e-6)


def test_a_head_with_second_moments_predicts_what_is_measured(capsys, tmp_path, features, arrays):
    measured, _ = options(capsys, features, f"head.l2={L2}")
    predicted, remarks = options(capsys, saved(tmp_path, arrays, Keep.full))
    assert remarks == ["Whole classes cannot be predicted from a head. Give a file of features."]
    assert predicted["weights alone"]["random_1"] is None  # 16 rows are too few for 12 features
    for kept, name, factor in (
        ("weights alone", "random_10", 1.4),
        ("sketch: cholesky", "random_1", 2), ("sketch: cholesky", "random_10", 2),
        ("sketch: eigenpairs", "random_10", 2),
    ):  # fmt: skip
        one, other = (found[kept][name] for found in (predicted, measured))
        assert (one["measured"], other["measured"]) == (False, True)
        assert 1 / factor < one["distance"] / other["distance"] < factor, kept
    for kept in ("sketch: cholesky", "sketch: eigenpairs", "full"):
        assert predicted[kept]["bytes"] == measured[kept]["bytes"]


def test_a_sketch_predicts_as_the_full_hessian_does(capsys, tmp_path, arrays):
    found = {}
    for keep in (Keep.full, Keep.sketch):
        found[keep], _ = options(capsys, saved(tmp_path, arrays, keep) + ".json")
    for kept in ("weights alone", "sketch: cholesky", "sketch: eigenpairs"):
        full, sketch = (found[keep][kept]["random_10"]["distance"] for keep in (Keep.full, Keep.sketch))
        assert 0.5 < sketch / full < 2, kept


@pytest.mark.parametrize(
    ("keep", "loss", "why"),
    [(Keep.bound, "quadratic", "it keeps no second moments"), (Keep.full, "logistic", "its loss is logistic")],
)
def test_what_cannot_be_predicted_is_said(capsys, tmp_path, arrays, keep, loss, why):
    found, remarks = options(capsys, saved(tmp_path, arrays, keep, loss))
    assert remarks == [f"Distances cannot be predicted from this head, because {why}. Give a file of features."]
    assert found["sketch: cholesky"]["random_10"] is None
    assert (found["full"]["random_10"] is None) == (loss == "logistic")
    numbers = 8 * (2 + 4 + 12)
    assert found["full"]["bytes"] == numbers + 8 * (144 if loss == "quadratic" else 4 * 144)


def test_the_table_fits_80_columns_and_says_what_it_means(capsys, monkeypatch, tmp_path, features, arrays):
    stem = saved(tmp_path, arrays, Keep.sketch)
    monkeypatch.chdir(tmp_path)  # so that paths are short
    for source in ([os.path.relpath(features), "loss=softmax", "head.bias=true"], [os.path.relpath(stem)]):
        main(source)
        shown = capsys.readouterr().out
        assert shown.startswith(source[0])
        assert max(map(len, shown.splitlines())) <= 80
        assert "0 is Retrained and 1 is doing nothing" in shown
        assert re.search(r"^full +[\d,]+ +~?0\.\d{3} +~?0\.\d{3} +\S+  second moments, mean$", shown, re.M)


def test_a_hessian_that_is_too_large_is_left_out_with_the_reason(capsys, tmp_path):
    arrays = make_arrays(n_train=200, n_test=60, n_features=520)  # 2,080 parameters
    np.savez(tmp_path / "wide.npz", **arrays)
    found, remarks = options(capsys, str(tmp_path / "wide.npz"), "loss=softmax")
    assert "full" not in found
    assert re.match(r"Sketches and the full Hessian are left out: head\.keep=full does not fit this head", remarks[0])
    found, remarks = options(capsys, saved(tmp_path, arrays, Keep.bound, "softmax"))
    assert "full" not in found
    assert "left out: head.keep=full does not fit this head" in remarks[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], r"nothing is neither a file of features nor a saved head .*Give the path of an \.npz"),
        (["FEATURES", "head.l3=1"], r"head\.l3 is not a setting of head=linear"),
        (["FEATURES", "head=linearised"], r"trains a linear head on the file that you give\. Leave head="),
        (["HEAD", "head.l2=1"], r"head\.l2=1 does not apply to a saved head, .*Leave it out"),
        (["table.csv"], r"dataset\.path=table\.csv ends in '\.csv'\. sfu reads \.npz and \.safetensors"),
    ],
)
def test_errors_name_the_cause_and_the_remedy(capsys, tmp_path, monkeypatch, features, arrays, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text("1,2")
    places = {"FEATURES": features, "HEAD": saved(tmp_path, arrays, Keep.bound)}
    with pytest.raises(SystemExit) as stopped:
        main([places.get(one, one) for one in arguments])
    assert stopped.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("sfu-plan: ")
    assert re.search(message, error)


def test_its_help_needs_no_torch():
    code = (
        "import sys, contextlib; from sfu.cli.plan import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "print([name for name in ('torch', 'hydra', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "HEAD_OR_FEATURES" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
