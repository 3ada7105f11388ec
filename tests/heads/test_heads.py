from __future__ import annotations

import json
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sfu.errors import ArtifactError, DataError, SingularHessianError, SolverError
from sfu.files import file_digest
from sfu.heads.base import Head
from sfu.heads.certificate import Certificate
from sfu.heads.files import load_head
from sfu.heads.kept import Kept
from sfu.heads.linear import LinearHead
from sfu.heads.settings import AdamSettings, LinearSettings, SketchKind, Training
from sfu.heads.sketch import Sketch
from sfu.heads.train import train_head
from sfu.losses.base import make_loss
from sfu.losses.quadratic import Quadratic
from sfu.operators.explicit import solve_positive_definite
from tests.conftest import make_arrays


def tensors(seed: int = 0, **sizes: int):
    arrays = make_arrays(seed=seed, **sizes)
    return torch.from_numpy(arrays["train_features"]), torch.from_numpy(arrays["train_labels"])


def fit(features, labels, *, l2, bias=False, loss=None, **settings):
    """Exact training through the one entry."""
    config = LinearSettings(l2=l2, bias=bias, **settings)
    where = {"device": torch.device("cpu"), "dtype": torch.float64}
    return train_head(features, labels, int(labels.max()) + 1, config, loss or Quadratic(), seed=0, **where)


@pytest.mark.parametrize("bias", [False, True])
def test_exact_training_agrees_with_scikit_learn(bias):
    from sklearn.linear_model import Ridge

    features, labels = tensors()
    head = fit(features, labels, l2=1e-2, bias=bias, loss=Quadratic(target_scale=3.0))
    hot = 3.0 * np.eye(4)[labels.numpy()]
    ridge = Ridge(alpha=400 * 1e-2, fit_intercept=bias).fit(features.double().numpy(), hot)
    np.testing.assert_allclose(head.weight_CD.numpy(), ridge.coef_, rtol=1e-9, atol=1e-11)
    if bias:
        np.testing.assert_allclose(head.parameters_CE[:, -1].numpy(), ridge.intercept_, rtol=1e-9, atol=1e-11)
    assert float(head.gradient_CE.norm()) < 1e-13


def test_a_singular_gram_matrix_is_refused_and_l2_is_the_remedy():
    features, labels = tensors()
    features = torch.cat([features, features[:, :1]], 1)
    with pytest.raises(SingularHessianError, match=r"400 training rows plus head\.l2=0 .*Set head\.l2"):
        fit(features, labels, l2=0.0)
    assert fit(features, labels, l2=1e-6).n_train == 400


def test_features_far_from_the_origin_are_to_be_centred():
    """More l2 would not help: it is not the features' scatter that is singular, but the scatter beside their mean."""
    features, labels = tensors()
    far = features.double() + 1e4
    for loss, problem, l2 in (("quadratic", SingularHessianError, 1e-3), ("logistic", SolverError, 1e-3)):
        with pytest.raises(problem, match=r"is 8\.\de\+03 times as large as .* Subtract that mean") as told:
            fit(far, labels, l2=l2, bias=True, loss=make_loss(loss))
        assert "head.l2 above 0" not in str(told.value)
        assert "aise head.l2" not in str(told.value)
        assert fit(far - far.mean(0), labels, l2=l2, bias=True, loss=make_loss(loss)).n_train == 400
    with pytest.raises(SingularHessianError, match=r"plus head\.l2=1e-20 .*Raise head\.l2 \(1e-6 is small"):
        fit(torch.cat([features, features[:, :1]], 1), labels, l2=1e-20)
    with pytest.raises(SolverError, match=r"Raise head\.l2 \(at 0 .* or scale the features to rows of norm 1"):
        fit(features, labels, l2=1e-9, loss=make_loss("logistic"), max_iterations=1)


@pytest.mark.parametrize("spectrum", [[0.0, 1.0, 2.0], [-1.0, 1.0, 1.0], [1e-18, 1.0, 1.0]])
def test_solve_refuses_what_is_not_positive_definite(spectrum):
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        basis = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64)).Q
        matrix = basis @ torch.diag(torch.tensor(spectrum).double()) @ basis.T
        with pytest.raises(SingularHessianError, match=r"the thing is singular .* Do this"):
            solve_positive_definite(matrix, torch.eye(3).double(), "the thing", lambda: "Do this.")
        sound = matrix + (1.0 - min(spectrum)) * torch.eye(3).double()
        solved = solve_positive_definite(sound, torch.eye(3).double(), "the thing", str)
        torch.testing.assert_close(solved @ sound, torch.eye(3).double(), rtol=1e-9, atol=1e-9)


