"""What a head holds that could give back a row, or break a certificate, is in a file for its owner alone."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch.nn.functional import cosine_similarity

from sfu.errors import ArtifactError
from sfu.files import copy_file
from sfu.heads.certificate import Certificate
from sfu.heads.files import load_head
from sfu.heads.kept import Kept
from sfu.heads.linear import LinearHead
from sfu.heads.projections import DIRECTIONS, projected
from sfu.heads.settings import Keep, LinearSettings, SketchKind
from sfu.heads.sketch import Sketch
from sfu.heads.train import train_head
from sfu.losses.base import make_loss
from tests.conftest import make_arrays


def secretive(seed: int = 0) -> LinearHead:
    torch.manual_seed(seed)
    weights = torch.randn(3, 5).double()
    certificate = Certificate(2.0, torch.randn(3, 5).double(), 0.25)
    hessian = torch.randn(3, 5, 5).double()
    sketch = Sketch.encode(hessian @ hessian.mT, SketchKind.cholesky)
    projected = torch.rand(2, DIRECTIONS).double()
    kept = Kept(2.5, torch.tensor([0.2, 0.3, 0.5]).double(), weights[0], sketch, hessian, projected_2K=projected)
    return LinearHead(weights, 0.1 * weights, 0.01, 77, False, make_loss("logistic"), kept, None, certificate)


@pytest.fixture
def _everyone_may_read():
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("_everyone_may_read")
def test_secrets_are_a_file_of_their_owner_and_come_back(tmp_path):
    head = secretive()
    paths = head.save(tmp_path / "v1.5")
    assert [path.name for path in paths] == ["v1.5.safetensors", "v1.5.json", "v1.5.secret"]
    assert [mode(path) for path in paths] == [0o666, 0o666, 0o600]
    assert set(load_file(tmp_path / "v1.5.safetensors")) == {"parameters", "gradient"}
    back = load_head(tmp_path / "v1.5")
    assert torch.equal(back.kept.data_hessian, head.kept.data_hessian)
    assert torch.equal(back.kept.mean_D, head.kept.mean_D)
    assert torch.equal(back.kept.projected_2K, head.kept.projected_2K)
    assert torch.equal(back.kept.sketch.decode(), head.kept.sketch.decode())
    assert (back.kept.bound, back.kept.shares_C.tolist()) == (head.kept.bound, head.kept.shares_C.tolist())
    assert torch.equal(back.certificate.noise_CE, head.certificate.noise_CE)
    for name in ("safetensors", "json", "secret"):
        copy_file(tmp_path / f"v1.5.{name}", tmp_path / f"copy.{name}")
    assert mode(tmp_path / "copy.secret") == 0o600
    assert torch.equal(load_head(tmp_path / "copy").kept.data_hessian, head.kept.data_hessian)


def test_a_head_without_its_secrets_classifies_and_says_what_it_cannot_do(tmp_path):
    head = secretive()
    head.save(tmp_path / "a")
    (tmp_path / "a.secret").unlink()
    back = load_head(tmp_path / "a").to(torch.device("cpu"), torch.float32)
    assert (back.kept.mean_D, back.kept.sketch, back.kept.data_hessian) == (None, None, None)
    assert back.kept.projected_2K is None
    assert back.kept.bound == 2.5
    assert back.logits(torch.randn(4, 5)).shape == (4, 3)
    for ask in (lambda: back.rows_gradient_CE, lambda: back.objective_of(77.0)):
        with pytest.raises(ArtifactError, match=r"its noise is not here\. .*Put the file of its noise \(\.secret\)"):
            ask()
    back.save(tmp_path / "b")
    assert not (tmp_path / "b.secret").exists()


def test_secrets_of_another_head_are_never_taken(tmp_path):
    secretive().save(tmp_path / "a")
    secretive(1).save(tmp_path / "b")
    (tmp_path / "b.secret").replace(tmp_path / "a.secret")
    with pytest.raises(ArtifactError, match="belongs to another head"):
        load_head(tmp_path / "a")
    zero = torch.zeros(3, 5).double()
    LinearHead(zero, zero, 0.01, 77).save(tmp_path / "a")
    assert not (tmp_path / "a.secret").exists()
    assert load_head(tmp_path / "a").kept.data_hessian is None
    (tmp_path / "a.secret").write_bytes(b"damaged")
    with pytest.raises(ArtifactError, match="cannot be read"):
        load_head(tmp_path / "a")


def test_heads_of_0_1_with_their_secrets_inside_are_read(tmp_path):
    head = secretive()
    tensors, settings, secret = head.save(tmp_path / "old")
    inside = load_file(tensors) | load_file(secret)
    secret.unlink()
    save_file(inside, tensors)
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"schema": 2}))
    back = load_head(tmp_path / "old")
    assert torch.equal(back.certificate.noise_CE, head.certificate.noise_CE)
    assert torch.equal(back.kept.data_hessian, head.kept.data_hessian)


def test_heads_from_before_there_was_a_bound_are_read(tmp_path):
    head = secretive()
    _, settings, _ = head.save(tmp_path / "old")
    about = json.loads(settings.read_text())
    del about["kept"]
    settings.write_text(json.dumps(about | {"schema": 4}))
    back = load_head(tmp_path / "old")
    assert (back.kept.bound, back.kept.shares_C) == (None, None)
    assert torch.equal(back.kept.data_hessian, head.kept.data_hessian)


def test_two_heads_give_back_a_row_roughly():
    """Why no head is uploaded by default: the figure of docs/reporting.md."""
    pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    features, order = pixels / 16, torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    users, others = order[:1000], features[order[1000:]]
    config, where = LinearSettings(l2=5e-4), {"device": torch.device("cpu"), "dtype": torch.float64}
    hessian = others.T @ others / len(others) + config.l2 * torch.eye(64).double()
    by_heads, by_mean = [], []
    for number in range(10):
        kept = torch.arange(len(users)) != number
        original, retrained = (
            train_head(features[rows], labels[rows], 10, config, make_loss("quadratic"), seed=0, **where)
            for rows in (users, users[kept])
        )
        moved = (original.parameters_CE - retrained.parameters_CE) @ hessian
        row = features[users[number]]
        by_heads.append(abs(float(cosine_similarity(torch.linalg.svd(moved).Vh[0], row, dim=0))))
        by_mean.append(float(cosine_similarity(others.mean(0), row, dim=0)))
    assert sum(by_heads) / 10 == pytest.approx(0.964, abs=5e-3)
    assert sum(by_mean) / 10 == pytest.approx(0.846, abs=5e-3)


def test_two_stored_summaries_give_back_the_row_that_tells_them_apart(tmp_path):
    """Why a summary is a secret: docs/contract.md. Without the secret files Hessians and moments are gone."""
    arrays = make_arrays()
    features, labels = (torch.from_numpy(arrays[key]) for key in ("train_features", "train_labels"))
    forgotten = 17
    kept = torch.arange(len(labels)) != forgotten
    heads = []
    for name, rows in (("original", kept | True), ("retrained", kept)):
        config = LinearSettings(l2=1e-2, keep=Keep.full)
        where = {"device": torch.device("cpu"), "dtype": torch.float64}
        head = train_head(features[rows], labels[rows], 4, config, make_loss("quadratic"), seed=0, **where)
        head.save(tmp_path / name)
        heads.append(load_head(tmp_path / name))
    total = [head.n_train * head.kept.data_hessian for head in heads]
    row = torch.linalg.eigh(total[0] - total[1]).eigenvectors[:, -1]
    found = cosine_similarity(row, features[forgotten].double(), dim=0)
    assert abs(float(found)) == pytest.approx(1.0, abs=1e-9)
    first, second = (head.n_train * head.kept.projected_2K for head in heads)
    along = projected(features[forgotten : forgotten + 1])
    torch.testing.assert_close(first - second, torch.cat([along, along.square()]), rtol=1e-9, atol=1e-9)
    for path in tmp_path.glob("*.secret"):
        assert mode(path) == 0o600
        path.unlink()
    for name in ("original", "retrained"):
        kept = load_head(tmp_path / name).kept
        assert (kept.data_hessian, kept.projected_2K) == (None, None)
