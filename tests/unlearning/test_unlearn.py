from __future__ import annotations

import re
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import sfu
from sfu.curvature.settings import Regularization
from sfu.errors import ConfigError, DataError, TimeLimitError
from sfu.losses.base import make_loss
from sfu.losses.logistic import Logistic
from sfu.losses.softmax import Softmax
from tests.conftest import make_arrays
from tests.unlearning.cases import rows, trained

HEAD = sfu.LinearHead(torch.zeros(4, 12), torch.zeros(4, 12), 1e-3, 400)
README = Path(__file__).resolve().parents[2] / "README.md"


def trained_layer(bias: bool):
    """A torch layer at the optimum of the ridge objective, trained without sfu."""
    arrays = make_arrays()
    features = torch.from_numpy(arrays["train_features"]).double()
    labels = torch.from_numpy(arrays["train_labels"])
    design = torch.cat([features, torch.ones(400, 1).double()], 1) if bias else features
    penalty = 1e-3 * torch.eye(design.shape[1]).double()
    if bias:
        penalty[-1, -1] = 0

    def fit(rows: slice | torch.Tensor) -> torch.Tensor:
        x, y = design[rows], torch.nn.functional.one_hot(labels[rows], 4).double()
        return torch.linalg.solve(x.T @ x / len(x) + penalty, x.T @ y / len(x)).T

    layer = torch.nn.Linear(12, 4, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        optimum = fit(slice(None))
        layer.weight.copy_(optimum[:, :12])
        if bias:
            layer.bias.copy_(optimum[:, 12])
    return layer, features, labels, fit(slice(80, None))


@pytest.mark.parametrize("bias", [False, True])
def test_a_torch_layer_is_brought_nearer_to_its_retrained_self(bias):
    layer, features, labels, retrained = trained_layer(bias)
    head = sfu.LinearHead.from_module(layer, l2=1e-3, n_train=400, loss="quadratic")
    result = sfu.unlearn(head, features[:80], labels[:80])
    assert isinstance(result, sfu.UnlearningResult)
    before = float((head.parameters_CE - retrained).norm())
    after = float((result.head.parameters_CE - retrained).norm())
    assert after < 0.7 * before
    assert result.predicted_distance_gain > 0
    again = sfu.unlearn(head, features[:80], labels[:80])
    assert torch.equal(again.head.parameters_CE, result.head.parameters_CE)


def test_what_needs_the_retained_data_is_refused():
    layer, features, labels, _ = trained_layer(False)
    head = sfu.LinearHead.from_module(layer, l2=1e-3, n_train=400, loss="quadratic")
    exact = sfu.curvature_settings(estimator="exact", regularization=Regularization.none)
    with pytest.raises(ConfigError, match="needs the retained data"):
        sfu.unlearn(head, features[:80], labels[:80], curvature=exact)
    with pytest.raises(ConfigError, match=r"curvature\.perturbations=0"):
        sfu.unlearn(head, features[:80], labels[:80], curvature=sfu.curvature_settings(perturbations=0))


def test_a_float32_model_goes_on_working_after_the_swap():
    layer, features, labels, _ = trained_layer(True)
    model = torch.nn.Sequential(torch.nn.Flatten(), layer).float()
    before = model(features[:5].float())
    result = sfu.unlearn(
        sfu.LinearHead.from_module(model[1], l2=1e-3, n_train=400, loss="quadratic"), features[:80], labels[:80]
    )
    result.head.copy_to(model[1])
    after = model(features[:5].float())
    assert after.dtype == torch.float32
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, result.head.logits(features[:5]).float(), rtol=1e-5, atol=1e-5)
    with pytest.raises(DataError, match="without bias"):
        result.head.copy_to(torch.nn.Linear(12, 4, bias=False))