def test_adam_comes_near_the_optimum_and_keeps_its_true_gradient():
    features, labels = tensors()
    head, loss = LinearSettings(l2=1e-2, training=Training.adam), make_loss(name="quadratic")
    head.adam = AdamSettings(lr=1e-2, batch_size=64, max_epochs=30, patience=30, tolerance=0.0)
    where = {"device": torch.device("cpu"), "dtype": torch.float64}
    adam = train_head(features, labels, 4, head, loss, seed=1, **where)
    same = train_head(features, labels, 4, head, loss, seed=1, **where)
    other = train_head(features, labels, 4, head, loss, seed=2, **where)
    assert torch.equal(adam.parameters_CE, same.parameters_CE)
    assert not torch.equal(adam.parameters_CE, other.parameters_CE)
    head.training = Training.exact
    exact = train_head(features, labels, 4, head, loss, seed=1, **where)
    assert 0 < float((adam.parameters_CE - exact.parameters_CE).norm() / exact.parameters_CE.norm()) < 0.1
    design, hot = features.double(), torch.nn.functional.one_hot(labels, 4).double()
    expected = (design @ adam.parameters_CE.T - hot).T @ design / 400 + 1e-2 * adam.parameters_CE
    torch.testing.assert_close(adam.gradient_CE, expected, rtol=1e-9, atol=1e-13)


def test_adam_stops_early_when_nothing_improves():
    features, labels = tensors()

    def epochs(patience: int) -> int:
        config = AdamSettings(lr=1e-2, batch_size=64, max_epochs=500, patience=patience, tolerance=0.05)
        done: list[tuple[int, int]] = []
        head = LinearSettings(l2=1e-2, training=Training.adam, adam=config)
        train_head(
            features, labels, 4, head, make_loss(name="quadratic"), seed=0,
            device=torch.device("cpu"), dtype=torch.float64, progress=lambda *t: done.append(t),
        )  # fmt: skip
        assert done == [(epoch, 500) for epoch in range(1, len(done) + 1)]
        return len(done)

    assert 2 < epochs(2) == epochs(7) - 5


@pytest.mark.parametrize("bias", [False, True])
def test_a_saved_head_comes_back_whole(tmp_path, bias):
    torch.manual_seed(0)
    head = LinearHead(
        torch.randn(3, 5).double(), torch.randn(3, 5).double(), 0.01, 77, bias, Quadratic(target_scale=2.0)
    )
    paths = head.save(tmp_path / "deep" / "head.v1")
    back = load_head(tmp_path / "deep" / "head.v1")
    assert all(path.is_file() for path in paths)
    assert torch.equal(back.parameters_CE, head.parameters_CE)
    assert torch.equal(back.gradient_CE, head.gradient_CE)
    assert (back.l2, back.n_train, back.bias, back.loss) == (0.01, 77, bias, head.loss)