def test_settings_by_name_mean_what_they_say():
    layer, features, labels, _ = trained_layer(False)
    head = sfu.LinearHead.from_module(layer, l2=1e-3, n_train=400, loss="quadratic")
    typed = sfu.unlearn(head, features[:80], labels[:80], curvature=sfu.curvature_settings(estimator="closed_form"))
    for named in (
        {"estimator": "closed_form"},
        sfu.curvature_settings(estimator="closed_form", regularization="cross_validated", structure="auto"),
    ):
        again = sfu.unlearn(head, features[:80].numpy(), labels[:80].numpy(), curvature=named)
        assert torch.equal(again.head.parameters_CE, typed.head.parameters_CE)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"curvature": {"estimater": "oas"}}, ConfigError, "estimater.*takes estimator"),
        ({"curvature": {"estimator": "best"}}, ConfigError, r"curvature=best is unknown\. Choose one of closed_form"),
        ({"curvature": {"perturbations": 10.5}}, ConfigError, "perturbations|10.5"),
        ({"curvature": "closed_form"}, ConfigError, "curvature must be settings or a mapping of them, not str"),
        ({"on_doubt": "raise"}, ConfigError, r"on_doubt='raise' is unknown\. Choose 'withhold' or 'apply'\."),
        ({"time_limit": 0}, ConfigError, r"time_limit=0\. Give a finite number above 0\."),
        ({"time_limit": "soon"}, ConfigError, r"time_limit=soon"),
        ({"noise_sigma": float("nan")}, ConfigError, "noise_sigma=nan"),
        ({"noise_sigma": -1.0}, ConfigError, r"noise_sigma=-1"),
        ({"seed": -1}, ConfigError, "seed=-1"),
        ({"seed": 0.5}, ConfigError, r"seed=0\.5"),
        ({"labels": torch.zeros(80, dtype=torch.bool)}, DataError, r"has dtype bool\..*: labels\.long\(\)\."),
        ({"features": torch.zeros(80, 12, dtype=torch.complex64)}, DataError, "real numbers"),
        ({"features": torch.zeros(80, 11)}, DataError, "11 wide"),
        ({"features": torch.full((80, 12), float("nan"))}, DataError, r"in 80 of 80 rows \(first: row 0\)\. Remove"),
        ({"labels": torch.zeros(79, dtype=torch.int64)}, DataError, r"\[79\]"),
        ({"labels": np.full(80, np.nan)}, DataError, "labels .*float64"),
        ({"labels": None}, DataError, "labels are missing"),
        (
            {"features": torch.zeros(12)},
            DataError,
            r"row \[F, D\], such as features\[None\] for one example",
        ),
        ({"head": torch.nn.Linear(12, 4)}, ConfigError, r"record=None does not say how the model was trained"),
        ({"head": sfu.UnlearningResult(HEAD)}, DataError, r"head is a UnlearningResult, .*\. Give its \.head\."),
        ({"views": "flips.npy"}, DataError, "views hold 'flips.npy'"),
        ({"weights": ["a"]}, DataError, "weights hold 'a'"),
    ],
)
def test_python_settings_and_data_are_checked_like_the_command_lines(change, error, message):
    layer, features, labels, _ = trained_layer(False)
    head = sfu.LinearHead.from_module(layer, l2=1e-3, n_train=400, loss="quadratic")
    arguments = {"head": head, "features": features[:80], "labels": labels[:80], **change}
    with pytest.raises(error, match=message):
        sfu.unlearn(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"l2": -1.0}, ConfigError, "l2=-1"),
        ({"l2": float("nan")}, ConfigError, "l2=nan"),
        ({"l2": "small"}, ConfigError, "l2=small. Give a finite number of at least 0."),
        ({"n_train": 300.5}, ConfigError, r"n_train=300\.5"),
        ({"n_train": 0}, ConfigError, "n_train=0"),
        ({"n_train": np.bool_(True)}, ConfigError, "n_train=True"),
        ({"n_train": np.float64(400)}, ConfigError, r"n_train=400\.0"),
        ({"weight": -1.0}, ConfigError, r"weight=-1\.0"),
        ({"loss": "cross_entropy"}, ConfigError, r"loss=cross_entropy is unknown\..* Did you mean softmax\?"),
        (
            {"loss": torch.nn.CrossEntropyLoss()},
            ConfigError,
            r"^loss=CrossEntropyLoss is not a loss of sfu\. Give a name, such as loss='softmax'",
        ),
        ({"loss": torch.nn.MSELoss}, ConfigError, r"MSELoss'> is not a loss of sfu\. .* such as loss='quadratic'"),
        ({"loss": Logistic}, ConfigError, r"Logistic'> is not a loss of sfu\. .* such as loss='logistic'"),
        ({"module": torch.nn.Conv2d(3, 4, 3)}, DataError, "a convolution of kernel 1 x 1"),
        ({"module": torch.nn.LazyLinear(4)}, DataError, r"no weights yet \(it is a LazyLinear"),
        (
            {"module": torch.nn.Linear(12, 4, device="meta")},
            DataError,
            r"no weights yet \(it is a Linear on meta\)\. Load",
        ),
        ({"gradient_CE": "gradient.npy"}, DataError, "gradient_CE hold 'gradient.npy'"),
    ],
)
def test_heads_are_checked(change, error, message):
    arguments = {"module": torch.nn.Linear(12, 4), "l2": 0.1, "n_train": 400, "loss": "softmax", **change}
    with pytest.raises(error, match=message):
        sfu.LinearHead.from_module(arguments.pop("module"), **arguments)


@pytest.mark.parametrize("wrapped", [np.int64, np.array, torch.tensor])
def test_numbers_of_numpy_and_pytorch_are_numbers(wrapped):
    layer, features, labels, _ = trained_layer(False)
    plain = sfu.LinearHead.from_module(layer, l2=1e-3, n_train=400, loss="quadratic", weight=400.0)
    real = np.float64 if wrapped is np.int64 else wrapped
    head = sfu.LinearHead.from_module(layer, l2=real(1e-3), n_train=wrapped(400), loss="quadratic", weight=real(400.0))
    assert (type(head.n_train), type(head.l2), type(head.weight)) == (int, float, float)
    settings = {"perturbations": 30, "regularization": "fixed", "rho": 0.5}
    given = {**settings, "perturbations": wrapped(30), "rho": real(0.5)}
    calls = [
        {"noise_sigma": 0.5, "seed": 3, "batches": 2, "curvature": settings},
        {"noise_sigma": real(0.5), "seed": wrapped(3), "batches": wrapped(2), "curvature": given},
    ]
    one, other = (
        sfu.unlearn(mine, features[:80], labels[:80], **call).head.parameters_CE
        for mine, call in zip((plain, head), calls, strict=True)
    )
    assert torch.equal(one, other)
    weights = wrapped([1, 2, 3, 4]) if wrapped is not np.int64 else list(map(np.int64, (1, 2, 3, 4)))
    assert make_loss("softmax", class_weights=weights).class_weights == (1.0, 2.0, 3.0, 4.0)
    assert Softmax(class_weights=weights).class_weights == (1.0, 2.0, 3.0, 4.0)


def test_dead_features_have_nothing_to_unlearn():
    head = sfu.LinearHead.from_module(torch.nn.Linear(12, 4, bias=False), l2=0.0, n_train=400, loss="quadratic")
    result = sfu.unlearn(head, torch.zeros(40, 12), torch.arange(40) % 4)
    assert torch.equal(result.head.parameters_CE, head.parameters_CE)
    assert not result.applied


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_form_of_a_request_gives_the_same_head(dtype):
    layer, features, labels, _ = trained_layer(True)
    head = sfu.LinearHead.from_module(layer, l2=1e-3, n_train=400, loss="quadratic")
    features, labels = features[:80].to(dtype), labels[:80]
    wanted = sfu.unlearn(head, features.double(), labels).head.parameters_CE
    rows = TensorDataset(features, labels)
    as_array = features.float().numpy() if dtype == torch.bfloat16 else features.numpy()
    for form in (
        (features.requires_grad_(), labels.to(torch.int16)), (as_array, labels.numpy()),
        (features.tolist(), labels.tolist()), (DataLoader(rows, batch_size=32),), (rows,),
    ):  # fmt: skip
        assert torch.equal(sfu.unlearn(head, *form).head.parameters_CE, wanted)
    assert torch.equal(head.logits(as_array.tolist()), head.logits(features))
    with pytest.raises(DataError, match=r"features are \[12\], but the head takes \[rows, 12\]"):
        head.logits(features[0])