def test_damaged_missing_foreign_and_mismatched_heads_are_refused(tmp_path):
    zero = torch.zeros(2, 3).double()
    LinearHead(zero, zero, 0.0, 5).save(tmp_path / "a")
    LinearHead(torch.zeros(2, 4).double(), torch.zeros(2, 4).double(), 0.0, 5).save(tmp_path / "b")
    with pytest.raises(ArtifactError, match="there is no head at"):
        load_head(tmp_path / "c")
    (tmp_path / "a.json").write_text((tmp_path / "b.json").read_text())
    with pytest.raises(ArtifactError, match="do not belong together"):
        load_head(tmp_path / "a")
    about = json.loads((tmp_path / "b.json").read_text())
    (tmp_path / "b.json").write_text(json.dumps(about | {"schema": 99}))
    with pytest.raises(ArtifactError, match="schema 99"):
        load_head(tmp_path / "b")
    (tmp_path / "a.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(ArtifactError, match="cannot be read"):
        load_head(tmp_path / "a")


@pytest.fixture
def certified():
    torch.manual_seed(0)
    weights = torch.randn(3, 5).double()
    certificate = Certificate(0.5, weights.clone(), 0.1, True)
    sketch = Sketch.encode(torch.eye(5), SketchKind.cholesky)
    kept = Kept(1.0, torch.tensor([0.2, 0.3, 0.5]).double(), weights[0], sketch, torch.eye(5).double())
    return LinearHead(weights, weights / 9, 0.01, 77, kept=kept, certificate=certificate)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"bias": "false"}, "bias='false': Input should be a valid boolean"),
        ({"bias": 1}, "bias=1"),
        ({"n_train": 1293.9}, r"n_train=1293\.9: Input should be a valid integer"),
        ({"n_train": True}, "n_train=True"),
        ({"n_train": 0}, "n_train=0"),
        ({"l2": -0.1}, r"l2=-0\.1"),
        ({"l2": "0.1"}, "l2="),
        ({"weight": -3.0}, "weight="),
        ({"n_classes": None}, "n_classes=None"),
        ({"schema": "2"}, "schema='2'"),
        ({"kind": 3}, "kind=3"),
        ({"loss": "quadratic"}, "loss='quadratic'"),
        ({"loss": {}}, "loss has no name"),
        ({"loss": {"name": "quadratic", "target_scale": "1.0"}}, r"target_scale=1\.0\. Give a finite number above"),
        ({"loss": {"name": "quadratic", "target_scale": True}}, r"target_scale=True\. Give a finite number above"),
        ({"loss": {"name": "quadratic", "class_weights": ["1"]}}, r"loss\.class_weights"),
        ({"loss": {"name": "none"}}, r"loss=none is unknown\. Choose one of"),
        ({"loss": {"name": "quadratic", "target_scale": -1.0}}, r"loss\.target_scale=-1\.0"),
        ({"certificate": []}, "certificate"),
        ({"certificate": {"noise_std": -1.0, "residual_bound": 0.1}}, r"certificate\.noise_std=-1\.0"),
        ({"certificate": {"noise_std": 0.0, "residual_bound": 0.1}}, r"certificate\.noise_std=0\.0"),
        ({"certificate": {"noise_std": 1.0, "residual_bound": -0.1}}, r"certificate\.residual_bound=-0\.1"),
        ({"certificate": {"noise_std": 1.0, "residual_bound": None, "seeded": "no"}}, r"certificate\.seeded='no'"),
        ({"kept": {"bound": -1.0}}, r"kept\.bound=-1\.0"),
        ({"kept": {"bound": "1"}}, r"kept\.bound='1'"),
        ({"kept": {"shares": [0.5, 0.2, 1.3]}}, r"kept\.shares\.2=1\.3"),
        ({"kept": {"shares": [0.5, 0.5]}}, r"class shares are \[2\]"),
        ({"certificate": {"residual_bound": None}}, r"certificate\.noise_std: Field required"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_of_another_type_or_out_of_range_are_refused(tmp_path, certified, change, why):
    certified.save(tmp_path / "a")
    about = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps(about | change))
    with pytest.raises(ArtifactError, match=why):
        load_head(tmp_path / "a")


@pytest.mark.parametrize(
    "key", ["kind", "schema", "n_classes", "n_features", "l2", "n_train", "weight", "bias", "loss"]
)
def test_a_setting_that_is_missing_is_named(tmp_path, certified, key):
    certified.save(tmp_path / "a")
    about = json.loads((tmp_path / "a.json").read_text())
    del about[key]
    (tmp_path / "a.json").write_text(json.dumps(about))
    with pytest.raises(ArtifactError, match=rf"a\.json cannot be read \({key}: Field required.*Save the head again"):
        load_head(tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("parameters", lambda t: t.long(), "parameters is int64"),
        ("parameters", lambda t: t.bfloat16(), "parameters is bfloat16"),
        ("parameters", lambda t: t[0], r"of shape \[5\]"),
        ("parameters", lambda t: t / 0, "parameters has NaN or infinite values"),
        ("gradient", lambda t: t.half(), "gradient is float16"),
        ("gradient", lambda t: t[:, :2], "must both be"),
        ("data_hessian", lambda t: t * torch.nan, "data_hessian has NaN or infinite values"),
        ("data_hessian", lambda t: t.int(), "data_hessian is int32"),
        ("data_hessian", lambda t: t[:3, :3], r"data_hessian is \[3, 3\]"),
        ("mean", lambda t: t[:2], r"feature mean is \[2\]"),
        ("sketch_codes", lambda t: t.float(), r"sketch's codes are torch\.float32"),
        ("sketch_norms_BK", None, "the sketch has no tensor norms_BK"),
        ("noise", lambda t: t[:2], r"noise is \[2, 5\], but the head's parameters are \[3, 5\]"),
        ("noise", lambda t: t * torch.inf, "noise has NaN or infinite values"),
        ("parameters", None, "it has no tensor parameters"),
    ],
)
def test_tensors_of_another_kind_are_refused(tmp_path, certified, name, change, why):
    tensors, _, secret = certified.save(tmp_path / "a")
    files = {path: load_file(path) for path in (tensors, secret)}
    (path,) = [path for path, found in files.items() if name in found]
    value = files[path].pop(name)
    if change is not None:
        files[path][name] = change(value).contiguous()
    save_file(files[tensors], tensors)
    save_file(files[secret], secret, {"head": file_digest(tensors)})
    with pytest.raises(ArtifactError, match=why):
        load_head(tmp_path / "a")