def test_the_default_device_and_dtype_of_pytorch_change_nothing():
    layer, features, labels, _ = trained_layer(True)

    def unlearned() -> torch.Tensor:
        head = sfu.LinearHead.from_module(layer, l2=1e-3, n_train=400, loss="quadratic")
        result = sfu.unlearn(head, features[:80].numpy(), labels[:80].tolist(), noise_sigma=1e-3)
        result.head.copy_to(torch.nn.Linear(12, 4, dtype=torch.float64, device="cpu"))
        return result.head.parameters_CE

    wanted = unlearned()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert torch.equal(unlearned(), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_examples_and_head_may_be_on_different_devices():
    layer, features, labels, _ = trained_layer(True)
    wanted = sfu.unlearn(
        sfu.LinearHead.from_module(layer, l2=1e-3, n_train=400, loss="quadratic"), features[:80], labels[:80]
    )
    head = sfu.LinearHead.from_module(layer.cuda(), l2=1e-3, n_train=400, loss="quadratic")
    for given in ((features[:80], labels[:80].cuda()), (features[:80].cuda(), labels[:80])):
        found = sfu.unlearn(head, *given)
        torch.testing.assert_close(found.head.parameters_CE.cpu(), wanted.head.parameters_CE, rtol=1e-8, atol=1e-10)
        found.head.copy_to(layer)


def test_a_step_in_doubt_is_applied_on_request_alone():
    layer, features, labels, _ = trained_layer(False)
    head = sfu.LinearHead.from_module(layer, l2=1e-3, n_train=400, loss="quadratic")
    given = (head, features[labels == 0], labels[labels == 0])
    withheld = sfu.unlearn(*given, request="class")
    assert (withheld.verdict, withheld.reasons) == ("withheld", ("unbounded",))
    assert withheld.note.endswith("(curvature.on_doubt=apply applies it)")
    applied = sfu.unlearn(*given, request="class", on_doubt="apply")
    same = sfu.unlearn(*given, request="class", curvature={"on_doubt": "apply"})
    assert applied.applied
    assert "forced" in applied.reasons
    assert torch.equal(applied.head.parameters_CE, same.head.parameters_CE)


class SlowModel(torch.nn.Module):
    """A classifier that takes 20 ms for a batch."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.layer, self.calls = layer, 0

    def forward(self, inputs):
        self.calls += 1
        time.sleep(0.02)
        return self.layer(inputs)


def test_a_time_limit_stops_every_stage_and_changes_nothing():
    layer, features, labels, _ = trained_layer(False)
    head = sfu.LinearHead.from_module(layer, l2=1e-3, n_train=400, loss="quadratic")
    before = head.parameters_CE.clone()
    with pytest.raises(TimeLimitError, match=r"time_limit=1e-06 seconds are over.*Nothing was changed\."):
        sfu.unlearn(head, features[:80], labels[:80], time_limit=1e-6)
    assert torch.equal(head.parameters_CE, before)
    free = sfu.unlearn(head, features[:80], labels[:80])
    timed = sfu.unlearn(head, features[:80], labels[:80], time_limit=600)
    assert torch.equal(free.head.parameters_CE, timed.head.parameters_CE)
    record = sfu.TrainingRecord(n_train=400, loss="quadratic", l2=1e-3)
    model, batches = SlowModel(layer), DataLoader(TensorDataset(features[:80], labels[:80]), batch_size=1)
    with pytest.raises(TimeLimitError, match=r"time_limit=0\.1 seconds"):
        sfu.unlearn(model, batches, record=record, in_place=True, time_limit=0.1)
    assert 0 < model.calls < 80
    assert torch.equal(layer.weight.detach(), before[:, : layer.in_features])


@pytest.mark.parametrize("estimator", ["psd_fit", "closed_form"])
@pytest.mark.parametrize("loss", ["quadratic", "softmax"])
def test_the_steps_of_every_estimator_look_at_the_time(estimator, loss):
    layer, features, labels, _ = trained_layer(False)
    head = sfu.LinearHead.from_module(layer, l2=1e-3, n_train=400, loss=loss)
    with mock.patch("sfu.operators.spectral.check_time") as look:
        sfu.unlearn(head, features[:80], labels[:80], curvature={"estimator": estimator, "on_doubt": "apply"})
    assert look.call_count >= 5  # once a fold at least


def test_features_that_are_not_the_layers_inputs_are_refused():
    layer, features, labels, _ = trained_layer(True)
    head = sfu.LinearHead.from_module(layer, l2=1e-3, n_train=400, loss="quadratic")
    with torch.no_grad():
        logits = layer(features[:80])
    wanted = sfu.unlearn(head, features[:80], labels[:80])
    for given in (logits, logits.half(), logits.numpy()):
        found = sfu.unlearn(head, features[:80], labels[:80], logits=given)
        assert torch.equal(found.head.parameters_CE, wanted.head.parameters_CE)
    told = r"differ by up to \d\S*, where the logits reach \d\S*\. Give the inputs of"
    for others in (2 * features[:80], torch.nn.functional.dropout(features[:80], 0.2), features[80:160]):
        with pytest.raises(DataError, match=told):
            sfu.unlearn(head, others, labels[:80], logits=logits)
    with pytest.raises(DataError, match=r"logits are \[80, 3\], but the head gives \[80, 4\]"):
        sfu.unlearn(head, features[:80], labels[:80], logits=logits[:, :3])
    with pytest.raises(DataError, match="where the logits reach inf"):
        sfu.unlearn(head, features[:80], labels[:80], logits=logits / 0)
    record = sfu.TrainingRecord(n_train=400, loss="quadratic", l2=1e-3)
    with pytest.raises(ConfigError, match="logits are for features of a head"):
        sfu.unlearn(layer, features[:80], labels[:80], record=record, logits=logits)


def test_the_own_model_section_of_the_readme_runs_as_it_is_written(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.S)
    head, (features, labels) = trained(Softmax(), bias=True), rows()
    layer = torch.nn.Linear(12, 4, dtype=torch.float64)
    head.copy_to(layer)
    model, before = torch.nn.Sequential(torch.nn.Identity(), layer), layer.weight.detach().clone()
    optimizer = torch.optim.AdamW([{"params": [layer.weight]}, {"params": [layer.bias], "weight_decay": 0.0}])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(features[:80], labels[:80]), batch_size=32)
    names = {"model": model, "criterion": torch.nn.CrossEntropyLoss(), "optimizer": optimizer, "forget_loader": loader}
    exec(code, names)
    assert "The rows were forgotten" in capsys.readouterr().out
    assert torch.equal(layer.weight, before)
    assert not torch.equal(names["model"][1].weight, before)


@pytest.mark.parametrize(("dtype", "warned"), [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)])
def test_a_layer_too_coarse_for_the_step_is_named(dtype, warned, caplog):
    layer, features, labels, _ = trained_layer(True)
    layer.to(dtype)
    result = sfu.unlearn(
        sfu.LinearHead.from_module(layer, l2=1e-3, n_train=20_000, loss="quadratic"), features[:80], labels[:80]
    )
    before = sfu.LinearHead.from_module(layer, l2=1e-3, n_train=20_000, loss="quadratic").parameters_CE
    result.head.copy_to(layer)
    after = sfu.LinearHead.from_module(layer, l2=1e-3, n_train=20_000, loss="quadratic").parameters_CE
    wanted = result.head.parameters_CE
    lost = float((after - wanted).norm() / (wanted - before).norm())
    told = re.findall(rf"the layer is {dtype}: rounding .* by (\d+) % of the change", caplog.text)
    assert bool(told) == warned == (lost > 0.1)
    if warned:
        assert float(told[0]) == pytest.approx(100 * lost, abs=0.5)


def test_unknown_names_are_not_found():
    with pytest.raises(AttributeError, match="no attribute 'learn'"):
        _ = sfu.learn