@pytest.mark.parametrize(
    ("noise_std", "bound"), [(-1.0, 0.1), (0.0, 0.1), (float("nan"), 0.1), (1.0, -0.1), (1.0, float("inf"))]
)
def test_certificates_that_certify_nothing_are_refused(noise_std, bound):
    with pytest.raises(DataError, match=r"noise_std=|residual_bound="):
        Certificate(noise_std, torch.zeros(2, 2), bound)


@pytest.mark.parametrize("bias", [False, True])
def test_a_torch_layer_goes_in_and_comes_out(bias):
    layer = torch.nn.Linear(6, 3, bias=bias)
    head = LinearHead.from_module(layer, l2=0.1, n_train=9, loss="quadratic")
    rows = torch.randn(7, 6)
    torch.testing.assert_close(head.logits(rows), layer(rows).double(), rtol=1e-5, atol=1e-6)
    twin = torch.nn.Linear(6, 3, bias=bias)
    head.copy_to(twin)
    assert torch.equal(twin(rows), layer(rows))
    assert head.n_features == 6


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_heads_that_are_not_finite_are_refused(value):
    zero = torch.zeros(2, 3)
    with pytest.raises(DataError, match="NaN or infinite"):
        LinearHead(zero + value, zero, 0.0, 5)
    with pytest.raises(DataError, match="must both be"):
        LinearHead(zero, zero[:, :2], 0.0, 5)


def test_heads_are_saved_and_read_by_text_paths_too(tmp_path):
    head = LinearHead(torch.zeros(3, 4), torch.zeros(3, 4), 1e-2, 10)
    head.save(str(tmp_path / "head"))
    assert torch.equal(load_head(str(tmp_path / "head")).parameters_CE, head.parameters_CE)


def test_no_number_of_a_head_is_in_its_repr(certified):
    assert repr(certified).startswith(
        "LinearHead(3 classes, 5 features, bias=False, loss=quadratic, l2=0.01, n_train=77"
    )
    assert repr(certified.certificate) == "Certificate(noise_std=0.5, residual_bound=0.1, seeded=True)"
    kinds = {one.__repr__ for one in (Head.named(name, "kind") for name in ("linear", "linearised"))}
    assert kinds == {Head.__repr__}


def test_a_path_may_begin_at_home_and_must_have_a_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    head = LinearHead(torch.zeros(3, 4), torch.zeros(3, 4), 1e-2, 10)
    assert head.save("~/mine")[0] == tmp_path / "mine.safetensors"
    assert load_head("~/mine").n_train == 10
    for use in (head.save, load_head):
        with pytest.raises(ArtifactError, match=r"'\.' names no head\. Give the path of its files"):
            use("")


def test_a_list_of_class_weights_that_is_too_long_costs_no_time(tmp_path, certified):
    certified.save(tmp_path / "a")
    about = json.loads((tmp_path / "a.json").read_text())
    about |= {"n_classes": 9, "loss": {"name": "quadratic", "class_weights": [1.0] * 50_000}, "weight": 1.0}
    (tmp_path / "a.json").write_text(json.dumps(about))
    started = time.process_time()
    with pytest.raises(ArtifactError, match="do not belong together"):
        load_head(tmp_path / "a")
    assert time.process_time() - started < 1  # 10 s through OmegaConf
